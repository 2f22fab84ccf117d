"""The fewest chips that meet a deadline.

More chips are not always faster: some numbers divide neither layers nor batch, and have no layout at all. So every
number of full nodes is searched, starting at the fewest that could finish in time at peak FLOP/s, until one does; a
number that cannot is abandoned as soon as its lower bounds show it.
"""

from dataclasses import dataclass, replace

from danlu.cost import flops_per_token
from danlu.planner.goodput import goodput
from danlu.planner.pricing import PricedPlan
from danlu.planner.request import PlanRequest
from danlu.planner.search import SearchFunction, SearchResult

EVERY_NODE_COUNT_UP_TO = 128
"""Every number of nodes up to this one is searched; beyond, every second, then every fourth … after each doubling."""


@dataclass(frozen=True)
class DeadlineResult:
    """The fewest chips that meet a deadline."""

    tried_chips: tuple[tuple[int, float | None], ...]
    """Chips, and the days they take; None if nothing fits or finishes in time."""
    result: SearchResult | None
    """Of the fewest chips that finish in time."""
    lower_bound_chips: int
    """Fewer chips were not searched: they would be late even at peak FLOP/s."""


def training_days(priced: PricedPlan, tokens: float, mtbf: float | None = None) -> float:
    """Days that training takes for this many tokens, including failures if the cluster states a rate."""
    return tokens / (priced.tokens_per_second * _goodput_share(priced.request, mtbf)) / 86400


def fewest_chips(
    request: PlanRequest, tokens: float, days: float, search: SearchFunction, mtbf: float | None = None
) -> DeadlineResult:
    """The fewest of `chip_counts_to_try` that train this many tokens within this many days."""
    needed = tokens * flops_per_token(request.model, request.recipe.batch.length) / (days * 86400)
    counts = [chips for chips in chip_counts_to_try(request) if chips * request.peak >= needed]
    tried: dict[int, float | None] = {}
    for chips in counts:
        smaller = replace(request, chips=chips)
        longest = days * 86400 * _goodput_share(smaller, mtbf) * request.recipe.batch.tokens / tokens
        found = search(smaller, 1, within=longest)
        tried[chips] = training_days(found.answer, tokens, mtbf) if found.best else None
        if found.best:
            return DeadlineResult(tuple(tried.items()), found, counts[0])
    return DeadlineResult(tuple(tried.items()), None, counts[0] if counts else request.chips + 1)


def chip_counts_to_try(request: PlanRequest) -> list[int]:
    """Chips of full nodes up to those of the request: every number up to `EVERY_NODE_COUNT_UP_TO`, then in wider steps.

    A step is never more than 1/64 of the number, and large odd numbers of nodes rarely have a layout.
    """
    per_node, most = request.cluster.chips_per_node, request.chips
    counts, nodes = set(), 1
    while nodes * per_node <= most:
        counts.add(nodes * per_node)
        nodes += 2 ** (nodes // EVERY_NODE_COUNT_UP_TO).bit_length()
    return sorted({*counts, most})


def _goodput_share(request: PlanRequest, mtbf: float | None) -> float:
    found = goodput(request, mtbf)
    return found.share if found else 1.0
