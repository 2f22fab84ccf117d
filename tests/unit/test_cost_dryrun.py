"""The formulas for Danlu's own memory, FLOPs and traffic, compared with its dry run."""

from dataclasses import replace
from functools import cache
from math import inf
from typing import Any

import pytest

from danlu.comm.rank_layout import dense_ranks
from danlu.cost.collectives import Link, Network
from danlu.cost.layout_cache import LayoutCache
from danlu.cost.memory import MemoryEstimate
from danlu.cost.muon import muon_work
from danlu.cost.parallel_layout import layout_from_plan
from danlu.cost.rank_memory import RankMemoryEstimator
from danlu.cost.software import token_dispatch
from danlu.cost.step_prediction import Predictor
from danlu.dryrun.dry_run import dry_run_ranks
from danlu.planner import PlanRequest
from danlu.planner.pricing import software_for
from danlu.spec.load import load_cluster, load_model
from danlu.spec.model import MLAConfig, Mtp
from danlu.spec.plan import Degrees, PipelineConfig, Plan
from danlu.spec.recipe import BatchConfig, DataConfig, OptimizerConfig, PrecisionConfig, Recipe
from danlu.spec.recompute import RecomputeLayers
from danlu.spec.trace import MEMORY_KINDS, Trace

POD = load_cluster("h100-pod")


def plan(schedule: str = "1f1b", per_rank: int = 1, **settings: Any) -> Plan:
    degrees = Degrees(**{axis: settings.pop(axis) for axis in list(settings) if axis in Degrees.model_fields})
    pipeline = PipelineConfig(schedule=schedule, stages_per_rank=per_rank, layers=settings.pop("layers", ()))
    return Plan(degrees=degrees, pipeline=pipeline, **settings)


