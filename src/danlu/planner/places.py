"""Where the axes of a layout can lie on the levels of a network, and how far every group then reaches.

Axes follow one another from the innermost level outwards, each in one piece; every order of them is listed. The ranks
of `ep` are folded out of those of `shard × cp × tp` in every way that divides the levels.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import permutations
from math import gcd, prod
from typing import NamedTuple

from danlu.cost.collectives import Span
from danlu.spec.cluster import Cluster
from danlu.spec.numbers import divisors
from danlu.spec.placing import (
    EXPERT_AXES,
    Factors,
    UnplaceableError,
    bands,
    dense_factors,
    expert_factors,
    folded,
    ranks_per_node,
)
from danlu.spec.plan import DENSE_AXES, Degrees, Plan

Spans = tuple[tuple[str, Span], ...]
INNER = ("tp", "cp", "ep")
"""Axes that send inside every layer."""


class Place(NamedTuple):
    """One way to lay the axes of a run on its network."""

    mapping: tuple[tuple[str, tuple[tuple[str, int], ...]], ...]
    """As `Plan.mapping`, axes of one rank left out; empty where the order of the axes alone decides."""
    spans: Spans
    """As the cost model reads it."""

    def as_mapping(self) -> dict[str, dict[str, int]]:
        """For a plan."""
        return {axis: dict(factors) for axis, factors in self.mapping}


def place_of(plan: Plan, cluster: Cluster) -> Place:
    """The place that a plan's own mapping gives its axes."""
    mapping = tuple((axis, tuple(factors.items())) for axis, factors in plan.mapping.items())
    spans = _spans(dense_factors(plan, cluster), expert_factors(plan, cluster), plan.degrees, cluster)
    return Place(mapping, spans)


