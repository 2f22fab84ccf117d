"""Measure implementations of operators on this machine, in the shapes that a dry run of a recipe has."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch

from danlu.chips import ChipDescriptor
from danlu.ops.operators.measuring import measure_implementations
from danlu.ops.operators.routing import CALLS, OPERATORS
from danlu.spec.operator_table import PROBED_AS, MeasuredCall, OperatorTable, RoutedOperator, parse_signature
from danlu.spec.trace import DryRun

SCALES = (0.25, 1.0, 4.0)
"""Sizes around those of the recipe, so that other microbatches are predicted too, where predictions go by size."""
_MOST_ELEMENTS = 2**28
"""Of one tensor at a size that the recipe does not have."""


class NothingToTuneError(ValueError):
    """A recipe whose model has its own operators."""


@dataclass(frozen=True, order=True)
class OperatorCall:
    """Equal calls of an operator in a step."""

    operator: RoutedOperator
    backward: bool
    inputs: tuple[str, ...]
    calls: int


def operator_calls(run: DryRun) -> list[OperatorCall]:
    """The calls of operators with several implementations; of the rank with most of each."""
    most: dict[tuple[RoutedOperator, bool, tuple[str, ...]], int] = {}
    for trace in run.traces:
        mine: dict[tuple[RoutedOperator, bool, tuple[str, ...]], int] = {}
        for each in trace.operators:
            if each.name in CALLS:
                key = (*CALLS[each.name], tuple(each.inputs))
                mine[key] = mine.get(key, 0) + each.count
        for key, count in mine.items():
            most[key] = max(most.get(key, 0), count)
    return sorted(OperatorCall(*key, count) for key, count in most.items())


def tune_operators(
    run: DryRun,
    chip: ChipDescriptor,
    seconds: float,
    on_call: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> OperatorTable:
    """Measure every implementation that runs here, for about so many seconds in all; `on_call` reports progress."""
    device = chip.runtime.set_device(0)
    planned = list(_sizes(operator_calls(run)))
    if not planned:
        raise NothingToTuneError("the model calls none of the operators that have several implementations")
    measured = []
    for done, call in enumerate(planned):
        on_call(f"{call.operator}{' backward' if call.backward else ''} {call.inputs[0]}", done, len(planned))
        taken = measure_implementations(
            OPERATORS[call.operator], call.backward, call.inputs, device, seconds / len(planned)
        )
        measured.append(
            MeasuredCall(
                operator=call.operator, backward=call.backward, inputs=call.inputs, calls=call.calls, seconds=taken
            )
        )
    return OperatorTable(
        chip=chip.name,
        device=chip.runtime.device_name(),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        recipe=run.name,
        calls=tuple(measured),
    )


def _sizes(calls: Sequence[OperatorCall]) -> Iterator[OperatorCall]:
    """The calls, and the same with other numbers of rows where no call has them."""
    seen = {(call.operator, call.backward, _elements(call)) for call in calls}
    for call in calls:
        yield call
        for scale in SCALES if call.operator in PROBED_AS else ():
            scaled = _scaled(call, scale)
            key = None if scaled is None else (scaled.operator, scaled.backward, _elements(scaled))
            if scaled is not None and key not in seen and _elements(scaled) <= _MOST_ELEMENTS:
                seen.add((scaled.operator, scaled.backward, _elements(scaled)))
                yield scaled


def _elements(call: OperatorCall) -> int:
    return prod(parse_signature(call.inputs[0])[1])


def _scaled(call: OperatorCall, scale: float) -> OperatorCall | None:
    """The same call with so many times the rows, or positions of sequences; None if they are not a whole number."""
    shapes = [parse_signature(text) for text in call.inputs]
    dims = len(shapes[0][1])
    dim = 1 if dims > 2 else 0
    rows = shapes[0][1][dim]
    if rows * scale != int(rows * scale) or rows * scale < 1:
        return None
    whole = OPERATORS[call.operator].whole_inputs[call.backward]
    inputs = []
    for place, (dtype, shape) in enumerate(shapes):
        sizes = list(shape)
        if place not in whole:
            at = dim if len(shape) >= dims - 1 else 0  # angles that all sequences share begin with positions
            sizes[at] = int(sizes[at] * scale)
        inputs.append(f"{dtype}{sizes}")
    return OperatorCall(call.operator, call.backward, tuple(inputs), 0)