DENSE = {
    "fsdp": (plan(shard=8), 8),
    "fsdp, recomputed, accumulated": (plan(shard=8, recompute="full", microbatches=2), 32),
    "fsdp, selective": (plan(shard=8, recompute="selective"), 8),
    "fsdp × tp, selective": (plan(shard=4, tp=8, recompute="selective"), 8),
    "fsdp, by layer": (plan(shard=8, recompute=RecomputeLayers(full="0-3", selective="4-5")), 8),
    "1f1b × tp, by layer": (plan(pp=2, shard=2, tp=2, microbatches=4, recompute=RecomputeLayers(full="2-5")), 8),
    "fsdp × tp, regathered": (plan(shard=2, tp=8, microbatches=2, regather_inputs=True), 8),
    "1f1b × tp, regathered": (plan(pp=2, shard=2, tp=4, microbatches=4, regather_inputs=True), 8),
    "zbv × tp, regathered": (plan("zbv", 2, pp=2, tp=4, shard=2, microbatches=4, regather_inputs=True), 8),
    "zero-bubble × tp, regathered": (
        plan("zero-bubble", 2, pp=4, tp=2, shard=2, microbatches=8, regather_inputs=True),
        16,
    ),
    "1f1b × tp, by layer, regathered": (
        plan(pp=2, shard=2, tp=2, microbatches=4, recompute=RecomputeLayers(full="2-5"), regather_inputs=True),
        8,
    ),
    "fsdp, reduced once": (plan(shard=8, microbatches=4, reduce_gradients="step"), 32),
    "fsdp × tp, kept, reduced once": (
        plan(shard=4, tp=2, microbatches=4, reduce_gradients="step", reshard_after_forward=False),
        32,
    ),
    "hsdp, accumulated, moments over all": (
        plan(replicate=4, shard=2, microbatches=2, shard_optimizer_over_replicas=True),
        32,
    ),
    "hsdp × tp, reduced once, moments over all": (
        plan(replicate=2, shard=2, tp=2, microbatches=2, reduce_gradients="step", shard_optimizer_over_replicas=True),
        32,
    ),
    "fsdp, loss in parts": (plan(shard=8, loss_chunks=8), 8),
    "fsdp × tp, loss in parts, recomputed": (plan(shard=4, tp=2, recompute="full", microbatches=2, loss_chunks=4), 32),
    "hsdp × cp": (plan(replicate=2, shard=4, cp=2), 8),
    "hsdp × cp, selective": (plan(replicate=2, shard=4, cp=2, recompute="selective"), 8),
    "hsdp × ring cp": (plan(replicate=2, shard=4, cp=2, context_parallel="ring"), 8),
    "hsdp × ring cp 4, selective": (
        plan(replicate=2, shard=2, cp=4, recompute="selective", context_parallel="ring"),
        8,
    ),
    "1f1b × ring cp × tp, recomputed": (
        plan(pp=2, shard=2, cp=4, tp=2, recompute="full", microbatches=4, context_parallel="ring"),
        8,
    ),
    "gpipe × tp": (plan("gpipe", pp=2, tp=2, shard=2, microbatches=4), 8),
    "gpipe, recomputed": (plan("gpipe", pp=2, shard=4, recompute="full", microbatches=4), 16),
    "1f1b, selective": (plan(pp=4, shard=4, recompute="selective", microbatches=6), 24),
    "1f1b, lighter last stage": (plan(pp=2, shard=4, microbatches=4, layers=(5, 3)), 16),
    "1f1b × cp × tp, recomputed": (plan(pp=2, shard=2, cp=2, tp=2, recompute="full", microbatches=4), 8),
    "interleaved × tp, selective": (
        plan("interleaved", 2, pp=4, tp=8, shard=2, recompute="selective", microbatches=8),
        16,
    ),
    "interleaved, recomputed": (plan("interleaved", 2, pp=4, shard=2, recompute="full", microbatches=8), 16),
    "interleaved, 4 stages a rank": (plan("interleaved", 4, pp=2, shard=2, microbatches=4), 8),
    "zero-bubble × tp": (plan("zero-bubble", 2, pp=4, tp=2, shard=2, microbatches=8), 16),
    "zbv × tp": (plan("zbv", 2, pp=4, tp=2, shard=2, microbatches=8), 16),
}
EXPERTS = {
    "ep": (plan(shard=8, ep=8), 8),
    "ep × tp, selective": (plan(shard=4, tp=2, ep=4, recompute="selective"), 8),
    "ep, in 4 parts": (plan(shard=8, ep=8, dispatch_chunks=4), 8),
    "1f1b × ep, in 2 parts, recomputed": (
        plan(pp=2, shard=8, ep=4, recompute="full", microbatches=4, dispatch_chunks=2),
        32,
    ),
    "ep × tp, regathered": (plan(shard=4, tp=4, ep=4, regather_inputs=True), 8),
    "ep, deduplicated": (plan(shard=8, ep=8, token_dispatcher="deduplicated"), 8),
    "ep, deduplicated, in 4 parts": (plan(shard=8, ep=8, token_dispatcher="deduplicated", dispatch_chunks=4), 8),
    "hsdp × ep over two levels, deduplicated": (
        plan(replicate=2, shard=16, ep=8, token_dispatcher="deduplicated", mapping={"ep": {"node": 4, "pod": 2}}),
        32,
    ),
    "1f1b × ep × tp, deduplicated, recomputed": (
        plan(pp=2, shard=4, tp=2, ep=8, recompute="full", microbatches=4, token_dispatcher="deduplicated"),
        16,
    ),
    "1f1b × ep, recomputed": (plan(pp=2, shard=4, ep=4, recompute="full", microbatches=4), 16),
    "ep, by layer": (plan(shard=8, ep=8, recompute=RecomputeLayers(selective="0-2", full="5-7")), 8),
    "interleaved × ep × tp": (plan("interleaved", 2, pp=2, shard=4, tp=2, ep=4, microbatches=4), 16),
}
DOCUMENTS = {
    "documents: fsdp": (plan(shard=8), 8),
    "documents: fsdp × cp × tp, recomputed": (plan(shard=2, cp=2, tp=2, recompute="full", microbatches=2), 8),
    "documents: hsdp × ring cp 4": (plan(replicate=2, shard=2, cp=4, context_parallel="ring"), 8),
    "documents: fsdp × ring cp × tp, recomputed": (
        plan(shard=2, cp=2, tp=2, recompute="full", microbatches=2, context_parallel="ring"),
        8,
    ),
    "documents: interleaved": (plan("interleaved", 2, pp=4, shard=2, microbatches=8), 16),
}
"""With documents kept apart by a mask."""
IN_FULL = {
    "fp32: fsdp": (plan(shard=8), 8),
    "fp32: fsdp × tp, selective": (plan(shard=4, tp=8, recompute="selective"), 8),
    "fp32: 1f1b × cp × tp, recomputed": (plan(pp=2, shard=2, cp=2, tp=2, recompute="full", microbatches=4), 8),
    "fp32: zbv × ring cp": (plan("zbv", 2, pp=4, cp=2, shard=2, microbatches=8, context_parallel="ring"), 16),
    "fp32: zbv × tp": (plan("zbv", 2, pp=4, tp=2, shard=2, microbatches=8), 16),
    "fp32: ep × tp, selective": (plan(shard=4, tp=2, ep=4, recompute="selective"), 8),
}
"""Computed in fp32, as on a CPU."""
MUON = {
    "muon: fsdp": (plan(shard=8), 8),
    "muon: fsdp × tp": (plan(shard=2, tp=4), 8),
    "muon: hsdp × tp": (plan(replicate=2, shard=2, tp=2), 8),
    "muon: 1f1b × hsdp": (plan(pp=2, replicate=2, shard=2, microbatches=4), 16),
    "muon: ep × tp": (plan(shard=4, tp=2, ep=4), 8),
    "muon: hsdp × ep, fewer experts than ranks": (plan(replicate=2, shard=16, ep=4), 32),
}
LATENT = {
    "latent: fsdp": (plan(shard=8), 8),
    "latent: fsdp × tp": (plan(shard=2, tp=4, microbatches=2), 8),
    "latent: fsdp × tp, selective": (plan(shard=4, tp=2, recompute="selective"), 8),
    "latent: fsdp × tp, recomputed": (plan(shard=2, tp=4, recompute="full"), 8),
    "latent: tp × 1f1b, regathered": (plan(pp=2, shard=2, tp=2, microbatches=4, regather_inputs=True), 8),
    "latent: hsdp × cp": (plan(replicate=2, shard=4, cp=2), 8),
    "latent: ep × tp": (plan(shard=4, tp=2, ep=4), 8),
    "latent: queries direct: fsdp × tp": (plan(shard=2, tp=4), 8),
}
"""With multi-head latent attention."""
MTP = {
    "mtp: fsdp": (plan(shard=8), 8),
    "mtp: fsdp × tp, recomputed": (plan(shard=4, tp=2, recompute="full", microbatches=2), 8),
    "mtp: 1f1b × tp": (plan(pp=2, shard=2, tp=2, microbatches=4), 8),
    "mtp: ep, selective": (plan(shard=8, ep=8, recompute="selective"), 8),
    "mtp: 1f1b, two layers": (plan(pp=2, shard=4, microbatches=4), 16),
}
"""With two modules of multi-token prediction."""
CHANGED: dict[str, dict[str, Any]] = {
    "mtp: 1f1b, two layers": {"layers": 2},  # its last rank is mostly logits
    "window: fsdp × cp × tp, recomputed": {"window": 1024},
    "window: 1f1b × tp": {"window": 1024, "global_every": 4},
    "sinks: fsdp × cp × tp": {"window": 512, "global_every": 2, "sinks": True},
    "sinks: fsdp, selective": {"sinks": True},
    "softcap: fsdp × tp, recomputed": {"window": 1024, "global_every": 2, "score_softcap": 50.0, "sinks": True},
}
"""What changes of the model: its size, layers with a window, attention whose scores are in memory."""
WINDOW_LAYOUTS = {
    "window: fsdp × cp × tp, recomputed": (plan(shard=2, cp=2, tp=2, recompute="full", microbatches=2), 8),
    "window: 1f1b × tp": (plan(pp=2, shard=2, tp=2, microbatches=4), 8),
    "sinks: fsdp × cp × tp": (plan(shard=2, cp=2, tp=2), 4),
    "sinks: fsdp, selective": (plan(shard=8, recompute="selective"), 8),
    "softcap: fsdp × tp, recomputed": (plan(shard=4, tp=2, recompute="full"), 4),
}
QUANTIZED = {
    "fp8: fsdp": (plan(shard=8), 8),
    "fp8: fsdp × tp": (plan(shard=2, tp=4, microbatches=2), 8),
    "fp8: 1f1b × tp, selective": (plan(pp=2, shard=2, tp=2, microbatches=4, recompute="selective"), 8),
    "fp8: ep": (plan(shard=8, ep=8), 8),
}
"""Inputs of matmuls are kept in fp8."""
LAYOUTS = DENSE | EXPERTS | DOCUMENTS | IN_FULL | MUON | LATENT | WINDOW_LAYOUTS | QUANTIZED | MTP
QUICK = {
    "hsdp × ring cp 4, selective",
    "documents: fsdp × cp × tp, recomputed",
    "ep × tp, selective",
    "fp32: fsdp",
    "latent: fsdp × tp, selective",
    "mtp: 1f1b, two layers",
    "sinks: fsdp × cp × tp",
}
CASES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in LAYOUTS]


