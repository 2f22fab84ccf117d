"""Placement of the ranks of a run on its network. Pure arithmetic, shared by the checks of plans and the mesh builder.

Ranks are numbered along the network, those of one node first. All nodes hold the same number of ranks, and nodes fill
the levels above them unit after unit; the last unit in use may be partly filled, so that 2,048 nodes take five pods of
384 and a third of the sixth. An axis gets a factor on every level, and the product of its factors is its degree. Ranks
of one axis that share a level's factor are neighbors on that level, so the axis with most traffic gets the innermost
factors.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import gcd, prod

from danlu.spec.cluster import Cluster
from danlu.spec.divisors import closest_multiple
from danlu.spec.plan import DENSE_AXES, Plan

EXPERT_AXES: tuple[str, ...] = ("pp", "replicate", "expert_shard", "ep")
"""Axes of the mesh of expert layers, outermost first: the same ranks, folded differently."""

AxisFactors = dict[str, list[int]]
"""For every axis its factor on every placement level, innermost first."""


class PlacementError(ValueError):
    """The axes of a plan do not fit the levels of the network."""


@dataclass(frozen=True)
class PlacementLevel:
    """A level of the network, or several merged into one, and the ranks (or blocks of ranks) it joins."""

    name: str
    ranks: int


def ranks_per_node(world: int, cluster: Cluster) -> int:
    """Ranks on every node: all if they fit one node, else the most that divide evenly."""
    chips = cluster.chips_per_node
    return world if world <= chips else gcd(world, chips)


def nodes_used(world: int, cluster: Cluster) -> int:
    """Nodes that the ranks use, all with the same number."""
    return world // ranks_per_node(world, cluster)


def innermost_common_level(ranks: Iterable[int], world: int, cluster: Cluster) -> str:
    """The innermost level that joins all of `ranks` in a run of `world`."""
    found = list(ranks)
    first, last, inside = min(found), max(found), ranks_per_node(world, cluster)
    for level, above in zip(cluster.levels, cluster.levels[1:], strict=False):
        if first // inside == last // inside:
            return level.name
        inside *= above.fanout
    return cluster.levels[-1].name


def placement_levels(plan: Plan, cluster: Cluster | None) -> list[PlacementLevel]:
    """How many ranks every level joins, innermost first; `PlacementError` if the cluster is too small.

    If the ranks divide evenly over the levels, each keeps its share. If not, the partly filled levels are merged into
    one, along which ranks are numbered consecutively. A mapping that names one of those levels splits them: an inner
    one then takes the largest block that never straddles two of its units, and the outermost takes all blocks.
    """
    world = plan.degrees.world
    if cluster is None:
        return [PlacementLevel("world", world)]
    _check_size(world, cluster)
    left, found = world, []
    partial: tuple[int, int] | None = None
    for depth, level in enumerate(cluster.levels):
        if partial is None and depth and left % level.fanout:
            partial = depth, left
        found.append(PlacementLevel(level.name, gcd(left, level.fanout)))
        left //= found[-1].ranks
    if left == 1:
        return found
    if partial is None:  # one node, with some chips unused
        return [PlacementLevel(found[0].name, world), *(PlacementLevel(band.name, 1) for band in found[1:])]
    depth, blocks = partial
    named = {name for factors in plan.mapping.values() for name in factors}
    if named.isdisjoint(band.name for band in found[depth:]):
        return [*found[:depth], PlacementLevel(" and ".join(band.name for band in found[depth:]), blocks)]
    return [*found[:-1], PlacementLevel(found[-1].name, found[-1].ranks * left)]


def _check_size(world: int, cluster: Cluster) -> None:
    name, chips, per_node = cluster.name, cluster.chips, cluster.chips_per_node
    if world > chips:
        raise PlacementError(
            f"the degrees' product must be at most the {chips} chips of cluster {name!r}, but is {world} instead; "
            f"choose smaller degrees"
        )
    nodes, there = nodes_used(world, cluster), chips // per_node
    if nodes > there:
        raise PlacementError(
            f"{world} ranks must spread evenly over at most {there} nodes of {per_node} chips of cluster {name!r}, but "
            f"take {nodes} nodes with {ranks_per_node(world, cluster)} on each; choose degrees whose product is a "
            f"multiple of {per_node}, such as {closest_multiple(world, per_node)}"
        )


def place_dense_axes(plan: Plan, cluster: Cluster | None) -> AxisFactors:
    """Factors of every dense axis: as the mapping says, the others on the remaining ranks, `tp` innermost."""
    levels = placement_levels(plan, cluster)
    free_ranks, factors = [band.ranks for band in levels], AxisFactors()
    for axis in DENSE_AXES:
        if wanted := plan.mapping.get(axis):
            factors[axis] = _factors_from_mapping(axis, wanted, getattr(plan.degrees, axis), levels, free_ranks)
    for axis in reversed(DENSE_AXES):
        if axis not in factors:
            factors[axis] = _place_axis(axis, getattr(plan.degrees, axis), free_ranks)
    return factors


def place_expert_axes(plan: Plan, cluster: Cluster | None) -> AxisFactors:
    """Factors of every axis of the expert layers; `ep` and `expert_shard` share the ranks of `shard × cp × tp`."""
    dense = place_dense_axes(plan, cluster)
    free_ranks = foldable_ranks(dense)
    factors: AxisFactors = {"pp": dense["pp"], "replicate": dense["replicate"]}
    if wanted := plan.mapping.get("ep"):
        factors["ep"] = _factors_from_mapping(
            "ep", wanted, plan.degrees.ep, placement_levels(plan, cluster), free_ranks
        )
    else:
        factors["ep"] = _place_axis("ep", plan.degrees.ep, free_ranks)
    factors["expert_shard"] = _place_axis("expert_shard", plan.degrees.expert_shard, free_ranks)
    return factors


def foldable_ranks(dense: AxisFactors) -> list[int]:
    """Ranks of `shard × cp × tp` on every level: those that expert layers fold again."""
    return [prod(row) for row in zip(dense["shard"], dense["cp"], dense["tp"], strict=True)]


def _factors_from_mapping(
    axis: str, wanted: dict[str, int], degree: int, levels: list[PlacementLevel], free_ranks: list[int]
) -> list[int]:
    """Factors of an axis that the plan maps; removes them from `free_ranks`."""
    names = [band.name for band in levels]
    factors = [wanted.get(name, 1) for name in names]
    if prod(factors) != degree or set(wanted) - set(names):
        raise PlacementError(
            f"`mapping.{axis}` must lie on levels {', '.join(names)} with product {degree}, but is {wanted} instead"
        )
    for level, factor in enumerate(factors):
        if free_ranks[level] % factor:
            raise PlacementError(
                f"`mapping.{axis}.{names[level]}` must divide the {free_ranks[level]} free ranks there, "
                f"but is {factor} instead"
            )
        free_ranks[level] //= factor
    return factors


def fill_levels(degree: int, free_ranks: list[int]) -> tuple[list[int], int]:
    """Factors of an axis that fills the free ranks, innermost first, and the factor that does not fit.

    Removes the factors from `free_ranks`.
    """
    left, factors = degree, []
    for level, free in enumerate(free_ranks):
        factors.append(gcd(left, free))
        free_ranks[level] //= factors[-1]
        left //= factors[-1]
    return factors, left


def rank_digits(factors: AxisFactors, axes: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """The digits of a rank's number, least significant first: the axis of each, its base, and its weight."""
    weight = 1
    for level in range(len(factors[axes[0]])):
        for axis in reversed(axes):
            if factors[axis][level] > 1:
                yield axis, factors[axis][level], weight
                weight *= factors[axis][level]


def _place_axis(axis: str, degree: int, free_ranks: list[int]) -> list[int]:
    """Factors of an axis on every level; raises `PlacementError` if not all of it fits."""
    factors, left = fill_levels(degree, free_ranks)
    if left > 1:
        raise PlacementError(
            f"axis {axis} of {degree} ranks must divide over the free ranks of the levels, but a factor of {left} "
            f"cannot be placed; place it under [mapping]"
        )
    return factors
