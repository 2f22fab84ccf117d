"""Layout of ranks: the axes of a plan as arrays of ranks. Pure arithmetic over `spec.rank_placement`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from danlu.spec.cluster import Cluster
from danlu.spec.plan import DENSE_AXES, Plan
from danlu.spec.rank_placement import (
    EXPERT_AXES,
    AxisFactors,
    place_dense_axes,
    place_expert_axes,
    rank_digits,
    ranks_per_node,
)

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


class LevelSpan(NamedTuple):
    """A level of the network, as ranks are numbered along it."""

    name: str
    ranks: int
    """Consecutive ranks that one of its units joins."""


def level_spans(levels: Iterable[tuple[str, int]]) -> tuple[LevelSpan, ...]:
    """The levels from the innermost outwards, from the name of each and how many of the level below it joins."""
    spans, ranks = [], 1
    for name, fanout in levels:
        ranks *= fanout
        spans.append(LevelSpan(name, ranks))
    return tuple(spans)


def network_spans(cluster: Cluster | None, world: int) -> tuple[LevelSpan, ...]:
    """The levels of a cluster's network, as so many ranks fill them; none without a cluster."""
    if cluster is None:
        return ()
    inner, *outer = ((level.name, level.fanout) for level in cluster.levels)
    return level_spans([(inner[0], ranks_per_node(world, cluster)), *outer])


def common_level(rank: int, other: int, levels: Sequence[LevelSpan]) -> int:
    """The number of the innermost level that joins two ranks."""
    for number, level in enumerate(levels[:-1]):
        if rank // level.ranks == other // level.ranks:
            return number
    return len(levels) - 1


def dense_layout(plan: Plan, cluster: Cluster | None = None) -> RankLayout:
    """The ranks along the axes of dense layers; `UnplaceableError` if the plan does not fit the cluster."""
    return RankLayout(DENSE_AXES, place_dense_axes(plan, cluster))


def expert_layout(plan: Plan, cluster: Cluster | None = None) -> RankLayout:
    """The same ranks along the axes of expert layers."""
    return RankLayout(EXPERT_AXES, place_expert_axes(plan, cluster))


def dense_ranks(plan: Plan, cluster: Cluster | None = None) -> RankArray:
    """All ranks of the run as an array of shape (pp, replicate, shard, cp, tp)."""
    return dense_layout(plan, cluster).ranks_along(0, DENSE_AXES)
