"""Rotary positions."""

import math

import torch
from torch import Tensor

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
    cos, sin = angle.cos().unsqueeze(-2), angle.sin().unsqueeze(-2)
    if scaling is not None and scaling.rotary_factor != 1.0:
        cos, sin = cos * scaling.rotary_factor, sin * scaling.rotary_factor
    if interleaved:
        first, second = x_BSHW.float().unflatten(-1, (-1, 2)).unbind(-1)
    else:
        first, second = x_BSHW.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.type_as(x_BSHW)
