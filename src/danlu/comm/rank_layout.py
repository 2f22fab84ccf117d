"""Layout of ranks: the axes of a plan as arrays of ranks. Pure arithmetic over `spec.rank_placement`."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import numpy as np
from numpy.typing import NDArray

from danlu.spec.cluster import Cluster
from danlu.spec.plan import DENSE_AXES, Plan
from danlu.spec.rank_placement import EXPERT_AXES, AxisFactors, place_dense_axes, place_expert_axes, rank_digits

RankArray = NDArray[np.int64]


@dataclass(frozen=True)
class RankLayout:
    """The ranks of a run along some axes; the cost of a query about one rank does not grow with the world size."""

    axes: tuple[str, ...]
    """Outermost first."""
    factors: AxisFactors

    def coordinates(self, rank: int) -> dict[str, int]:
        """The coordinate of a rank along every axis."""
        coordinates, weight = dict.fromkeys(self.axes, 0), dict.fromkeys(self.axes, 1)
        for axis, factor, _ in rank_digits(self.factors, self.axes):
            rank, digit = divmod(rank, factor)
            coordinates[axis] += digit * weight[axis]
            weight[axis] *= factor
        return coordinates

    def ranks_along(self, rank: int, axes: Iterable[str]) -> RankArray:
        """The ranks that differ from `rank` along `axes` alone, as an array with those dimensions."""
        offsets, kept = {axis: np.zeros(1, np.int64) for axis in axes}, rank
        for axis, factor, stride in rank_digits(self.factors, self.axes):
            if axis in offsets:
                kept -= rank // stride % factor * stride
                offsets[axis] = np.add.outer(np.arange(factor) * stride, offsets[axis]).reshape(-1)
        found = np.array(kept)
        for along_axis in offsets.values():
            found = np.add.outer(found, along_axis)
        return found


def level_blocks(fanouts: Iterable[int]) -> tuple[int, ...]:
    """Ranks under one switch of each level between the innermost and the whole, from what the levels join."""
    return tuple(accumulate(fanouts, mul))[1:-1]


def dense_layout(plan: Plan, cluster: Cluster | None = None) -> RankLayout:
    """The ranks along the axes of dense layers; `UnplaceableError` if the plan does not fit the cluster."""
    return RankLayout(DENSE_AXES, place_dense_axes(plan, cluster))


def expert_layout(plan: Plan, cluster: Cluster | None = None) -> RankLayout:
    """The same ranks along the axes of expert layers."""
    return RankLayout(EXPERT_AXES, place_expert_axes(plan, cluster))


def dense_ranks(plan: Plan, cluster: Cluster | None = None) -> RankArray:
    """All ranks of the run as an array of shape (pp, replicate, shard, cp, tp)."""
    return dense_layout(plan, cluster).ranks_along(0, DENSE_AXES)