def recipe_of(name: str) -> Recipe:
    """Eight layers of a model with experts or without."""
    wanted, sequences = LAYOUTS[name]
    model = load_model("mixtral-8x7b" if wanted.degrees.ep > 1 else "llama3-8b")
    ahead = {"mtp": Mtp(depth=2)} if name in MTP else {}
    model = model.model_copy(update={"layers": 8} | CHANGED.get(name, {}) | ahead)
    if name in LATENT:
        queries = None if "direct" in name else 1536
        mla = MLAConfig(
            q_lora_rank=queries, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128
        )
        model = model.model_copy(update={"mla": mla, "kv_heads": None, "head_width": None})
    return Recipe(
        name="dry",
        steps=1,
        model=model,
        data=DataConfig(shards="none", document_mask=name in DOCUMENTS),
        batch=BatchConfig(sequences=sequences, length=4096),
        precision=PrecisionConfig(
            compute="fp32" if name in IN_FULL else "bf16", matmul="fp8" if name in QUANTIZED else "none"
        ),
        optimizer=OptimizerConfig(kind="muon" if name in MUON else "adamw"),
    )


def formulas_of(recipe: Recipe, wanted: Plan) -> Predictor:
    """With nothing hidden behind anything; counts and bytes do not depend on that."""
    question = PlanRequest(recipe=recipe, cluster=POD, chips=wanted.degrees.world)
    own = software_for(
        question, wanted.recompute, regather_inputs=wanted.regather_inputs, dispatch=token_dispatch(wanted)
    )
    serial = replace(own, overlap_grad_reduce=False, overlap_p2p_comm=False, overlap_ring=False)
    return Predictor(recipe.decoder, recipe.batch, POD, serial, question.matmul_dtype)


