"""A relaxed network for lower bounds: every group is as fast as at the best placement it could have by itself.

Every group of a layout gets its own level, with the least time over all ways to spread its ranks over the real levels.
At a real placement groups compete for the inner levels, so no collective is faster there than here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from math import log2

from danlu.cost.collectives import GroupShape, Link, Network, dispatch_bound, group_size
from danlu.planner.mesh_placement import GroupShapes, ranks_per_level
from danlu.spec.cluster import Cluster
from danlu.spec.divisors import divisors

GATHER_GROUPS = ("tp", "replicate", "shard×cp", "data×cp", "expert_shard", "expert_data")
"""Groups that gather, scatter and reduce."""
ALL_TO_ALL_GROUPS = ("cp", "ep")
"""Groups that run all-to-all."""
COLLECTIVE_GROUPS = (*GATHER_GROUPS, *ALL_TO_ALL_GROUPS)


class RelaxedNetworkBuilder:
    """Builds the network for a layout's groups; links are cached by group size."""

    def __init__(self, real: Network, world: int, cluster: Cluster, top_k: int) -> None:
        """`top_k`: the experts of a token, on which it depends how often one that is sent once is needed."""
        self._real, self._inside, self._top_k = real, ranks_per_level(world, cluster), top_k
        self._link = lru_cache(maxsize=None)(self._fastest_link)
        # Point-to-point transfers use one level as fast as the fastest of the real ones.
        fastest, soonest = max(link.bandwidth for link in real.links), min(link.latency for link in real.links)
        self._start = real.collective_latency
        if any(link.measured for link in real.links):
            # Measured times follow no formula that gives a bound: here they cost nothing.
            fastest, soonest, self._start = float("inf"), 0.0, 0.0
        self._neighbors = Link(max(world, real.links[-1].capacity) + 1, fastest, soonest)

    def build(self, sizes: Sequence[int], known: GroupShapes = ()) -> tuple[Network, GroupShapes]:
        """The network for groups of these sizes, in the order of `COLLECTIVE_GROUPS`, and each group's shape on it.

        The shape of `known` groups on the real levels is fixed.
        """
        links, shapes, fixed = [self._neighbors], [("pp", _shape_on_one_level(0, 1))], dict(known)
        for index, (name, ranks) in enumerate(zip(COLLECTIVE_GROUPS, sizes, strict=True), start=1):
            links.append(self._link(name, ranks, fixed.get(name)))
            shapes.append((name, _shape_on_one_level(index, ranks)))
        return Network(tuple(links), self._start), tuple(shapes)

    def _fastest_link(self, name: str, ranks: int, fixed: GroupShape | None) -> Link:
        """One level on which a group takes the least time over all its shapes on the real levels."""
        if ranks == 1 or any(link.measured for link in self._real.links):
            return self._neighbors
        shapes = [fixed] if fixed else list(_possible_shapes(ranks, self._inside))
        seconds_per_byte = min(self._seconds_per_byte(shape, name in ALL_TO_ALL_GROUPS) for shape in shapes)
        latencies = [link.latency for link in self._real.links]
        rings = min(sum((r - 1) * late for r, late in zip(shape, latencies, strict=True)) for shape in shapes)
        trees = min(sum(log2(r) * late for r, late in zip(shape, latencies, strict=True)) for shape in shapes)
        latency = min(rings / (ranks - 1), trees / log2(ranks))
        link = Link(self._neighbors.capacity, (1 - 1 / ranks) / seconds_per_byte, latency)
        return self._with_dispatch(link, shapes) if name == "ep" else link

    def _with_dispatch(self, link: Link, shapes: Sequence[GroupShape]) -> Link:
        """The level of `ep`, where tokens may be sent once: with the terms of every shape that none beats in both."""
        every = sorted({dispatch_bound(self._real, shape, self._top_k) for shape in shapes})
        best = [one for index, one in enumerate(every) if all(one[1] < earlier[1] for earlier in every[:index])]
        return replace(link, dispatch_bounds=tuple(best))

    def _seconds_per_byte(self, shape: GroupShape, all_to_all: bool) -> float:
        """Seconds per byte of a group with this shape: per byte gathered, or per byte that a rank sends to all."""
        slowest, inside, total = 0.0, 1, group_size(shape)
        for index, (ranks, link) in enumerate(zip(shape, self._real.links, strict=True)):
            if ranks > 1:
                reached = inside * ranks if index == 0 else total
                sent = (reached - inside) / total if all_to_all else (1 - 1 / ranks) / inside
                slowest = max(slowest, sent / link.bandwidth)
                inside *= ranks
        return slowest


@cache
def _shape_on_one_level(index: int, ranks: int) -> GroupShape:
    """The shape of a group whose ranks are all on its own level of the relaxed network."""
    return tuple(ranks if level == index else 1 for level in range(len(COLLECTIVE_GROUPS) + 1))


def _possible_shapes(ranks: int, inside: Sequence[int]) -> Iterator[GroupShape]:
    """Every way to spread the ranks over the levels; the outermost takes the rest."""

    def further(level: int, below: int) -> Iterator[tuple[int, ...]]:
        if level == len(inside) - 1:
            yield (ranks // below,)
            return
        for factor in divisors(ranks // below):
            if factor * below <= inside[level]:
                for rest in further(level + 1, factor * below):
                    yield factor, *rest

    return further(0, 1)
