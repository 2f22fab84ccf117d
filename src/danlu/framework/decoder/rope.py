"""Rotary positions."""

import math

import torch
from torch import Tensor

from danlu.spec.model import RopeScaling


def rope_frequencies(width: int, theta: float, scaling: RopeScaling | None, device: torch.device) -> Tensor:
    """Rotation of each pair of a head's features from one position to the next, in fp32."""
    pairs = torch.arange(0, width, 2, device=device, dtype=torch.float32)
    # The reciprocal of a power, not a negative power: published models do this, and the last bit differs.
    plain = 1.0 / theta ** (pairs / width)
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    turns = plain * (scaling.original / math.tau)  # within the original context length
    keep = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
    return plain * keep + plain / scaling.factor * (1 - keep)


def apply_rope(
    x_BSHW: Tensor, theta: float, scaling: RopeScaling | None = None, positions_BS: Tensor | None = None
) -> Tensor:
    """Rotate pairs of features by an angle proportional to the position (rotary embedding), in fp32.

    Positions count from 0 in every sequence unless they are given.
    """
    length, width = x_BSHW.shape[1], x_BSHW.shape[3]
    turn_W = rope_frequencies(width, theta, scaling, x_BSHW.device)
    if positions_BS is None:
        angle = torch.outer(torch.arange(length, device=x_BSHW.device), turn_W)
    else:
        angle = positions_BS[..., None] * turn_W
    cos, sin = angle.cos().unsqueeze(-2), angle.sin().unsqueeze(-2)
    first, second = x_BSHW.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.type_as(x_BSHW)
