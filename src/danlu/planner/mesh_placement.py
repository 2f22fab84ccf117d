"""Every placement of the axes of a layout on the levels of a network, and the resulting shape of every group.

Axes fill the levels from the innermost outwards, each contiguous; every order is listed. The ranks of `ep` are folded
out of those of `shard × cp × tp` in every way that divides the levels.
"""

from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from itertools import permutations
from math import gcd, prod
from typing import NamedTuple

from danlu.cost.collectives import GroupShape
from danlu.spec.cluster import Cluster
from danlu.spec.divisors import divisors
from danlu.spec.plan import DENSE_AXES, Degrees, Plan
from danlu.spec.rank_placement import (
    EXPERT_AXES,
    AxisFactors,
    PlacementError,
    fill_levels,
    foldable_ranks,
    place_dense_axes,
    place_expert_axes,
    placement_levels,
    rank_digits,
    ranks_per_node,
)

GroupShapes = tuple[tuple[str, GroupShape], ...]
_Mapping = tuple[tuple[str, tuple[tuple[str, int], ...]], ...]
PER_LAYER_AXES = ("tp", "cp", "ep")
"""Axes that communicate inside every layer."""


class MeshPlacement(NamedTuple):
    """One way to place the axes of a layout on the network."""

    mapping: _Mapping
    """As `Plan.mapping`, without axes of degree 1; empty for the default placement."""
    group_shapes: GroupShapes
    """In the cost model's form."""

    def to_mapping(self) -> dict[str, dict[str, int]]:
        """As `Plan.mapping`."""
        return {axis: dict(factors) for axis, factors in self.mapping}


def placement_of_plan(plan: Plan, cluster: Cluster) -> MeshPlacement:
    """The placement that a plan's mapping gives."""
    mapping = tuple((axis, tuple(factors.items())) for axis, factors in plan.mapping.items())
    shapes = _group_shapes(place_dense_axes(plan, cluster), place_expert_axes(plan, cluster), plan.degrees, cluster)
    return MeshPlacement(mapping, shapes)


