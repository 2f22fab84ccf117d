"""A network on which every group is as fast as in the best place it could have: what a bound on a layout is priced on.

Every group of a layout gets a level of its own, with the least time of all ways to spread so many ranks over the real
levels. Groups of a real place compete for the inner levels, so none of its collectives is faster than here.
"""

from collections.abc import Iterator, Sequence
from math import log2

from danlu.cost.collectives import Link, Network, Span, members
from danlu.planner.places import Spans, capacities
from danlu.spec.cluster import Cluster
from danlu.spec.numbers import divisors

GATHERING = ("tp", "replicate", "shard×cp", "data×cp", "expert_shard", "expert_data")
"""Groups that gather, scatter and reduce."""
EXCHANGING = ("cp", "ep")
"""Groups that send from all to all."""
GROUPS = (*GATHERING, *EXCHANGING)


class LeastNetwork:
    """Makes the network of a layout's groups; every size of a group is worked out once."""

    def __init__(self, real: Network, world: int, cluster: Cluster) -> None:
        self._real, self._inside = real, capacities(world, cluster)
        self._links: dict[tuple[int, bool, Span | None], Link] = {}
        self._spans: dict[tuple[int, int], Span] = {}
        # Transfers between neighbours take the first level that is wide enough: the fastest of the real ones.
        fastest, soonest = max(link.bandwidth for link in real.links), min(link.latency for link in real.links)
        self._start = real.start
        if any(link.measured for link in real.links):
            # Measured times follow no formula that a bound could be made of: here they cost nothing.
            fastest, soonest, self._start = float("inf"), 0.0, 0.0
        self._neighbours = Link(max(world, real.links[-1].capacity) + 1, fastest, soonest)

    def of(self, sizes: Sequence[int], known: Spans = ()) -> tuple[Network, Spans]:
        """The network of groups of these sizes, in the order of `GROUPS`, and where on it each lies.

        Of the groups that are `known` the place on the real levels is settled.
        """
        links, spans, settled = [self._neighbours], [("pp", self._span(0, 1))], dict(known)
        for index, (name, ranks) in enumerate(zip(GROUPS, sizes, strict=True), start=1):
            links.append(self._link(ranks, name in EXCHANGING, settled.get(name)))
            spans.append((name, self._span(index, ranks)))
        return Network(tuple(links), self._start), tuple(spans)

    def _span(self, index: int, ranks: int) -> Span:
        found = self._spans.get((index, ranks))
        if found is None:
            found = self._spans[index, ranks] = tuple(
                ranks if place == index else 1 for place in range(len(GROUPS) + 1)
            )
        return found

    def _link(self, ranks: int, exchanging: bool, settled: Span | None) -> Link:
        key = (ranks, exchanging, settled)
        found = self._links.get(key)
        if found is None:
            found = self._links[key] = self._best(*key)
        return found

    def _best(self, ranks: int, exchanging: bool, settled: Span | None) -> Link:
        """One level on which a group takes the least time that any spread over the real levels gives it."""
        if ranks == 1 or any(link.measured for link in self._real.links):
            return self._neighbours
        spreads = [settled] if settled else list(_spreads(ranks, self._inside))
        busy = min(self._busy(span, exchanging) for span in spreads)
        latencies = [link.latency for link in self._real.links]
        rings = min(sum((r - 1) * late for r, late in zip(span, latencies, strict=True)) for span in spreads)
        trees = min(sum(log2(r) * late for r, late in zip(span, latencies, strict=True)) for span in spreads)
        latency = min(rings / (ranks - 1), trees / log2(ranks))
        return Link(self._neighbours.capacity, (1 - 1 / ranks) / busy, latency)

    def _busy(self, span: Span, exchanging: bool) -> float:
        """Seconds a byte of a group that is spread so: of one gathered, or of one held to be sent to all."""
        slowest, inside, total = 0.0, 1, members(span)
        for index, (ranks, link) in enumerate(zip(span, self._real.links, strict=True)):
            if ranks > 1:
                reached = inside * ranks if index == 0 else total
                sent = (reached - inside) / total if exchanging else (1 - 1 / ranks) / inside
                slowest = max(slowest, sent / link.bandwidth)
                inside *= ranks
        return slowest


def _spreads(ranks: int, inside: Sequence[int]) -> Iterator[Span]:
    """Every way to have so many ranks inside the units of each level; the outermost holds what is left."""

    def further(level: int, below: int) -> Iterator[tuple[int, ...]]:
        if level == len(inside) - 1:
            yield (ranks // below,)
            return
        for factor in divisors(ranks // below):
            if factor * below <= inside[level]:
                for rest in further(level + 1, factor * below):
                    yield factor, *rest

    return further(0, 1)
