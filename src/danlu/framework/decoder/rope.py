"""Rotary positions."""

import math

import torch
from torch import Tensor

from danlu.ops.operators.rotary import rotate
from danlu.spec.model import RopeScaling


def rope_frequencies(width: int, theta: float, scaling: RopeScaling | None, device: torch.device) -> Tensor:
    """Rotation of each pair of a head's features from one position to the next, in fp32."""
    pairs = torch.arange(0, width, 2, device=device, dtype=torch.float32)
    # The reciprocal of a power, not a negative power: published models do this, and the last bit differs.
    periods = theta ** (pairs / width)
    plain = 1.0 / periods
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "yarn":
        keep = _yarn_share(width, theta, scaling, device)
        return 1.0 / (scaling.factor * periods) * (1 - keep) + plain * keep
    turns = plain * (scaling.original / math.tau)  # within the original context length
    keep = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
    return plain * keep + plain / scaling.factor * (1 - keep)


def _yarn_share(width: int, theta: float, scaling: RopeScaling, device: torch.device) -> Tensor:
    """How much of its own rotation every pair keeps: linear in the number of the pair (YaRN, equation 23)."""

    def pair_with(turns: float) -> float:
        """Number of the pair, as a fraction, that turns as often within the original context length."""
        return width * math.log(scaling.original / (turns * math.tau)) / (2 * math.log(theta))

    first, last = pair_with(scaling.high), pair_with(scaling.low)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    if first == last:
        last += 0.001
    pairs = torch.arange(width // 2, device=device, dtype=torch.float32)
    return 1 - ((pairs - first) / (last - first)).clamp(0, 1)


def apply_rope(
    x_BSHW: Tensor,
    theta: float,
    scaling: RopeScaling | None = None,
    positions_BS: Tensor | None = None,
    interleaved: bool = False,
) -> Tensor:
    """Rotate pairs of features by an angle proportional to the position (rotary embedding), in fp32.

    Positions count from 0 in every sequence unless they are given. A pair is one feature of either half, or with
    `interleaved` two neighbors, which the result has in its halves: products of two such results do not change.
    """
    length, width = x_BSHW.shape[1], x_BSHW.shape[3]
    turn_W = rope_frequencies(width, theta, scaling, x_BSHW.device)
    if positions_BS is None:
        angle = torch.outer(torch.arange(length, device=x_BSHW.device), turn_W)
    else:
        angle = positions_BS[..., None] * turn_W
    cos, sin = angle.cos(), angle.sin()
    if scaling is not None and scaling.rotary_factor != 1.0:
        cos, sin = cos * scaling.rotary_factor, sin * scaling.rotary_factor
    if interleaved:
        x_BSHW = x_BSHW.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return rotate(x_BSHW, cos, sin)
