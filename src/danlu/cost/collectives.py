"""Time of a collective over a network of levels.

Bytes that a rank sends into level l, for a group with r_l members there and R inside: gathers, scatters and reductions
V / R · (1 − 1/r_l), since what is inside is gathered or reduced first; all-to-all V · (n − R) / n, which no hierarchy
reduces (Ma et al., "BaGuaLu", PPoPP 2022; Hwang et al., "Tutel", 2023). A level's bandwidth is divided by its
oversubscription. Large transfers keep all levels busy at once, as rings do, so the slowest level sets the time; latency
adds up: r − 1 rounds per level for rings (Thakur et al., 2005), their logarithm for trees. `wire_bytes` alone
knows what a rank sends; the times of gathers and reductions and the traffic of a dry run use it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, inf, log2
from typing import Literal

from danlu.cost.measured_times import CollectiveTimes
from danlu.spec.cluster import Cluster, CollectiveOp

GroupShape = tuple[int, ...]
"""Members of a group on each level, relative to the level below: (8, 4) is 4 nodes of 8."""

CollectiveAlgorithm = Literal["library", "ring", "tree", "direct"]
"""How a collective runs: `library`, as measured where the level was probed, else as the fastest of those the library
chooses from; `ring`, rings on all levels at once; `tree`, the same bytes in fewer rounds; `direct`, every pair by
itself."""
LIBRARY_ALGORITHMS: dict[str, tuple[CollectiveAlgorithm, ...]] = {
    "all_gather": ("ring",),
    "all_reduce": ("ring", "tree"),
    "all_to_all": ("direct",),
}
"""What a library chooses from; reduce-scatter is priced as the all-gather."""


@dataclass(frozen=True)
class Link:
    """One level of the network as one chip sees it."""

    capacity: int
    """Chips inside this level and all below."""
    bandwidth: float
    """Bytes per second of one chip into the level, as a large collective achieves."""
    latency: float
    ring_bandwidth: float = inf
    """Bytes per second of one group into the level, however many of its members lie inside: less than the sum of theirs
    if the library drives one adapter per group."""
    measured: CollectiveTimes | None = None
    """Measured times of the operations, if the level was probed; they replace the formulas."""
    dispatch_bounds: tuple[tuple[float, float], ...] = ()
    """Of a network for lower bounds: seconds to start a dispatch of tokens that are sent once, and seconds per byte of
    the tokens, at every placement that may be the fastest; they replace the formula."""


@dataclass(frozen=True)
class Network:
    """The levels from the innermost outwards, and the least time of a collective."""

    links: tuple[Link, ...]
    collective_latency: float

    @property
    def capacities(self) -> tuple[int, ...]:
        """Chips inside every level: all that shapes of groups depend on."""
        return tuple([link.capacity for link in self.links])

    def group_shape(self, ranks: int, stride: int) -> GroupShape:
        """The shape of a group whose neighbors are `stride` ranks apart, with ranks placed in order."""
        inside, found = 1, []
        for index, link in enumerate(self.links):
            last = index == len(self.links) - 1
            within = ranks if last else min(ranks, max(1, link.capacity // stride))
            found.append(max(1, ceil(within / inside)))
            inside = max(inside, within)
        return tuple(found)


def wire_bytes(operation: str, ranks: int, payload: float) -> float:
    """Bytes that one rank sends over the network for a collective into which it puts `payload` bytes.

    Those of rings, which are optimal for gathers and reductions. A tree's broadcast sends as many in all, unevenly:
    here every rank has the mean. A receive sends nothing.
    """
    others = ranks - 1
    if operation == "all_gather":
        return payload * others
    if operation in ("reduce_scatter", "all_to_all", "broadcast"):
        return payload * others / ranks
    if operation == "all_reduce":
        return 2 * payload * others / ranks
    if operation in ("send", "receive"):
        return payload if operation == "send" else 0.0
    raise ValueError(f"a collective must be one whose traffic is known, but is {operation!r}; add it to `wire_bytes`")


def build_network(cluster: Cluster, inner: float, outer: float, start: float, ring: float = inf) -> Network:
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


def all_gather_time(
    network: Network, span: GroupShape, gathered: float, algorithm: CollectiveAlgorithm = "library"
) -> float:
    """Seconds until every member has all `gathered` bytes."""
    return _collective_time(network, "all_gather", span, gathered, algorithm)


def reduce_scatter_time(
    network: Network, span: GroupShape, reduced: float, algorithm: CollectiveAlgorithm = "library"
) -> float:
    """Seconds until every member has its shard of the sum of `reduced` bytes: as long as gathering them."""
    known = _measured(network, "reduce_scatter", span, reduced) if algorithm == "library" else None
    return all_gather_time(network, span, reduced, algorithm) if known is None else known


def all_reduce_time(
    network: Network, span: GroupShape, reduced: float, algorithm: CollectiveAlgorithm = "library"
) -> float:
    """Seconds until every member has the sum of `reduced` bytes: a scatter and a gather."""
    return _collective_time(network, "all_reduce", span, reduced, algorithm)


def all_to_all_time(
    network: Network, span: GroupShape, held: float, algorithm: CollectiveAlgorithm = "library"
) -> float:
    """Seconds until every member has sent `held` bytes in equal parts to all members, itself included."""
    return _collective_time(network, "all_to_all", span, held, algorithm)


def _collective_time(
    network: Network, operation: CollectiveOp, span: GroupShape, size: float, algorithm: CollectiveAlgorithm
) -> float:
    crossed = [(ranks, link) for ranks, link in zip(span, network.links, strict=True) if ranks > 1]
    if not crossed:
        return 0.0
    choices = LIBRARY_ALGORITHMS[operation]
    if algorithm == "library":
        known = _measured(network, operation, span, size)
        if known is not None:
            return known
    elif algorithm in choices:
        choices = (algorithm,)
    else:
        expected = " or ".join(("library", *choices))
        raise ValueError(f"the algorithm of {operation} must be {expected}, but is {algorithm}")
    if operation == "all_to_all":
        busy = _direct_seconds(network, span, size)
    else:
        busy = _ring_seconds(crossed, operation, size)
    turns = 2 if operation == "all_reduce" else 1
    latency = min([_latency(crossed, turns, each) for each in choices])
    return network.collective_latency + latency + busy


def _latency(crossed: Sequence[tuple[int, Link]], turns: int, algorithm: CollectiveAlgorithm) -> float:
    """Seconds of the rounds of all levels: one per other rank, or their logarithm for trees."""
    latency = 0.0
    for ranks, link in crossed:
        latency += turns * (log2(ranks) if algorithm == "tree" else ranks - 1) * link.latency
    return latency


def _ring_seconds(crossed: Sequence[tuple[int, Link]], operation: CollectiveOp, size: float) -> float:
    """Seconds that the slowest level is busy; what is inside a level is gathered or reduced first."""
    slowest, inside = 0.0, 1
    for ranks, link in crossed:
        sent = wire_bytes(operation, ranks, size / ranks if operation == "all_gather" else size)
        slowest = max(slowest, sent / min(inside * link.bandwidth, link.ring_bandwidth))
        inside *= ranks
    return slowest


def _direct_seconds(network: Network, span: GroupShape, held: float) -> float:
    """Seconds that the slowest level is busy if every pair of ranks exchanges its part by itself."""
    slowest, inside, total = 0.0, 1, group_size(span)
    for index, (ranks, link) in enumerate(zip(span, network.links, strict=True)):
        if ranks > 1:
            # The innermost level has its own wires; what leaves a node passes every level.
            reached = inside * ranks if index == 0 else total
            slowest = max(slowest, held * (reached - inside) / total / link.bandwidth)
            inside *= ranks
    return slowest


def dedup_dispatch_time(network: Network, span: GroupShape, token: float, tokens: float, top_k: int) -> float:
    """Seconds to send every token once to each node that one of its `top_k` experts lies on, and there once a rank.

    Of N ranks (1 − (1 − 1/N)^k) · (N − 1) others are reached by k experts drawn at random. With k = 8 on 8 ranks of a
    B200 that is 4.6 sends, not 7: at the fitted bandwidth as long as HybridEP was measured to take (536 GB/s of what is
    received, its own rank's counted; deepseek-ai/DeepEP, docs/README_Hybrid-EP.md), and so on 32 ranks of a GB200.
    """
    if group_size(span) == 1:
        return 0.0
    inner, nodes = span[0], group_size(span[1:])
    # What leaves a node crosses every level up to the one that its own node and the other have in common.
    outside, near = 0.0, 1
    for units, link in zip(span[1:], network.links[1:], strict=True):
        if units > 1:
            beyond = (nodes - near) * (1 - (1 - 1 / nodes) ** top_k)
            outside = max(outside, tokens * token * beyond / link.bandwidth)
            near *= units
    # A token reaches a rank from the node's gateway, or from its own rank: either way it crosses the node once.
    ranks = (
        _distinct_others(inner, top_k) if nodes == 1 else group_size(span) * (1 - (1 - 1 / group_size(span)) ** top_k)
    )
    inside = tokens * token * ranks * (1.0 if nodes == 1 else 1 - 1 / inner) / network.links[0].bandwidth
    latency = sum((ranks - 1) * link.latency for ranks, link in zip(span, network.links, strict=True))
    return network.collective_latency + latency + max(outside, inside)


def level_dispatch_times(
    network: Network, span: GroupShape, token: float, tokens: float, top_k: int
) -> tuple[float, float]:
    """Seconds to send every token once to each unit of a level that one of its `top_k` experts lies in, level by level.

    Over the outermost level, and over those inside it, each after the one outside it; experts are drawn at random. On a
    network for lower bounds all is said to be of the outermost, which hides best.
    """
    seconds = []
    for level, rows in dispatch_rows(span, top_k):
        units, link, held = span[level], network.links[level], rows * tokens * token
        if link.dispatch_bounds:
            return min(start + per_byte * tokens * token for start, per_byte in link.dispatch_bounds), 0.0
        known = link.measured.seconds("all_to_all", units, held) if link.measured else None
        direct = network.collective_latency + (units - 1) * (link.latency + held / units / link.bandwidth)
        seconds.append(direct if known is None else known)
    return sum(seconds[:1]), sum(seconds[1:])


def dispatch_rows(span: GroupShape, top_k: int) -> Iterator[tuple[int, float]]:
    """The levels that tokens sent once pass, outermost first, and for each the rows that a rank sends there per token.

    Those for its own unit are counted.
    """
    rows, draws = 1.0, float(top_k)
    for level in reversed(range(len(span))):
        if (units := span[level]) > 1:
            hit = 1 - (1 - 1 / units) ** draws
            rows, draws = rows * units * hit, draws / (units * hit)
            yield level, rows


def dispatch_bound(network: Network, span: GroupShape, top_k: int) -> tuple[float, float]:
    """What `Link.dispatch_bounds` holds of one placement, on levels that were not measured."""
    start = per_byte = 0.0
    for level, rows in dispatch_rows(span, top_k):
        units, link = span[level], network.links[level]
        start += network.collective_latency + (units - 1) * link.latency
        per_byte += rows * (units - 1) / units / link.bandwidth
    return start, per_byte


def _distinct_others(ranks: int, draws: int) -> float:
    """Expected number of distinct ranks, other than one, hit by `draws` uniform draws."""
    return (ranks - 1) * (1 - (1 - 1 / ranks) ** draws)


def p2p_time(network: Network, level: int, sent: float) -> float:
    """Seconds to send bytes to a rank on the other side of a level."""
    link = network.links[level]
    known = link.measured.seconds("p2p", 2, sent) if link.measured else None
    return known if known is not None else link.latency + sent / link.bandwidth


def ring_turn_time(network: Network, span: GroupShape, sent: float) -> float:
    """Seconds until every member of a ring has sent bytes to the next one: those of the slowest hop."""
    return max((p2p_time(network, level, sent) for level, ranks in enumerate(span) if ranks > 1), default=0.0)


def outermost_level(span: GroupShape) -> int:
    """The outermost level that a group crosses; the innermost for a rank by itself."""
    for level in range(len(span) - 1, 0, -1):
        if span[level] > 1:
            return level
    return 0


def _measured(network: Network, operation: CollectiveOp, span: GroupShape, size: float) -> float | None:
    """Measured seconds on the outermost level that a group crosses, if there are any."""
    measured = network.links[outermost_level(span)].measured
    return measured.seconds(operation, ranks, size) if measured and (ranks := group_size(span)) > 1 else None


def group_size(span: Sequence[int]) -> int:
    """Ranks of a group."""
    count = 1
    for ranks in span:
        count *= ranks
    return count