@cache
def both(name: str) -> tuple[Predictor, Plan, dict[int, Trace]]:
    """The formulas of a layout, and the dry runs of its first and last pp rank."""
    recipe, (wanted, _) = recipe_of(name), LAYOUTS[name]
    first_of = dense_ranks(wanted, POD)[:, 0, 0, 0, 0].tolist()
    run = dry_run_ranks(recipe, wanted, POD, sorted({first_of[0], first_of[-1]}))
    return formulas_of(recipe, wanted), wanted, {trace.place["pp"]: trace for trace in run.traces}


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_within_a_tenth_of_the_dry_run(name: str) -> None:
    formulas, wanted, traces = both(name)
    memories: tuple[MemoryEstimate, ...] = formulas.memory_by_pp_rank(layout_from_plan(wanted, POD))
    for place, trace in traces.items():
        assert memories[place].allocated == pytest.approx(trace.peak.total, rel=0.08), place


@pytest.mark.full
@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 1), ("interleaved", 3), ("zero-bubble", 3)])
def test_bytes_of_every_rank_of_a_long_pipeline_are(schedule: str, stages: int) -> None:
    """Of ranks that hold the same, the first or the last is the fullest: what `peak` looks at."""
    short = recipe_of("zero-bubble × tp")
    changes = {"model": short.decoder.model_copy(update={"layers": 24})}
    recipe = short.model_copy(update=changes | {"batch": short.batch.model_copy(update={"sequences": 32})})
    wanted = plan(schedule, stages, pp=8, tp=2, shard=2, microbatches=16)
    run = dry_run_ranks(recipe, wanted, POD, dense_ranks(wanted, POD)[:, 0, 0, 0, 0].tolist())
    layout = layout_from_plan(wanted, POD)
    memories = formulas_of(recipe, wanted).memory_by_pp_rank(layout)
    for trace in run.traces:
        assert memories[trace.place["pp"]].allocated == pytest.approx(trace.peak.total, rel=0.05), trace.place
    assert formulas_of(recipe, wanted).memory(layout).allocated == max(memory.allocated for memory in memories)


