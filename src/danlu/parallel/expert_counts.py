"""How many token copies go from every rank to the experts of every other, and in which order they arrive.

Shapes: M token copies that reach this rank, R ranks of `ep`, L experts held.
"""

import numpy as np
import torch
from torch import Tensor

Counts = list[list[int]]
"""Copies for, or from, every rank, by expert."""


def order_of_arrivals(coming_RL: Counts, device: torch.device) -> tuple[Tensor, list[int]]:
    """What sorts copies by expert that arrive sorted by sender, then expert; and how many every expert has."""
    repeats = torch.tensor([count for row in coming_RL for count in row], device=device)
    experts_held = torch.arange(len(coming_RL[0]), device=device).repeat(len(coming_RL))
    total = sum(sum(row) for row in coming_RL)
    order_M = experts_held.repeat_interleave(repeats, output_size=total).argsort(stable=True)
    return order_M, [sum(column) for column in zip(*coming_RL, strict=True)]


def balanced_send_counts(copies: int, experts: int, ranks: int, rank: int) -> Counts:
    """Copies that a rank sends to every rank, by expert, at even load; it receives the same.

    Also where there are fewer copies than experts: each sender starts its round of the experts where the previous one
    ended, so that every rank receives as many copies as it sends.
    """
    held = experts // ranks
    first_R = (rank + np.arange(ranks)) * held
    ends_RL = (first_R[:, None] + np.arange(held + 1)) * copies // experts
    counts: Counts = np.diff(ends_RL).tolist()
    return counts
