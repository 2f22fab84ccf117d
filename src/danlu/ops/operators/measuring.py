"""Time every implementation of an operator on tensors of given shapes, in turns."""

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import cycle

import torch
from torch import Tensor

from danlu.ops.operators.operator import Implementation, Operator
from danlu.spec.operator_table import parse_signature

_DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int64": torch.int64,
    "int32": torch.int32,
}
_CACHED = 64 * 2**20
"""Bytes of inputs to take turns with, so that no cache holds them: in a step other operators ran in between."""
_MOST_COPIES = 16
_LEAST_TURNS = 3


def measure_implementations(
    operator: Operator, backward: bool, inputs: Sequence[str], device: torch.device, seconds: float
) -> dict[str, float]:
    """Median seconds of a call, to four digits, by implementation; all of them together take about so many seconds.

    `inputs` are dtype and shape of every tensor, as a dry run writes them.
    """
    drawn = [_draw(inputs, device) for _ in range(_copies(inputs))]
    for tensors in drawn:
        operator.complete(tensors)
    settings = operator.settings[backward]
    takers = [each for each in operator.implementations if each.takes(*drawn[0])]
    runs = {each.name: _calls(each, backward, drawn, settings) for each in takers}
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()  # compiles, and makes the first of everything
    _synchronize(device)
    deadline = time.perf_counter() + seconds
    while len(next(iter(taken.values()))) < _LEAST_TURNS or time.perf_counter() < deadline:
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            _synchronize(device)
            taken[name].append(time.perf_counter() - began)
    return {name: float(f"{statistics.median(each):.4g}") for name, each in taken.items()}


def _calls(
    implementation: Implementation, backward: bool, drawn: list[list[Tensor]], settings: tuple[object, ...]
) -> Callable[[], object]:
    """A call on the next of the inputs."""
    run = implementation.backward if backward else implementation.forward
    turn = cycle(drawn)
    return lambda: run(*next(turn), *settings)


def _draw(inputs: Sequence[str], device: torch.device) -> list[Tensor]:
    """Values between ½ and 1½, which are good for every operator; token ids and first keys are 0."""
    tensors = []
    for text in inputs:
        name, shape = parse_signature(text)
        dtype = _DTYPES[name]
        drawn = torch.rand(shape, device=device).add_(0.5) if dtype.is_floating_point else torch.zeros(shape)
        tensors.append(drawn.to(device, dtype))
    return tensors


def _copies(inputs: Sequence[str]) -> int:
    total = 0
    for text in inputs:
        name, shape = parse_signature(text)
        total += torch.Size(shape).numel() * _DTYPES[name].itemsize
    return max(1, min(_MOST_COPIES, -(-_CACHED // max(1, total))))


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()
