"""Which rank stands where: the axes of a plan laid on the levels of a network. Pure arithmetic.

Ranks are numbered along the network, chips of one node first. An axis gets a factor on every level;
the product of its factors is its degree. Ranks of one axis that share a level's factor are neighbours
on that level, so the axis that talks most is given the innermost factors.
"""

from math import gcd, prod

import numpy as np
from numpy.typing import NDArray

from danlu.spec.cluster import Cluster
from danlu.spec.plan import DENSE_AXES, Degrees, Plan

Ranks = NDArray[np.int64]

EXPERT_AXES: tuple[str, ...] = ("pp", "replicate", "expert_shard", "ep")
"""Axes of the mesh that expert layers use, outermost first: the same ranks, folded another way."""

Factors = dict[str, list[int]]
"""For every axis its factor on every level, innermost level first."""


class UnplaceableError(ValueError):
    """The axes of a plan do not fit the levels of the network."""


def dense_ranks(plan: Plan, cluster: Cluster | None = None) -> Ranks:
    """Ranks of the whole run as an array of shape (pp, replicate, shard, cp, tp)."""
    factors = _dense_factors(plan, cluster)
    return _array(factors, DENSE_AXES)


def expert_ranks(plan: Plan, cluster: Cluster | None = None) -> Ranks:
    """The same ranks as an array of shape (pp, replicate, expert_shard, ep)."""
    dense = _dense_factors(plan, cluster)
    room = [prod(row) for row in zip(dense["shard"], dense["cp"], dense["tp"], strict=True)]
    factors: Factors = {"pp": dense["pp"], "replicate": dense["replicate"]}
    names = _level_names(cluster)
    if wanted := plan.mapping.get("ep"):
        factors["ep"] = _mapped("ep", wanted, plan.degrees.ep, names, room)
    else:
        factors["ep"] = _fill("ep", plan.degrees.ep, room)
    factors["expert_shard"] = _fill("expert_shard", plan.degrees.expert_shard, room)
    return _array(factors, EXPERT_AXES)


def _dense_factors(plan: Plan, cluster: Cluster | None) -> Factors:
    names, room = _level_names(cluster), _room(plan.degrees, cluster)
    factors: Factors = {}
    for axis in DENSE_AXES:
        if wanted := plan.mapping.get(axis):
            factors[axis] = _mapped(axis, wanted, getattr(plan.degrees, axis), names, room)
    for axis in reversed(DENSE_AXES):
        if axis not in factors:
            factors[axis] = _fill(axis, getattr(plan.degrees, axis), room)
    return factors


def _level_names(cluster: Cluster | None) -> list[str]:
    return [level.name for level in cluster.levels] if cluster else ["world"]


def _room(degrees: Degrees, cluster: Cluster | None) -> list[int]:
    """Ranks that each level joins, innermost first: inner levels are filled before outer ones are used."""
    if cluster is None:
        return [degrees.world]
    left, room = degrees.world, []
    for level in cluster.levels:
        room.append(gcd(left, level.fanout))
        left //= room[-1]
    if left > 1:
        raise UnplaceableError(
            f"{degrees.world} ranks must fill whole levels of cluster {cluster.name!r} "
            f"({' × '.join(f'{level.fanout} {level.name}' for level in cluster.levels)}), but do not; "
            f"choose degrees whose product divides {cluster.chips}"
        )
    return room


def _mapped(axis: str, wanted: dict[str, int], degree: int, names: list[str], room: list[int]) -> list[int]:
    """Factors of an axis whose place the plan fixes; takes them out of `room`."""
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


def _array(factors: Factors, axes: tuple[str, ...]) -> Ranks:
    """Number the ranks along the network, then gather every axis's factors into one dimension."""
    levels = len(factors[axes[0]])
    places = [(level, axis) for level in reversed(range(levels)) for axis in axes]
    shape = [factors[axis][level] for level, axis in places]
    ranks = np.arange(prod(shape)).reshape(shape)
    by_axis = [places.index((level, axis)) for axis in axes for level in reversed(range(levels))]
    return ranks.transpose(by_axis).reshape([prod(factors[axis]) for axis in axes])