class Places:
    """The places of layouts on one network; those of equal degrees are listed once."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._found: dict[Degrees, dict[Spans, tuple[Place, ...]]] = {}

    def of(self, degrees: Degrees) -> list[Place]:
        """Every place whose groups reach differently; the one without a mapping first, where there is one."""
        return [place for some in self.by_inner(degrees).values() for place in some]

    def by_inner(self, degrees: Degrees) -> dict[Spans, tuple[Place, ...]]:
        """The same, by where the axes lie that send inside every layer."""
        if degrees not in self._found:
            found: dict[Spans, list[Place]] = {}
            for place in _listed(degrees, self.cluster).values():
                inner = tuple((name, span) for name, span in place.spans if name in INNER)
                found.setdefault(inner, []).append(place)
            self._found[degrees] = {inner: tuple(some) for inner, some in found.items()}
        return self._found[degrees]


def _listed(degrees: Degrees, cluster: Cluster) -> dict[Spans, Place]:
    found: dict[Spans, Place] = {}
    try:
        first = place_of(Plan(degrees=degrees), cluster)
        found[_telling(first.spans, degrees)] = first
    except UnplaceableError:  # the axes do not follow one another evenly: only a mapping places them
        pass
    for dense, mapping in _dense_tables(degrees, cluster):
        for expert, expert_mapping in _expert_tables(dense, degrees, cluster):
            spans = _spans(dense, expert, degrees, cluster)
            found.setdefault(_telling(spans, degrees), Place((*mapping, *expert_mapping), spans))
    return found


def _telling(spans: Spans, degrees: Degrees) -> Spans:
    """The spans that set the time: two places that have these in common are one.

    Ranks that hold the same states follow from those that split them and from the replicas. Without spread experts
    nothing of them is sent along axes of their own. Neighbours of a pipeline wait for the hop over its outermost level.
    """
    told = [(name, span) for name, span in spans if name in _TELLING and (degrees.ep > 1 or name in _DENSE)]
    pipe = dict(spans)["pp"]
    outermost = max((level for level, ranks in enumerate(pipe) if ranks > 1), default=0)
    return (*told, ("pp", (outermost,)))


_DENSE = ("tp", "cp", "replicate", "shard×cp")
_TELLING = (*_DENSE, "ep", "expert_shard")


_Mapping = tuple[tuple[str, tuple[tuple[str, int], ...]], ...]


def _dense_tables(degrees: Degrees, cluster: Cluster) -> Iterator[tuple[Factors, _Mapping]]:
    # A mapping that names the outermost level keeps every level a band of its own, also where it is filled in part.
    names = tuple(level.name for level in cluster.levels)
    try:
        levels = bands(Plan(degrees=degrees, mapping={"tp": {names[-1]: 1}}), cluster)
    except UnplaceableError:
        return
    if len(levels) != len(names):
        return
    axes = [axis for axis in reversed(DENSE_AXES) if getattr(degrees, axis) > 1]
    for order in permutations(axes):
        room = [band.ranks for band in levels]
        factors: Factors = {axis: [1] * len(levels) for axis in DENSE_AXES}
        if all(_fill(getattr(degrees, axis), room, factors[axis]) for axis in order):
            yield factors, tuple((axis, _named(factors[axis], names)) for axis in axes)


def _fill(degree: int, room: list[int], factors: list[int]) -> bool:
    """Give an axis what is left from the inside outwards, out of `room`; whether all of it found a place."""
    for level, free in enumerate(room):
        factors[level] = gcd(degree, free)
        room[level] //= factors[level]
        degree //= factors[level]
    return degree == 1


def _expert_tables(dense: Factors, degrees: Degrees, cluster: Cluster) -> Iterator[tuple[Factors, _Mapping]]:
    room, names = folded(dense), tuple(level.name for level in cluster.levels)
    for row in _rows(degrees.ep, tuple(room)):
        rest = [free // factor for free, factor in zip(room, row, strict=True)]
        factors: Factors = {"pp": dense["pp"], "replicate": dense["replicate"], "ep": list(row), "expert_shard": rest}
        yield factors, (("ep", _named(row, names)),) if degrees.ep > 1 else ()


def _named(row: Sequence[int], names: Sequence[str]) -> tuple[tuple[str, int], ...]:
    return tuple((name, factor) for name, factor in zip(names, row, strict=True) if factor > 1)


@lru_cache(maxsize=65536)
def _rows(degree: int, room: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Factors of one axis on every level, as far inside as possible first."""
    if not room:
        return ((),) if degree == 1 else ()
    return tuple(
        (factor, *rest)
        for factor in reversed(divisors(gcd(degree, room[0])))
        for rest in _rows(degree // factor, room[1:])
    )


def _spans(dense: Factors, expert: Factors, degrees: Degrees, cluster: Cluster) -> Spans:
    """How far every group reaches."""
    inside = capacities(degrees.world, cluster)
    dense_digits, expert_digits = _digits(dense, DENSE_AXES), _digits(expert, EXPERT_AXES)
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
    return tuple((name, _reach(digits, axes, inside)) for name, (digits, axes) in groups.items())


def capacities(world: int, cluster: Cluster) -> tuple[int, ...]:
    """Ranks inside one unit of every level; at the outermost, all."""
    inside = [ranks_per_node(world, cluster)]
    for level in cluster.levels[1:]:
        inside.append(inside[-1] * level.fanout)
    return *inside[:-1], max(world, inside[-1])


def _digits(factors: Factors, axes: Sequence[str]) -> list[tuple[str, int, int]]:
    """A rank's number as digits, innermost first: axis, base, weight; as ranks are numbered along the network."""
    found, stride = [], 1
    for band in range(len(factors[axes[0]])):
        for axis in reversed(axes):
            if factors[axis][band] > 1:
                found.append((axis, factors[axis][band], stride))
                stride *= factors[axis][band]
    return found


def _reach(digits: Iterable[tuple[str, int, int]], axes: Sequence[str], inside: tuple[int, ...]) -> Span:
    """Members of the group of some axes on every level beyond the one below."""
    return _counted(tuple((factor, stride) for axis, factor, stride in digits if axis in axes), inside)


@cache
def _counted(digits: tuple[tuple[int, int], ...], inside: tuple[int, ...]) -> Span:
    """Members on every level of a group whose ranks are told apart by these digits.

    Where units are filled in part and groups lie across their borders unevenly, the members counted inside a unit are
    the largest number that divides the group and is a multiple of those inside the level below.
    """
    total = prod(factor for factor, _ in digits)
    span, below = [], 1
    for capacity in inside[:-1]:
        members = 1
        for factor, stride in digits:
            room = max(1, capacity // stride)
            members *= factor if room % factor == 0 else (room if room < factor else gcd(factor, room))
        members = below * max(d for d in divisors(total // below) if d * below <= max(members, below))
        span.append(members // below)
        below = members
    return (*span, total // below)
