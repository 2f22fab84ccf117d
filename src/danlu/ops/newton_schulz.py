"""Orthogonalization of matrices by Newton–Schulz iterations (Muon): FLOPs, and which rank does which matrix."""

from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heapreplace

ROUND_ELEMENTS = 1 << 24
"""Elements that a rank assembles at once, unless a single matrix has more: 64 MiB in fp32."""


def newton_schulz_flops(rows: int, columns: int, steps: int) -> float:
    """FLOPs of `steps` iterations on one matrix: two products with its Gram matrix's side, and one of that by itself."""
    short, long = sorted((rows, columns))
    return steps * (4.0 * short * short * long + 2.0 * short**3)


@dataclass(frozen=True)
class WorkDivision:
    """Who works on which of several matrices, and in which round."""

    owner: tuple[int, ...]
    """The rank of every matrix."""
    rounds: tuple[tuple[int, ...], ...]
    """The matrices of every round, in ascending order; no rank has more than `round_elements` in one, or one matrix."""

    def most(self, costs: tuple[float, ...]) -> float:
        """The cost of the rank with most work."""
        loads: dict[int, float] = {}
        for owner, cost in zip(self.owner, costs, strict=True):
            loads[owner] = loads.get(owner, 0.0) + cost
        return max(loads.values(), default=0.0)


@lru_cache(maxsize=1024)
def divide_work(
    shapes: tuple[tuple[int, int], ...], ranks: int, steps: int, round_elements: int = ROUND_ELEMENTS
) -> WorkDivision:
    """Divide matrices over ranks by the FLOPs of their orthogonalization: the longest first, to who has least.

    Every rank computes the same division from the shapes alone, so that none has to be told.
    """
    costs = [newton_schulz_flops(rows, columns, steps) for rows, columns in shapes]
    loads = [(0.0, rank) for rank in range(ranks)]
    heapify(loads)
    owner, round_of = [0] * len(shapes), [0] * len(shapes)
    filled: dict[int, tuple[int, int]] = {}
    for matrix in sorted(range(len(shapes)), key=lambda matrix: -costs[matrix]):
        load, rank = loads[0]
        heapreplace(loads, (load + costs[matrix], rank))
        elements = shapes[matrix][0] * shapes[matrix][1]
        at, held = filled.get(rank, (0, 0))
        if held and held + elements > round_elements:
            at, held = at + 1, 0
        filled[rank] = at, held + elements
        owner[matrix], round_of[matrix] = rank, at
    rounds: list[list[int]] = [[] for _ in range(max(round_of, default=-1) + 1)]
    for matrix, at in enumerate(round_of):
        rounds[at].append(matrix)
    return WorkDivision(tuple(owner), tuple(map(tuple, rounds)))