class PlacementEnumerator:
    """The placements of layouts on one network, cached by degrees."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._found: dict[Degrees, dict[GroupShapes, tuple[MeshPlacement, ...]]] = {}

    def placements(self, degrees: Degrees) -> list[MeshPlacement]:
        """Every placement with distinct group shapes; the default one first, if it exists."""
        return [placement for some in self.by_layer_axes(degrees).values() for placement in some]

    def by_layer_axes(self, degrees: Degrees) -> dict[GroupShapes, tuple[MeshPlacement, ...]]:
        """The same, keyed by the shapes of the groups that communicate inside every layer."""
        if degrees not in self._found:
            found: dict[GroupShapes, list[MeshPlacement]] = {}
            for placement in _enumerate_placements(degrees, self.cluster).values():
                inner = tuple((name, shape) for name, shape in placement.group_shapes if name in PER_LAYER_AXES)
                found.setdefault(inner, []).append(placement)
            self._found[degrees] = {inner: tuple(some) for inner, some in found.items()}
        return self._found[degrees]


def _enumerate_placements(degrees: Degrees, cluster: Cluster) -> dict[GroupShapes, MeshPlacement]:
    found: dict[GroupShapes, MeshPlacement] = {}
    try:
        first = placement_of_plan(Plan(degrees=degrees), cluster)
        found[_deciding_shapes(first.group_shapes, degrees)] = first
    except PlacementError:  # the default order does not divide the levels: only a mapping places the axes
        pass
    for dense, mapping in _dense_placements(degrees, cluster):
        for expert, expert_mapping in _expert_placements(dense, degrees, cluster):
            shapes = _group_shapes(dense, expert, degrees, cluster)
            found.setdefault(_deciding_shapes(shapes, degrees), MeshPlacement((*mapping, *expert_mapping), shapes))
    return found


def _deciding_shapes(shapes: GroupShapes, degrees: Degrees) -> GroupShapes:
    """The group shapes that set the time: two placements with the same ones are equal.

    Groups of equal states follow from the shard and replicate groups. Without `ep` no traffic runs along expert axes.
    Adjacent stages of a pipeline wait for the hop over its outermost level.
    """
    deciding = ("tp", "cp", "replicate", "shard×cp", *(("ep", "expert_shard") if degrees.ep > 1 else ()))
    outermost = max((level for level, ranks in enumerate(dict(shapes)["pp"]) if ranks > 1), default=0)
    return *((name, shape) for name, shape in shapes if name in deciding), ("pp", (outermost,))


def _dense_placements(degrees: Degrees, cluster: Cluster) -> Iterator[tuple[AxisFactors, _Mapping]]:
    # A mapping that names the outermost level keeps every level separate, even if it is only partly filled.
    names = tuple(level.name for level in cluster.levels)
    try:
        levels = placement_levels(Plan(degrees=degrees, mapping={"tp": {names[-1]: 1}}), cluster)
    except PlacementError:
        return
    if len(levels) != len(names):
        return
    axes = [axis for axis in reversed(DENSE_AXES) if getattr(degrees, axis) > 1]
    for order in permutations(axes):
        free_ranks = [band.ranks for band in levels]
        factors: AxisFactors = {axis: [1] * len(levels) for axis in DENSE_AXES}
        for axis in order:
            factors[axis], left = fill_levels(getattr(degrees, axis), free_ranks)
            if left > 1:
                break
        else:
            yield factors, tuple((axis, _named(factors[axis], names)) for axis in axes)


def _expert_placements(
    dense: AxisFactors, degrees: Degrees, cluster: Cluster
) -> Iterator[tuple[AxisFactors, _Mapping]]:
    free_ranks, names = foldable_ranks(dense), tuple(level.name for level in cluster.levels)
    for row in _rows(degrees.ep, tuple(free_ranks)):
        rest = [free // factor for free, factor in zip(free_ranks, row, strict=True)]
        expert: AxisFactors = {"ep": list(row), "expert_shard": rest}
        yield dense | expert, (("ep", _named(row, names)),) if degrees.ep > 1 else ()


def _named(row: Sequence[int], names: Sequence[str]) -> tuple[tuple[str, int], ...]:
    return tuple((name, factor) for name, factor in zip(names, row, strict=True) if factor > 1)


@lru_cache(maxsize=65536)
def _rows(degree: int, free_ranks: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Factors of one axis on every level, the innermost placements first."""
    if not free_ranks:
        return ((),) if degree == 1 else ()
    return tuple(
        (factor, *rest)
        for factor in reversed(divisors(gcd(degree, free_ranks[0])))
        for rest in _rows(degree // factor, free_ranks[1:])
    )


def _group_shapes(dense: AxisFactors, expert: AxisFactors, degrees: Degrees, cluster: Cluster) -> GroupShapes:
    """The shape of every group."""
    inside = ranks_per_level(degrees.world, cluster)
    dense_digits, expert_digits = list(rank_digits(dense, DENSE_AXES)), list(rank_digits(expert, EXPERT_AXES))
    groups = {
        "tp": (dense_digits, ("tp",)),
        "cp": (dense_digits, ("cp",)),
        "pp": (dense_digits, ("pp",)),
        "replicate": (dense_digits, ("replicate",)),
        "shard×cp": (dense_digits, ("shard", "cp")),
        "data×cp": (dense_digits, ("shard", "cp", "replicate")),
        "ep": (expert_digits, ("ep",)),
        "expert_shard": (expert_digits, ("expert_shard",)),
        "expert_data": (expert_digits, ("expert_shard", "replicate")),
    }
    return tuple(
        (name, _members_per_level(tuple((base, stride) for axis, base, stride in digits if axis in axes), inside))
        for name, (digits, axes) in groups.items()
    )


def ranks_per_level(world: int, cluster: Cluster) -> tuple[int, ...]:
    """Ranks inside one unit of every level; all at the outermost."""
    inside = [ranks_per_node(world, cluster)]
    for level in cluster.levels[1:]:
        inside.append(inside[-1] * level.fanout)
    return *inside[:-1], max(world, inside[-1])


@cache
def _members_per_level(digits: tuple[tuple[int, int], ...], inside: tuple[int, ...]) -> GroupShape:
    """Members on every level of a group whose ranks differ in these digits.

    If units are partly filled and groups straddle their borders unevenly, the members counted inside a unit are the
    largest number that divides the group and is a multiple of those inside the level below.
    """
    total = prod(factor for factor, _ in digits)
    shape, below = [], 1
    for capacity in inside[:-1]:
        members = 1
        for factor, stride in digits:
            free_ranks = max(1, capacity // stride)
            members *= (
                factor if free_ranks % factor == 0 else (free_ranks if free_ranks < factor else gcd(factor, free_ranks))
            )
        members = below * max(d for d in divisors(total // below) if d * below <= max(members, below))
        shape.append(members // below)
        below = members
    return (*shape, total // below)
