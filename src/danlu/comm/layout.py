"""Which rank stands where: the axes of a plan as arrays of ranks. Pure arithmetic over `spec.placing`."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from danlu.spec.cluster import Cluster
from danlu.spec.placing import EXPERT_AXES, Factors, dense_factors, expert_factors
from danlu.spec.plan import DENSE_AXES, Plan

Ranks = NDArray[np.int64]


@dataclass(frozen=True)
class Layout:
    """The ranks of a run along some axes; asking about one rank costs nothing that grows with the world."""

    axes: tuple[str, ...]
    """Outermost first."""
    factors: Factors

    def place(self, rank: int) -> dict[str, int]:
        """The coordinate of a rank along every axis."""
        place, weight = dict.fromkeys(self.axes, 0), dict.fromkeys(self.axes, 1)
        for axis, factor, _ in self._digits():
            rank, digit = divmod(rank, factor)
            place[axis] += digit * weight[axis]
            weight[axis] *= factor
        return place

    def along(self, rank: int, axes: Iterable[str]) -> Ranks:
        """The ranks that differ from `rank` along `axes` alone, as an array with those dimensions."""
        offsets, kept = {axis: np.zeros(1, np.int64) for axis in axes}, rank
        for axis, factor, stride in self._digits():
            if axis in offsets:
                kept -= rank // stride % factor * stride
                offsets[axis] = np.add.outer(np.arange(factor) * stride, offsets[axis]).reshape(-1)
        found = np.array(kept)
        for along_axis in offsets.values():
            found = np.add.outer(found, along_axis)
        return found

    def _digits(self) -> Iterable[tuple[str, int, int]]:
        """A rank's number as digits, least significant first: the axis each belongs to, its base, and its weight."""
        stride = 1
        for band in range(len(self.factors[self.axes[0]])):
            for axis in reversed(self.axes):
                yield axis, self.factors[axis][band], stride
                stride *= self.factors[axis][band]


def dense_layout(plan: Plan, cluster: Cluster | None = None) -> Layout:
    """The ranks along the axes of dense layers; `UnplaceableError` where the plan does not fit the cluster."""
    return Layout(DENSE_AXES, dense_factors(plan, cluster))


def expert_layout(plan: Plan, cluster: Cluster | None = None) -> Layout:
    """The same ranks along the axes of expert layers."""
    return Layout(EXPERT_AXES, expert_factors(plan, cluster))


def dense_ranks(plan: Plan, cluster: Cluster | None = None) -> Ranks:
    """Ranks of the whole run as an array of shape (pp, replicate, shard, cp, tp)."""
    return dense_layout(plan, cluster).along(0, DENSE_AXES)


def expert_ranks(plan: Plan, cluster: Cluster | None = None) -> Ranks:
    """The same ranks as an array of shape (pp, replicate, expert_shard, ep)."""
    return expert_layout(plan, cluster).along(0, EXPERT_AXES)
