"""The fewest whole nodes that meet a deadline.

More chips are not always faster: some numbers divide neither layers nor batch, and have no layout at all. So every
number of nodes is considered, fewest first, until one is in time. Most are ruled out by lower bounds that all of them
share, in about a millisecond; the others are searched, and a search ends as soon as its own bounds are too late.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from danlu.cost import flops_per_token
from danlu.planner.goodput import goodput
from danlu.planner.pricing import PlanPricer, PricedPlan
from danlu.planner.request import PlanRequest
from danlu.planner.search import SearchFunction, SearchResult
from danlu.planner.search_space import SearchSpace

DeadlineProgress = Callable[[int, int, int], None]
"""Called with the chips considered next, the place of that number of nodes among all, and how many there are."""


@dataclass(frozen=True)
class DeadlineResult:
    """The fewest chips that meet a deadline."""

    tried_chips: tuple[tuple[int, float | None], ...]
    """Chips that were searched, and the days they take; None if nothing fits or finishes in time."""
    result: SearchResult | None
    """Of the fewest chips that finish in time."""
    ruled_out: int
    """Smaller numbers of nodes that were not searched: lower bounds show that they are late, or have no layout."""


def training_days(priced: PricedPlan, tokens: float, mtbf: float | None = None) -> float:
    """Days that training takes for this many tokens, including failures if the cluster states a rate."""
    return tokens / (priced.tokens_per_second * _goodput_share(priced.request, mtbf)) / 86400


def fewest_chips(
    request: PlanRequest,
    tokens: float,
    days: float,
    search: SearchFunction,
    mtbf: float | None = None,
    progress: DeadlineProgress | None = None,
) -> DeadlineResult:
    """The fewest whole nodes, of those of the request, that train this many tokens within this many days."""
    needed = tokens * flops_per_token(request.model, request.recipe.batch.length) / (days * 86400)
    counts, tried = whole_nodes(request), dict[int, float | None]()
    bounds = _SharedBounds(replace(request, chips=counts[0]))
    for place, chips in enumerate(counts):
        if chips * request.peak < needed:
            continue
        if progress:
            progress(chips, place, len(counts))
        pricer = bounds.pricer.for_chips(chips)
        longest = days * 86400 * _goodput_share(pricer.request, mtbf) * request.recipe.batch.tokens / tokens
        if not bounds.may_finish(pricer, longest):
            continue
        found = search(pricer.request, 1, within=longest, pricer=pricer)
        tried[chips] = training_days(found.answer, tokens, mtbf) if found.best else None
        if found.best:
            return DeadlineResult(tuple(tried.items()), found, place + 1 - len(tried))
    return DeadlineResult(tuple(tried.items()), None, len(counts) - len(tried))


def whole_nodes(request: PlanRequest) -> list[int]:
    """Chips of one node, two nodes, and so on up to the chips of the request, which need not be whole nodes."""
    per_node, most = request.cluster.chips_per_node, request.chips
    return [*range(per_node, most, per_node), most]


class _SharedBounds:
    """Lower bounds on the step time that numbers of nodes share: a layer's time depends on its shard, not on them."""

    def __init__(self, request: PlanRequest) -> None:
        self.space, self.pricer = SearchSpace(request), PlanPricer(request)

    def may_finish(self, pricer: PlanPricer, seconds: float) -> bool:
        """Whether some layout of the pricer's chips could take a step within these seconds."""
        for shape in self.space.degree_shapes(pricer.request.chips):
            if pricer.degrees_lower_bound(shape) > seconds:
                continue
            for number in self.space.microbatches(shape):
                one = shape._replace(microbatches=number)
                if any(pricer.shape_lower_bound(one, schedule) <= seconds for schedule in self.space.schedules_of(one)):
                    return True
        return False


def _goodput_share(request: PlanRequest, mtbf: float | None) -> float:
    found = goodput(request, mtbf)
    return found.share if found else 1.0
