"""Where the ranks of a run stand on its network. Pure arithmetic: one truth for who checks plans and who builds groups.

Ranks are numbered along the network, those of one node first. All nodes hold the same number of ranks, and nodes fill
the levels above them unit after unit; the last unit in use may be filled in part, so that 2,048 nodes take five pods
of 384 and a third of the sixth. An axis gets a factor on every level, and the product of its factors is its degree.
Ranks of one axis that share a level's factor are neighbours on that level, so the axis that talks most is given the
innermost factors.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd, prod

from danlu.spec.cluster import Cluster
from danlu.spec.numbers import closest_multiple
from danlu.spec.plan import DENSE_AXES, Plan

EXPERT_AXES: tuple[str, ...] = ("pp", "replicate", "expert_shard", "ep")
"""Axes of the mesh that expert layers use, outermost first: the same ranks, folded another way."""

Factors = dict[str, list[int]]
"""For every axis its factor on every band of the network, innermost first."""


class UnplaceableError(ValueError):
    """The axes of a plan do not fit the levels of the network."""


@dataclass(frozen=True)
class Band:
    """A level of the network, or several that are taken as one, and the ranks (or blocks of ranks) it joins."""

    name: str
    ranks: int


def ranks_per_node(world: int, cluster: Cluster) -> int:
    """Ranks on every node: all of a run that one node can hold, else as many as divide evenly."""
    chips = cluster.chips_per_node
    return world if world <= chips else gcd(world, chips)


def nodes_used(world: int, cluster: Cluster) -> int:
    """Nodes that the ranks take, all of them alike."""
    return world // ranks_per_node(world, cluster)


def joining_level(ranks: Iterable[int], world: int, cluster: Cluster) -> str:
    """The innermost level that joins all of `ranks` in a run of `world`."""
    found = list(ranks)
    first, last, inside = min(found), max(found), ranks_per_node(world, cluster)
    for level, above in zip(cluster.levels, cluster.levels[1:], strict=False):
        if first // inside == last // inside:
            return level.name
        inside *= above.fanout
    return cluster.levels[-1].name


def bands(plan: Plan, cluster: Cluster | None) -> list[Band]:
    """How many ranks every level joins, innermost first; `UnplaceableError` where the cluster is too small.

    Where the ranks divide evenly over the levels, each is a band with its share. Where they do not, the levels
    that are filled in part are one band, along which ranks are simply counted on. A mapping that names one of those
    levels splits them: an inner one then takes the largest block that never lies across the border of two of its
    units, and the outermost takes the blocks, however many they are.
    """
    world = plan.degrees.world
    if cluster is None:
        return [Band("world", world)]
    _check_size(world, cluster)
    left, found = world, []
    partial: tuple[int, int] | None = None
    for depth, level in enumerate(cluster.levels):
        if partial is None and depth and left % level.fanout:
            partial = depth, left
        found.append(Band(level.name, gcd(left, level.fanout)))
        left //= found[-1].ranks
    if left == 1:
        return found
    if partial is None:  # one node, some of whose chips are left over
        return [Band(found[0].name, world), *(Band(band.name, 1) for band in found[1:])]
    depth, blocks = partial
    named = {name for factors in plan.mapping.values() for name in factors}
    if named.isdisjoint(band.name for band in found[depth:]):
        return [*found[:depth], Band(" and ".join(band.name for band in found[depth:]), blocks)]
    return [*found[:-1], Band(found[-1].name, found[-1].ranks * left)]


def _check_size(world: int, cluster: Cluster) -> None:
    name, chips, per_node = cluster.name, cluster.chips, cluster.chips_per_node
    if world > chips:
        raise UnplaceableError(
            f"the degrees' product must be at most the {chips} chips of cluster {name!r}, but is {world} instead; "
            f"choose smaller degrees"
        )
    nodes, there = nodes_used(world, cluster), chips // per_node
    if nodes > there:
        raise UnplaceableError(
            f"{world} ranks must spread evenly over at most {there} nodes of {per_node} chips of cluster {name!r}, but "
            f"take {nodes} nodes with {ranks_per_node(world, cluster)} on each; choose degrees whose product is a "
            f"multiple of {per_node}, such as {closest_multiple(world, per_node)}"
        )


def dense_factors(plan: Plan, cluster: Cluster | None) -> Factors:
    """The place of every dense axis: as the mapping says, the others in what is left, `tp` innermost."""
    levels = bands(plan, cluster)
    room, factors = [band.ranks for band in levels], Factors()
    for axis in DENSE_AXES:
        if wanted := plan.mapping.get(axis):
            factors[axis] = _mapped(axis, wanted, getattr(plan.degrees, axis), levels, room)
    for axis in reversed(DENSE_AXES):
        if axis not in factors:
            factors[axis] = _fill(axis, getattr(plan.degrees, axis), room)
    return factors


def expert_factors(plan: Plan, cluster: Cluster | None) -> Factors:
    """The place of every axis of the expert layers; `ep` and `expert_shard` share the ranks of `shard × cp × tp`."""
    dense = dense_factors(plan, cluster)
    room = folded(dense)
    factors: Factors = {"pp": dense["pp"], "replicate": dense["replicate"]}
    if wanted := plan.mapping.get("ep"):
        factors["ep"] = _mapped("ep", wanted, plan.degrees.ep, bands(plan, cluster), room)
    else:
        factors["ep"] = _fill("ep", plan.degrees.ep, room)
    factors["expert_shard"] = _fill("expert_shard", plan.degrees.expert_shard, room)
    return factors


def folded(dense: Factors) -> list[int]:
    """Ranks of `shard × cp × tp` on every band: those that expert layers fold once more."""
    return [prod(row) for row in zip(dense["shard"], dense["cp"], dense["tp"], strict=True)]


def _mapped(axis: str, wanted: dict[str, int], degree: int, levels: list[Band], room: list[int]) -> list[int]:
    """Factors of an axis whose place the plan fixes; takes them out of `room`."""
    names = [band.name for band in levels]
    factors = [wanted.get(name, 1) for name in names]
    if prod(factors) != degree or set(wanted) - set(names):
        raise UnplaceableError(
            f"`mapping.{axis}` must lie on levels {', '.join(names)} with product {degree}, but is {wanted} instead"
        )
    for level, factor in enumerate(factors):
        if room[level] % factor:
            raise UnplaceableError(
                f"`mapping.{axis}.{names[level]}` must divide the {room[level]} ranks left there, "
                f"but is {factor} instead"
            )
        room[level] //= factor
    return factors


def _fill(axis: str, degree: int, room: list[int]) -> list[int]:
    """Factors of an axis that takes what is left, innermost first; takes them out of `room`."""
    left, factors = degree, []
    for level, free in enumerate(room):
        factors.append(gcd(left, free))
        room[level] //= factors[-1]
        left //= factors[-1]
    if left > 1:
        raise UnplaceableError(
            f"axis {axis} of {degree} ranks must divide over the levels left to it, but a factor of {left} "
            f"finds no place; give it one under [mapping]"
        )
    return factors
