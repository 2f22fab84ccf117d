"""Which layers every rank of a pipeline holds, and how many parameters that makes."""

from functools import lru_cache
from typing import NamedTuple

from danlu.cost.shape import Shape
from danlu.spec.plan import evenly


class Holding(NamedTuple):
    """What one rank of the pipeline holds."""

    dense: int
    """Layers without experts."""
    moe: int
    embedding: bool
    head: bool

    @property
    def layers(self) -> int:
        """All layers."""
        return self.dense + self.moe


class Held(NamedTuple):
    """Parameters of one rank before they are split over data-parallel ranks."""

    dense: int
    """All but routed experts."""
    experts: int


@lru_cache(maxsize=8192)
def holdings(
    shape: Shape,
    pp: int,
    stages_per_rank: int,
    counts: tuple[int, ...] = (),
    *,
    slots: bool = False,
    zigzag: bool = False,
) -> tuple[Holding, ...]:
    """What every rank of the pipeline holds.

    `counts` gives the layers of every stage; left out, they are as even as possible, the middle stages taking what is
    left over. `slots` counts embedding and head as a layer each. `zigzag` lays the second half of the stages back.
    """
    stages = pp * stages_per_rank
    counts = counts or _even(shape.layers, stages, slots)
    kinds, first = [], 0
    for count in counts:
        dense = max(0, min(shape.dense_layers - first, count))
        kinds.append((dense, count - dense))
        first += count
    ranks = []
    for rank in range(pp):
        mine = [rank + turn * pp for turn in range(stages_per_rank)]
        if zigzag:
            mine = [rank, stages - 1 - rank]
        ranks.append(
            Holding(
                sum(kinds[stage][0] for stage in mine),
                sum(kinds[stage][1] for stage in mine),
                embedding=0 in mine,
                head=stages - 1 in mine,
            )
        )
    return tuple(ranks)


def _even(layers: int, stages: int, slots: bool) -> tuple[int, ...]:
    if slots and stages > 1:
        counts = list(evenly(layers + 2, stages))
        counts[0] -= 1
        counts[-1] -= 1
        return tuple(counts)
    return evenly(layers, stages)


@lru_cache(maxsize=8192)
def held(shape: Shape, holding: Holding, tp: int, ep: int, expert_tp: int) -> Held:
    """Parameters of a rank; norms and biases, a ten-thousandth of them, are left out."""
    layer = shape.attention_parameters // tp
    dense = holding.dense * (layer + shape.dense_parameters // tp)
    dense += holding.moe * (layer + shape.shared_parameters // tp)
    table = shape.vocabulary * shape.width // tp
    if holding.embedding:
        dense += table + shape.positions * shape.width
    if holding.head and not (shape.tied and holding.embedding):
        dense += table
    experts = holding.moe * (shape.experts * shape.expert_parameters // (ep * expert_tp))
    return Held(dense, experts)
