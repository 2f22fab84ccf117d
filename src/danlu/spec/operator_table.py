"""What `danlu ops tune` writes: how long every implementation of an operator takes, in the shapes of a recipe."""

import re
from collections.abc import Iterable, Mapping
from math import prod
from typing import Annotated, Literal, get_args

from pydantic import Field

from danlu.spec.cluster import Cluster, Dtype, OperatorName, TimingCurve
from danlu.spec.description import SpecModel, TupleOf
from danlu.spec.names import Label

RoutedOperator = Literal[
    "rms_norm", "gated_product", "rotate", "masked_attention", "grouped_mm", "quantize_rows", "cross_entropy"
]
"""Operators that have several implementations."""
ROUTED_OPERATORS: tuple[RoutedOperator, ...] = get_args(RoutedOperator)
PROBED_AS: dict[RoutedOperator, tuple[OperatorName, OperatorName]] = {
    "rms_norm": ("norm", "norm_backward"),
    "gated_product": ("activation", "activation_backward"),
    "rotate": ("rotation", "rotation_backward"),
    "cross_entropy": ("loss", "loss_backward"),
}
"""What `danlu probe` calls them, forward and backward; sizes are elements of the first input in both.

Not so the others: predictions price documents, products of experts and fp8 by themselves.
"""

_SIGNATURE = re.compile(r"(\w+)\[([\d, ]*)\]")


class MeasuredCall(SpecModel):
    """Equal calls of an operator in one step of one rank."""

    operator: RoutedOperator
    backward: bool = False
    """A call of its gradient."""
    inputs: TupleOf[str]
    """Dtype and shape of every input tensor: `bf16[512, 512]`."""
    calls: int = Field(ge=0)
    """In a step; 0 for sizes around those of the recipe, which predictions interpolate between."""
    seconds: dict[Label, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(min_length=1)
    """Of one call, by implementation."""

    @property
    def dtype(self) -> str:
        """Of the first input."""
        return parse_signature(self.inputs[0])[0]

    @property
    def elements(self) -> int:
        """Of the first input."""
        return prod(parse_signature(self.inputs[0])[1])


class OperatorTable(SpecModel):
    """Measured implementations of operators on one chip; ranks of a whole cluster of these chips can share it."""

    chip: Label
    """Name of the chip's descriptor: cpu, cuda, rocm, ascend, …"""
    device: Label
    """The device that measured."""
    threads: int = Field(ge=1)
    """Of the rank that measured; 1 or more on a CPU."""
    torch: Label
    """Its version."""
    recipe: Label
    """Whose shapes were measured."""
    calls: TupleOf[MeasuredCall] = Field(min_length=1)

    def seconds(self, operator: RoutedOperator, implementation: str) -> float | None:
        """Of all calls in a step of a rank; None if the implementation was not measured for one of them."""
        mine = [call for call in self.calls if call.operator == operator and call.calls]
        if not mine or any(implementation not in call.seconds for call in mine):
            return None
        return sum(call.calls * call.seconds[implementation] for call in mine)

    def implementations(self, operator: RoutedOperator) -> dict[str, float]:
        """Seconds in a step of every implementation that was measured for all calls, fastest first."""
        names = dict.fromkeys(name for call in self.calls if call.operator == operator for name in call.seconds)
        found = {name: taken for name in names if (taken := self.seconds(operator, name)) is not None}
        return dict(sorted(found.items(), key=lambda item: item[1]))

    @property
    def fastest(self) -> dict[RoutedOperator, str]:
        """The fastest implementation of every operator that the recipe calls: `operators` of a plan."""
        ordered = {operator: self.implementations(operator) for operator in ROUTED_OPERATORS}
        return {operator: next(iter(taken)) for operator, taken in ordered.items() if taken}

    def curves(self, choices: Mapping[RoutedOperator, str], dtype: str) -> dict[OperatorName, TimingCurve]:
        """Times by size of the chosen implementations, as predictions take them."""
        found: dict[OperatorName, TimingCurve] = {}
        for operator, implementation in choices.items():
            for backward, name in enumerate(PROBED_AS.get(operator, ())):
                points = _points(self.calls, operator, bool(backward), implementation, dtype)
                if len(points) > 1:
                    found[name] = TimingCurve(sizes=tuple(points), seconds=tuple(points.values()))
        return found


def _points(
    calls: Iterable[MeasuredCall], operator: RoutedOperator, backward: bool, implementation: str, dtype: str
) -> dict[float, float]:
    """Seconds by elements; of calls with as many elements the slowest, so that a prediction is not too low."""
    points: dict[float, float] = {}
    for call in calls:
        if (call.operator, call.backward, call.dtype) == (operator, backward, dtype) and implementation in call.seconds:
            size = float(call.elements)
            points[size] = max(points.get(size, 0.0), call.seconds[implementation])
    return dict(sorted(points.items()))


def parse_signature(text: str) -> tuple[str, tuple[int, ...]]:
    """Dtype and shape of `bf16[512, 512]`."""
    found = _SIGNATURE.fullmatch(text)
    if found is None:
        raise ValueError(f"`inputs` must be a dtype and a shape, such as bf16[512, 512], but has {text}")
    return found[1], tuple(int(size) for size in found[2].split(",") if size.strip())


def with_operator_times(cluster: Cluster, table: OperatorTable, dtype: Dtype) -> Cluster:
    """The cluster whose chip takes the table's times for the fastest implementations, instead of probed ones."""
    curves = dict(cluster.chip.operators.get(dtype, {})) | table.curves(table.fastest, dtype)
    chip = cluster.chip.model_copy(update={"operators": {**cluster.chip.operators, dtype: curves}})
    return cluster.model_copy(update={"chip": chip})
