"""A relaxed network for lower bounds: every group is as fast as at the best placement it could have by itself.

Every group of a layout gets its own level, with the least time over all ways to spread its ranks over the real levels.
At a real placement groups compete for the inner levels, so no collective is faster there than here.
"""

from collections.abc import Iterator, Sequence
from math import log2

from danlu.cost.collectives import GroupShape, Link, Network, group_size
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

    def __init__(self, real: Network, world: int, cluster: Cluster) -> None:
        self._real, self._inside = real, ranks_per_level(world, cluster)
        self._links: dict[tuple[int, bool, GroupShape | None], Link] = {}
        self._spans: dict[tuple[int, int], GroupShape] = {}
        # Point-to-point transfers use one level as fast as the fastest of the real ones.
        fastest, soonest = max(link.bandwidth for link in real.links), min(link.latency for link in real.links)
        self._start = real.collective_latency
        if any(link.measured for link in real.links):
            # Measured times follow no formula that gives a bound: here they cost nothing.
            fastest, soonest, self._start = float("inf"), 0.0, 0.0
        self._neighbors = Link(max(world, real.links[-1].capacity) + 1, fastest, soonest)

    def network(self, sizes: Sequence[int], known: GroupShapes = ()) -> tuple[Network, GroupShapes]:
        """The network for groups of these sizes, in the order of `COLLECTIVE_GROUPS`, and each group's shape on it.

        The shape of `known` groups on the real levels is fixed.
        """
        links, spans, settled = [self._neighbors], [("pp", self._span(0, 1))], dict(known)
        for index, (name, ranks) in enumerate(zip(COLLECTIVE_GROUPS, sizes, strict=True), start=1):
            links.append(self._link(ranks, name in ALL_TO_ALL_GROUPS, settled.get(name)))
            spans.append((name, self._span(index, ranks)))
        return Network(tuple(links), self._start), tuple(spans)

    def _span(self, index: int, ranks: int) -> GroupShape:
        found = self._spans.get((index, ranks))
        if found is None:
            found = self._spans[index, ranks] = tuple(
                ranks if level == index else 1 for level in range(len(COLLECTIVE_GROUPS) + 1)
            )
        return found

    def _link(self, ranks: int, all_to_all: bool, settled: GroupShape | None) -> Link:
        key = (ranks, all_to_all, settled)
        found = self._links.get(key)
        if found is None:
            found = self._links[key] = self._best(*key)
        return found

    def _best(self, ranks: int, all_to_all: bool, settled: GroupShape | None) -> Link:
        """One level on which a group takes the least time over all its spreads over the real levels."""
        if ranks == 1 or any(link.measured for link in self._real.links):
            return self._neighbors
        spreads = [settled] if settled else list(_group_shapes(ranks, self._inside))
        busy = min(self._seconds_per_byte(span, all_to_all) for span in spreads)
        latencies = [link.latency for link in self._real.links]
        rings = min(sum((r - 1) * late for r, late in zip(span, latencies, strict=True)) for span in spreads)
        trees = min(sum(log2(r) * late for r, late in zip(span, latencies, strict=True)) for span in spreads)
        latency = min(rings / (ranks - 1), trees / log2(ranks))
        return Link(self._neighbors.capacity, (1 - 1 / ranks) / busy, latency)

    def _seconds_per_byte(self, span: GroupShape, all_to_all: bool) -> float:
        """Seconds per byte of a group with this shape: per byte gathered, or per byte that a rank sends to all."""
        slowest, inside, total = 0.0, 1, group_size(span)
        for index, (ranks, link) in enumerate(zip(span, self._real.links, strict=True)):
            if ranks > 1:
                reached = inside * ranks if index == 0 else total
                sent = (reached - inside) / total if all_to_all else (1 - 1 / ranks) / inside
                slowest = max(slowest, sent / link.bandwidth)
                inside *= ranks
        return slowest


def _group_shapes(ranks: int, inside: Sequence[int]) -> Iterator[GroupShape]:
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
