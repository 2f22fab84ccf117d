"""The real training loop as torch's own profiler sees it: an account that shares no code with the dry run's recorder.

Three things are read from a profile. `gloo:…` is what the backend says it was given, whoever asked for it: FSDP,
DTensor, a pipeline's schedule or the loop. `aten::…` are operators with their shapes. `[memory]` is what torch's
allocator counts. gloo has no reduce-scatter of its own and runs an all-reduce of the same bytes.
"""

import gc
import json
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from danlu.comm.mesh import ParallelMesh
from danlu.dryrun.dry_run import assume_balanced_routing
from danlu.framework.batch_loader import BatchSource
from danlu.framework.build import build_train_state
from danlu.framework.loop import TrainStages, run_training_loop
from danlu.framework.stages import FixedData
from danlu.spec.recipe import Recipe
from danlu.spec.trace import Trace

STEPS = 3
"""Steps whose peaks are taken: gloo's own thread drops buffers late in some of them."""
LESS_URGENT = 5
"""Nice value of the loop's thread."""
_MARK = 7919
"""Bytes of a tensor that begins a step: an odd number, as no other tensor has."""
_BYTES = {"float": 4, "long int": 8, "c10::BFloat16": 2, "int": 4, "double": 8, "bool": 1, "unsigned char": 1}
_OPERATIONS = {
    "gloo:all_reduce": "all_reduce",
    "gloo:all_gather": "all_gather",
    "gloo:all_to_all": "all_to_all",
    "gloo:broadcast": "broadcast",
    "gloo:send": "send",
    "gloo:recv": "receive",
}
_AS_GLOO_DOES = {"reduce_scatter": "all_reduce"}
_PRODUCTS = ("mm", "bmm", "addmm", "_scaled_dot_product_flash_attention_for_cpu")

Calls = Counter[tuple[str, int]]
"""How often an operation was called with so many bytes of input."""
Products = Counter[tuple[str, str]]
"""How often a matrix product or an attention was computed with such shapes."""


@dataclass(frozen=True)
class Profiled:
    """What torch and gloo say of one step of one rank."""

    calls: Calls
    products: Products
    peaks: list[int]
    """Most bytes of torch's allocator in each of a few steps."""


def profiled_loop(
    recipe: Recipe, prepare: Callable[[], tuple[ParallelMesh, BatchSource]], even: bool = True
) -> Profiled:
    """Build and train a rank, and profile whole steps after the first; experts are loaded `even`ly or as routed.

    gloo's threads drop the buffers of a collective after they have said that it is done. On a crowded machine that
    can be many operators later, so the loop runs with less priority than they have. `prepare` is called in the loop's
    thread: torch 2.9 remembers by thread which mesh a mesh is a slice of.
    """

    def behind() -> Profiled:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LESS_URGENT)
        mesh, batches = prepare()
        return _profiled(recipe, mesh, batches, even)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(behind).result()


def _profiled(recipe: Recipe, mesh: ParallelMesh, batches: BatchSource, even: bool) -> Profiled:
    gc.collect()  # what an earlier layout left would be freed while this one is watched
    step = 0

    def take_step() -> None:
        nonlocal step
        step += 1
        stages = TrainStages(FixedData(batches), forward_backward)
        run_training_loop(recipe.model_copy(update={"steps": step}), state, mesh, stages)

    # Without shapes: those keep weak references to parameters, which building must be able to swap.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as allocations:
        state, forward_backward = build_train_state(recipe, mesh.plan, mesh)
        if even:
            assume_balanced_routing(state)
        take_step()
        alive = _alive()
        for _ in range(STEPS):
            torch.empty(_MARK, dtype=torch.uint8)
            take_step()
        torch.empty(_MARK, dtype=torch.uint8)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as operators:
        take_step()
    events = _events(operators)
    return Profiled(_calls(events), _products(events), _peaks(_events(allocations), alive))


def dry_calls(trace: Trace) -> Calls:
    """What a dry run says of its collectives, in gloo's terms."""
    calls: Calls = Counter()
    for call in trace.collectives:
        calls[_AS_GLOO_DOES.get(call.operation, call.operation), call.payload] += call.count
    return calls


def dry_products(trace: Trace) -> Products:
    """What a dry run says of its matrix products and attention."""
    products: Products = Counter()
    for operator in trace.operators:
        if (name := operator.name.removeprefix("aten.")) in _PRODUCTS:
            shapes = [[int(size) for size in text.partition("[")[2].rstrip("]").split(",")] for text in operator.inputs]
            products[name, json.dumps(shapes)] += operator.count
    return products


def _calls(events: list[dict[str, Any]]) -> Calls:
    calls: Calls = Counter()
    for event in events:
        if event["name"].startswith("gloo:"):
            ((shape,), (dtype,)) = event["args"]["Input Dims"], event["args"]["Input type"]
            calls[_OPERATIONS[event["name"]], _BYTES[dtype] * _product(shape)] += 1
    return calls


def _products(events: list[dict[str, Any]]) -> Products:
    """Innermost calls alone: a product of DTensors holds that of the local tensors."""
    found: Products = Counter()
    ends: dict[tuple[Any, str], tuple[float, tuple[str, str]]] = {}
    for event in events:
        name = event["name"].removeprefix("aten::")
        if name in _PRODUCTS:
            shapes = json.dumps([shape for shape in event["args"]["Input Dims"] if shape])
            outer = ends.get((event["tid"], name))
            if outer is not None and event["ts"] + event["dur"] <= outer[0]:
                found[outer[1]] -= 1
            found[name, shapes] += 1
            ends[event["tid"], name] = event["ts"] + event["dur"], (name, shapes)
    return +found


def _alive() -> int:
    """Bytes of all tensors between two steps: states, and whatever else somebody holds."""
    gc.collect()
    storages = {}
    for each in gc.get_objects():
        # By its type: some objects of torch warn when they are asked for their class.
        if issubclass(type(each), torch.Tensor) and not issubclass(type(each), DTensor | FakeTensor):
            storages[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return sum(storages.values())


def _peaks(events: list[dict[str, Any]], alive: int) -> list[int]:
    """Most bytes in every step, counted from those that were alive before it.

    The allocator's own total drifts: it does not hear of what gloo's threads free.
    """
    changes = [
        (event["args"]["Bytes"], event["args"]["Total Allocated"]) for event in events if event["name"] == "[memory]"
    ]
    marks = [number for number, (size, _) in enumerate(changes) if size == _MARK]
    # A mark itself is two entries: it comes and goes.
    return [alive + max(total for _, total in changes[a + 2 : b]) - changes[a + 1][1] for a, b in pairwise(marks)]


def _events(profiled: profile) -> list[dict[str, Any]]:
    """All events in the order of their time, the longer of two that begin together first."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    named = [event for event in events if "name" in event and "ts" in event]
    return sorted(named, key=lambda event: (event["ts"], -event.get("dur", 0)))


def _product(shape: list[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
