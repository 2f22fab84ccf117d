"""Time of a collective over a network of levels.

Bytes that a rank sends into level l, for a group with r_l members there and R inside: gathers, scatters and reductions
V / R · (1 − 1/r_l), since what is inside is gathered or reduced first; all-to-all V · (n − R) / n, which no hierarchy
reduces (Ma et al., "BaGuaLu", PPoPP 2022; Hwang et al., "Tutel", 2023). A level's bandwidth is divided by its
oversubscription. Large transfers keep all levels busy at once, as rings do, so the slowest level sets the time; latency
adds up: r − 1 rounds a level for rings (Thakur et al., 2005), their logarithm for trees.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf, log2

from danlu.cost.curves import CollectiveTimes
from danlu.spec.cluster import Cluster, Operation

Span = tuple[int, ...]
"""How many members of a group lie inside each level beyond the one below: (8, 4) is 4 nodes of 8."""


@dataclass(frozen=True)
class Link:
    """One level of the network as one chip gets it."""

    capacity: int
    """Chips inside this level and all below."""
    bandwidth: float
    """Bytes a second of one chip into the level that a large collective gets."""
    latency: float
    ring: float = inf
    """Bytes a second of one group into the level, however many of its members lie inside: less than all of these get
    together where the library drives one adapter for a group."""
    measured: CollectiveTimes | None = None
    """Times of the operations themselves, where the level was probed; they stand in for the two above."""


@dataclass(frozen=True)
class Network:
    """The levels from the innermost outwards, and what a collective costs at least."""

    links: tuple[Link, ...]
    start: float

    def span(self, ranks: int, stride: int) -> Span:
        """Where the members of a group lie whose neighbours are `stride` ranks apart, with ranks placed in order."""
        inside, found = 1, []
        for index, link in enumerate(self.links):
            last = index == len(self.links) - 1
            within = ranks if last else min(ranks, max(1, link.capacity // stride))
            found.append(max(1, ceil(within / inside)))
            inside = max(inside, within)
        return tuple(found)


def network_of(cluster: Cluster, inner: float, outer: float, start: float, ring: float = inf) -> Network:
    """The network of a cluster at the given efficiencies of its innermost level and of the others.

    `ring` bounds what one group gets beyond the innermost level.
    """
    links, capacity = [], 1
    for index, level in enumerate(cluster.levels):
        capacity *= level.fanout
        share = inner if index == 0 else outer
        group = ring if index else inf
        measured = CollectiveTimes(level.collectives) if level.collectives else None
        links.append(Link(capacity, level.bandwidth * share / level.oversubscription, level.latency, group, measured))
    return Network(tuple(links), start)


def all_gather(network: Network, span: Span, gathered: float) -> float:
    """Seconds until every member has all `gathered` bytes."""
    known = _measured(network, "all_gather", span, gathered)
    if known is not None:
        return known
    slowest, latency, inside = 0.0, 0.0, 1
    for ranks, link in zip(span, network.links, strict=True):
        if ranks > 1:
            slowest = max(slowest, gathered * (1 - 1 / ranks) / min(inside * link.bandwidth, link.ring))
            latency += (ranks - 1) * link.latency
            inside *= ranks
    return network.start + latency + slowest if inside > 1 else 0.0


def reduce_scatter(network: Network, span: Span, reduced: float) -> float:
    """Seconds until every member has its part of the sum of `reduced` bytes: as long as gathering them."""
    known = _measured(network, "reduce_scatter", span, reduced)
    return all_gather(network, span, reduced) if known is None else known


def all_reduce(network: Network, span: Span, reduced: float) -> float:
    """Seconds until every member has the sum of `reduced` bytes: a scatter and a gather, by rings or trees."""
    known = _measured(network, "all_reduce", span, reduced)
    if known is not None:
        return known
    slowest, ring, tree, inside = 0.0, 0.0, 0.0, 1
    for ranks, link in zip(span, network.links, strict=True):
        if ranks > 1:
            slowest = max(slowest, 2 * reduced * (1 - 1 / ranks) / min(inside * link.bandwidth, link.ring))
            ring += 2 * (ranks - 1) * link.latency
            tree += 2 * log2(ranks) * link.latency
            inside *= ranks
    return network.start + min(ring, tree) + slowest if inside > 1 else 0.0


def all_to_all(network: Network, span: Span, held: float) -> float:
    """Seconds until every member has sent `held` bytes in equal parts to all members, itself included."""
    known = _measured(network, "all_to_all", span, held)
    if known is not None:
        return known
    total = members(span)
    slowest, latency, inside = 0.0, 0.0, 1
    for index, (ranks, link) in enumerate(zip(span, network.links, strict=True)):
        if ranks > 1:
            # The innermost level has wires of its own; what leaves a node passes every level on its way.
            reached = inside * ranks if index == 0 else total
            slowest = max(slowest, held * (reached - inside) / total / link.bandwidth)
            latency += link.latency * (ranks - 1)
            inside *= ranks
    return network.start + latency + slowest if inside > 1 else 0.0


def dispatch_once(network: Network, span: Span, token: float, tokens: float, top_k: int) -> float:
    """Seconds to send every token once to each node that one of its `top_k` experts lies on, and there once a rank.

    Of N places (1 − (1 − 1/N)^k) · (N − 1) others are reached by k experts drawn at random. With k = 8 on 8 ranks of a
    B200 that is 4.6 sends, not 7: at the fitted bandwidth as long as HybridEP was measured to take (536 GB/s of what is
    received, its own rank's counted; deepseek-ai/DeepEP, docs/README_Hybrid-EP.md), and so on 32 ranks of a GB200.
    """
    inner, nodes = span[0], members(span[1:])
    if members(span) == 1:
        return 0.0
    outside = tokens * token * _others(nodes, top_k) / min(link.bandwidth for link in network.links[1:])
    # A token comes to a rank from the node's gateway, or from its own rank: either way it crosses the node once.
    ranks = _others(inner, top_k) if nodes == 1 else members(span) * (1 - (1 - 1 / members(span)) ** top_k)
    inside = tokens * token * ranks * (1.0 if nodes == 1 else 1 - 1 / inner) / network.links[0].bandwidth
    latency = sum((ranks - 1) * link.latency for ranks, link in zip(span, network.links, strict=True))
    return network.start + latency + max(outside, inside)


def _others(places: int, draws: int) -> float:
    """How many of all places but one are met, on average, by so many draws among all of them."""
    return (places - 1) * (1 - (1 - 1 / places) ** draws)


def transfer(network: Network, level: int, sent: float) -> float:
    """Seconds to send bytes to a rank on the other side of a level."""
    link = network.links[level]
    known = link.measured.of("p2p", 2, sent) if link.measured else None
    return known if known is not None else link.latency + sent / link.bandwidth


def outermost(span: Span) -> int:
    """The outermost level that a group crosses; the innermost for a rank by itself."""
    return max((level for level, ranks in enumerate(span) if ranks > 1), default=0)


def _measured(network: Network, operation: Operation, span: Span, size: float) -> float | None:
    """Seconds as they were measured on the outermost level that a group crosses, if they were."""
    ranks, link = members(span), network.links[outermost(span)]
    return link.measured.of(operation, ranks, size) if link.measured and ranks > 1 else None


def members(span: Sequence[int]) -> int:
    """Ranks of a group."""
    count = 1
    for ranks in span:
        count *= ranks
    return count
