"""Which implementation of an operator runs: what a plan asks for, or the last that was registered for a device."""

from collections.abc import Mapping

import torch

from danlu.ops.operators.cross_entropy import CROSS_ENTROPY
from danlu.ops.operators.experts import GROUPED_MM
from danlu.ops.operators.gated import GATED_PRODUCT
from danlu.ops.operators.masked_attention import MASKED_ATTENTION
from danlu.ops.operators.norm import RMS_NORM
from danlu.ops.operators.operator import Implementation, Operator
from danlu.ops.operators.quantize import QUANTIZE_ROWS
from danlu.ops.operators.rotary import ROTATE
from danlu.spec.operator_table import RoutedOperator

OPERATORS: dict[RoutedOperator, Operator] = {
    "rms_norm": RMS_NORM,
    "gated_product": GATED_PRODUCT,
    "rotate": ROTATE,
    "masked_attention": MASKED_ATTENTION,
    "grouped_mm": GROUPED_MM,
    "quantize_rows": QUANTIZE_ROWS,
    "cross_entropy": CROSS_ENTROPY,
}
CALLS: dict[str, tuple[RoutedOperator, bool]] = {
    "danlu.rms_norm": ("rms_norm", False),
    "danlu.rms_norm_backward": ("rms_norm", True),
    "danlu.gated_product": ("gated_product", False),
    "danlu.gated_product_backward": ("gated_product", True),
    "danlu.rotate": ("rotate", False),
    "danlu.rotate_backward": ("rotate", True),
    "danlu.masked_attention": ("masked_attention", False),
    "danlu.masked_attention_backward": ("masked_attention", True),
    "danlu.grouped_mm": ("grouped_mm", False),
    "danlu.grouped_mm_input_gradient": ("grouped_mm", True),
    "danlu.grouped_mm_weight_gradient": ("grouped_mm", True),
    "danlu.quantize_rows": ("quantize_rows", False),
    "danlu.softmax_sums": ("cross_entropy", False),
    "danlu.cross_entropy_backward": ("cross_entropy", True),
}
"""The operator behind every call that a dry run records, and whether it is its gradient."""


class RoutingError(ValueError):
    """A plan asks for an implementation that is not there."""


def route_operators(choices: Mapping[RoutedOperator, str], device: torch.device) -> None:
    """Run the chosen implementations in this process, and the last that takes a tensor for every other operator."""
    found = {name: _named(name, choices[name], device) for name in choices}
    for name, operator in OPERATORS.items():
        operator.chosen = found.get(name)


def _named(name: RoutedOperator, implementation: str, device: torch.device) -> Implementation:
    candidates = {each.name: each for each in OPERATORS[name].implementations}
    if implementation not in candidates:
        raise RoutingError(
            f'`operators.{name}` of the plan must be one of {", ".join(candidates)}, but is "{implementation}"; try: '
            "leave it out, and the one that was made for the chip runs"
        )
    if reason := candidates[implementation].why_not_on(device.type):
        raise RoutingError(
            f'`operators.{name}` is "{implementation}", which does not run on {device.type} here: {reason}; '
            "try: leave it out, or measure what is fastest with `danlu ops tune`"
        )
    return candidates[implementation]