@pytest.mark.parametrize("name", CASES)
def test_flops_and_traffic_are_those_of_the_dry_run(name: str) -> None:
    formulas, wanted, traces = both(name)
    for place, trace in traces.items():
        counts = formulas.counts(layout_from_plan(wanted, POD), place)
        assert counts.flops == pytest.approx(trace.flops, rel=0.02), place
        sent: dict[str, float] = {}
        for call in trace.collectives:
            if call.operation != "receive":
                axis = call.axes.removeprefix("expert_")
                sent[axis] = sent.get(axis, 0.0) + call.total_payload
        told = dict(counts.sent)
        if wanted.degrees.shard == wanted.degrees.world:
            told = {"world": sum(told.values())}  # the group of all ranks has that name, whatever it sends for
        for axis, size in told.items():
            # Which of more than three stages per rank are gathered when differs from rank to rank.
            few = wanted.pipeline.stages_per_rank <= 3 or axis != "shard"
            assert size == pytest.approx(sent[axis], rel=0.02 if few else 0.1), (place, axis)


PARTS = {
    "tp": ("tensor", "head"),
    "cp": ("context",),
    "ep": ("expert",),
    "shard·replicate": ("gather", "gradients", "parameters"),
}
"""Parts of a step's time that are the traffic of an axis; shards and replicas of gradients are priced together."""
AXIS = {"shard": "shard·replicate", "replicate": "shard·replicate"}


ON_ONE_WIRE = [name for name, (wanted, _) in LAYOUTS.items() if wanted.degrees.pp == 1 and not wanted.mapping]


@pytest.mark.parametrize("name", [case for case in CASES if str(case.values[0]) in ON_ONE_WIRE])
def test_every_axis_is_priced_by_what_the_dry_run_sends(name: str) -> None:
    """On a wire of one byte a second that costs nothing else, seconds of traffic are bytes."""
    formulas, wanted, traces = both(name)
    sent: dict[str, float] = {}
    for call in traces[0].collectives:
        axis = call.axes.removeprefix("expert_")
        if name in LATENT and call.operation == "all_reduce" and axis == "tp":
            axis = "shard"  # gradients of what tensor parallelism copies are priced with the others
        sent[AXIS.get(axis, axis)] = sent.get(AXIS.get(axis, axis), 0.0) + call.total_wire
    slow, free = (_parts(formulas, wanted, bandwidth) for bandwidth in (1.0, inf))
    priced = {axis: sum(slow.get(part, 0.0) - free.get(part, 0.0) for part in parts) for axis, parts in PARTS.items()}
    if wanted.degrees.shard == wanted.degrees.world:
        priced = {"world": sum(priced.values())}  # the group of all ranks has that name, whatever it sends for
    if name in MUON:  # matrices are exchanged over several axes, and priced in one part
        priced = {"any": sum(priced.values()) + slow["exchange"] - free["exchange"]}
        sent = {"any": sum(sent.values())}
    for axis, seconds in priced.items():
        assert seconds == pytest.approx(sent.get(axis, 0.0), rel=0.02), axis
    assert sent.keys() <= {*priced, "world"}, "no axis sends without a price"


def _parts(formulas: Predictor, wanted: Plan, bandwidth: float) -> dict[str, float]:
    """Seconds of a step by part on one wire."""
    wire = Network((Link(wanted.degrees.world, bandwidth, latency=0.0),), collective_latency=0.0)
    return formulas.on(wire).predict(layout_from_plan(wanted, POD)).parts


@pytest.mark.parametrize("name", [case for case in CASES if str(case.values[0]) in MUON])
def test_the_update_of_muon_takes_the_bytes_that_are_priced(name: str) -> None:
    """Beside the states: what is sent and received, and the iterations."""
    formulas, wanted, traces = both(name)
    estimator = RankMemoryEstimator(formulas.context, layout_from_plan(wanted, POD), LayoutCache())
    muon = formulas.context.software.muon
    assert muon is not None
    for place, trace in traces.items():
        work = muon_work(muon, estimator.stages[place], estimator.layout, estimator.groups)
        states = [MEMORY_KINDS.index(kind) for kind in ("parameters", "gradients", "optimizer")]
        updates = [instant.held for instant in trace.memory if instant.phase == "optimizer"]
        beside = max(sum(size for kind, size in enumerate(held) if kind not in states) for held in updates)
        assert work.memory(muon.element_bytes) == pytest.approx(beside, rel=0.25), place


@pytest.mark.parametrize("steps", [1, 5])
def test_the_update_of_muon_is_in_the_price(steps: int) -> None:
    """Its iterations are the chip's FLOPs, at no more than its peak, and grow with their number."""
    wanted = plan(replicate=2, shard=2, tp=2)
    made = recipe_of("muon: hsdp × tp")
    made = made.model_copy(update={"optimizer": OptimizerConfig(kind="muon", newton_schulz_steps=steps)})
    formulas = formulas_of(made, wanted)
    parts = formulas.predict(layout_from_plan(wanted, POD)).parts
    model = made.decoder
    matrices = [(model.width, model.width), (1024, model.width), (1024, model.width), (model.width, model.width)]
    matrices += 3 * [(model.mlp_dim, model.width)]
    flops = model.layers * steps * sum(4.0 * min(m) ** 2 * max(m) + 2.0 * min(m) ** 3 for m in matrices)
    even = flops / wanted.degrees.world / POD.chip.peak["bf16"]
    assert even < parts["orthogonalization"] < 4 * even
    assert formulas.predict(layout_from_plan(wanted, POD)).seconds == pytest.approx(sum(parts.values()))


def test_a_spread_of_layouts_is_compared() -> None:
    schedules = {wanted.pipeline.schedule for wanted, _ in DENSE.values() if wanted.degrees.pp > 1}
    assert schedules == {"gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"}
    assert len(CASES) >= 10


@pytest.mark.full
def test_recompute_of_some_layers_takes_what_lies_between() -> None:
    """In the dry run and in the formulas: between no recompute and all of it, in bytes and in FLOPs."""
    recipe = recipe_of("fsdp, by layer")
    plans = [plan(shard=8), DENSE["fsdp, by layer"][0], plan(shard=8, recompute="full")]
    traces = [dry_run_ranks(recipe, each, POD, [0]).traces[0] for each in plans]
    steps = [formulas_of(recipe, each).predict(layout_from_plan(each, POD)) for each in plans]
    for taken in ([trace.peak.total for trace in traces], [step.memory.allocated for step in steps]):
        assert taken == sorted(taken, reverse=True) and len(set(taken)) == 3, taken
    for spent in ([trace.flops for trace in traces], [step.seconds for step in steps]):
        assert spent == sorted(spent) and len(set(spent)) == 3, spent


def test_gathering_inputs_again_trades_memory_for_traffic() -> None:
    """By the bytes that the formulas say, in the dry run too: two inputs a layer are kept as shards and sent again."""
    recipe, tp = recipe_of("fsdp"), 8
    plans = [plan(shard=2, tp=tp, regather_inputs=regather) for regather in (False, True)]
    kept, again = (dry_run_ranks(recipe, each, POD, [0]).traces[0] for each in plans)
    shard = 2 * recipe.batch.tokens / 2 / tp * recipe.decoder.width  # bytes in bf16 of one rank's positions
    inputs = 2 * recipe.decoder.layers
    assert kept.peak.total - again.peak.total == pytest.approx(inputs * (tp - 1) * shard, rel=0.1)
    sent = [sum(call.total_payload for call in trace.collectives if call.axes == "tp") for trace in (kept, again)]
    assert sent[1] - sent[0] == pytest.approx(inputs * shard, rel=1e-6)
    assert kept.flops == again.flops
    slow, fast = (formulas_of(recipe, each).predict(layout_from_plan(each, POD)) for each in reversed(plans))
    assert fast.memory.allocated - slow.memory.allocated == pytest.approx(inputs * (tp - 1) * shard, rel=0.01)
    assert slow.parts["tensor"] > fast.parts["tensor"]
