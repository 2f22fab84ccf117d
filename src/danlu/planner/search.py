"""Best-first search for the fastest layouts of a request, and for all that tie with the fastest.

Layouts form a tree: a shape (how the model and the batch are sharded), its schedules, how states are sharded, the
placement on the network, and the parts in which tokens go through experts. Every node has a lower bound on the time
of all layouts below it. The node with the lowest bound is expanded next, so the first complete layout popped is the
fastest, and no other is faster: the search is exact, and expands only nodes that could have won, or tied.
"""

import heapq
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, product
from math import inf
from time import monotonic
from typing import NamedTuple, Protocol

from danlu.cost.memory import MemoryEstimate
from danlu.planner.mesh_placement import GroupShapes, placement_of_plan
from danlu.planner.pricing import PlanPricer, PricedPlan
from danlu.planner.request import PlanRequest
from danlu.planner.search_space import Candidate, ScheduleKnobs, SearchSpace, ShapeKnobs, candidate_from_plan
from danlu.planner.ties import TIE_WIDTH, simplest_first, tie_limit
from danlu.spec.plan import Plan

DEFAULT_RESULTS = 5
"""Layouts that a search returns by default."""


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The result of a search."""

    request: PlanRequest
    best: tuple[PricedPlan, ...]
    """Fastest first, each with different degrees; empty if nothing fits."""
    tied: tuple[PricedPlan, ...]
    """All that tie with the fastest, simplest first, each with different degrees; empty if nothing fits."""
    tie_width: float
    """How much slower than the fastest a layout may be and still tie with it."""
    layouts_searched: int
    """Size of the search space, without placements on the network; 0 with `within`, where they are not counted."""
    priced: int
    """Placed layouts that were priced exactly; all others were pruned by a bound."""
    seconds: float
    """Duration of the search."""
    least_memory: PricedPlan | None
    """The layout with the least memory, if none fits."""

    @property
    def answer(self) -> PricedPlan:
        """The plan to use: the simplest of those that tie with the fastest."""
        return self.tied[0]

    @property
    def ranked(self) -> tuple[PricedPlan, ...]:
        """The answer, the others of its tie, and then the slower ones, fastest first."""
        slower = tie_limit(self.best[0].seconds, self.tie_width) if self.best else inf
        return (*self.tied, *(priced for priced in self.best if priced.seconds > slower))


ProgressCallback = Callable[[float, int], None]
"""Called now and then with the share of the proof that is done (0 until a complete layout is known) and the number of
expanded nodes."""


def price_plan(request: PlanRequest, plan: Plan) -> PricedPlan:
    """Price one plan; raises `PlacementError` if its axes do not fit the network."""
    return PlanPricer(request).price(candidate_from_plan(plan), placement_of_plan(plan, request.cluster))


class SearchFunction(Protocol):
    """`search` with its progress shown."""

    def __call__(
        self,
        request: PlanRequest,
        shown: int,
        *,
        within: float = inf,
        tie_width: float = TIE_WIDTH,
        pricer: PlanPricer | None = None,
    ) -> SearchResult:
        """Find the `shown` fastest layouts whose step takes at most `within` seconds, and all that tie."""
        ...


def search(
    request: PlanRequest,
    shown: int = DEFAULT_RESULTS,
    progress: ProgressCallback | None = None,
    within: float = inf,
    *,
    tie_width: float = TIE_WIDTH,
    pricer: PlanPricer | None = None,
) -> SearchResult:
    """Find the fastest layouts that fit, with the proof that there is no faster one, and all that tie with the fastest.

    With `within`, only those whose step takes at most that many seconds; if there is none, the search ends early. With
    a `tie_width` of 0 only equal times tie, and the answer is the fastest. A `pricer` of the same request saves what it
    remembers of searches before.
    """
    return _Search(pricer or PlanPricer(request), shown, progress, within, tie_width).run()


def search_exhaustively(request: PlanRequest) -> PricedPlan | None:
    """The fastest layout that fits, by pricing every layout at every placement; only for small requests."""
    pricer = PlanPricer(request)
    every = (
        pricer.price(candidate, placement)
        for candidate in SearchSpace(request).candidates()
        for placement in pricer.enumerator.placements(candidate.degrees)
    )
    return min((priced for priced in every if priced.fits), key=lambda priced: priced.sort_key, default=None)


class _Unbounded(NamedTuple):
    """A layout of which only the bound of its shape is known."""

    candidate: Candidate


class _PartialPlacement(NamedTuple):
    """A layout with some of its axes placed."""

    candidate: Candidate
    layer_groups: GroupShapes
    """Shapes of the groups that communicate inside every layer."""
    memory: MemoryEstimate


_Item = tuple[float, int, tuple[object, ...], int, object]


class _Search:
    def __init__(
        self, pricer: PlanPricer, shown: int, progress: ProgressCallback | None, within: float, tie_width: float
    ) -> None:
        self.request, self.shown, self.progress = pricer.request, shown, progress
        self.within, self.tie_width = within, tie_width
        self.space, self.pricer = SearchSpace(pricer.request), pricer
        self.heap: list[_Item] = []
        self.order = count()
        self.best: list[PricedPlan] = []
        self.tied: list[PricedPlan] = []
        self.done: set[tuple[int, ...]] = set()
        self.priced = self.layouts = self.opened = 0
        self.least_memory: tuple[float, Candidate] | None = None
        self.something_fits = False
        self.fewest: dict[tuple[ShapeKnobs, ScheduleKnobs], int] = {}
        self.incumbent = float("inf")

    def run(self) -> SearchResult:
        begin = monotonic()
        self._push_roots()
        while self.heap:
            bound, _, _, _, node = heapq.heappop(self.heap)
            if bound > self.within:
                break  # and so is every remaining node
            if len(self.best) >= self.shown and bound > self._tie_limit:
                break  # nothing that is left can tie
            self.opened += 1
            if self.progress and self.opened % 64 == 0:
                self.progress(0.0 if self.incumbent == float("inf") else bound / self.incumbent, self.opened)
            if isinstance(node, PricedPlan):
                self._accept(node)
            elif isinstance(node, ShapeKnobs):
                self._open_shape(bound, node)
            elif isinstance(node, _Unbounded):
                self._bound_candidate(bound, node.candidate)
            elif isinstance(node, Candidate):
                self._open_candidate(bound, node)
            elif isinstance(node, _PartialPlacement):
                self._open_inner(bound, node)
            else:
                assert isinstance(node, tuple)
                self._open_schedule(bound, *node)
        # With a limit the search for it was cut short.
        known = None if self.best or self.within < inf else self.least_memory
        return SearchResult(
            request=self.request,
            best=tuple(self.best),
            tied=simplest_first(self.tied),
            tie_width=self.tie_width,
            layouts_searched=self.layouts,
            priced=self.priced,
            seconds=monotonic() - begin,
            least_memory=self.pricer.price_best_placement(known[1]) if known else None,
        )

    def _push(self, bound: float, node: object, rank: tuple[object, ...] = ()) -> None:
        # At equal bounds, nodes to expand come before complete layouts: they may contain a simpler one as fast.
        heapq.heappush(self.heap, (bound, int(bool(rank)), rank, next(self.order), node))

    def _push_roots(self) -> None:
        for shape in self.space.shapes():
            bound = self.pricer.shape_lower_bound(shape, None)
            if bound > self.within:
                continue
            if self.within == inf:  # else only a few are looked at, and counting all takes longer than that
                self.layouts += self.space.count(shape)
            self._push(bound, shape)

    def _open_shape(self, bound: float, shape: ShapeKnobs) -> None:
        for schedule in self.space.schedules_of(shape):
            splits = self.space.data_splits(shape, schedule)
            if splits and shape.microbatches >= self._fewest_microbatches(shape._replace(microbatches=1), schedule):
                self._push(max(bound, self.pricer.shape_lower_bound(shape, schedule, splits)), (shape, schedule))

    def _open_schedule(self, bound: float, shape: ShapeKnobs, schedule: ScheduleKnobs) -> None:
        """Expand into every sharding of states."""
        for data in self.space.data_splits(shape, schedule):
            candidate = Candidate(shape, schedule, data)
            if self._degrees(candidate) not in self.done:
                least = self.pricer.shape_lower_bound(shape, schedule, (data,))
                self._push(max(bound, least), _Unbounded(candidate))

    def _bound_candidate(self, bound: float, candidate: Candidate) -> None:
        """Give a layout that fits a bound of its own."""
        if self._degrees(candidate) in self.done:
            return
        memory = self.pricer.memory(candidate)
        if memory.device_bytes <= self.request.usable_memory:
            self._push(max(bound, self.pricer.lower_bound(candidate, memory).seconds), candidate)

    def _fewest_microbatches(self, shape: ShapeKnobs, schedule: ScheduleKnobs) -> int:
        """The fewest microbatches that fill the pipeline and can fit; the most sharded layout takes the least memory.

        The fewest may take less than the next, as of few microbatches gradients appear only when activations are freed.
        From the second number on each takes less than the one before; so if neither the fewest nor the most fit, none
        does.
        """
        key = (shape, schedule)
        if key not in self.fewest:
            virtual = schedule.stages_per_rank
            numbers = [
                number
                for number in self.space.microbatches(shape)
                if not self.space.microbatch_problem(shape.pp, schedule.schedule, virtual, number)
            ]

            def fits(number: int) -> bool:
                some = self.space.most_sharded(shape._replace(microbatches=number), schedule)
                if self.something_fits:  # and nobody will ask what takes the least memory
                    return any(self.pricer.fits(each) for each in some)
                taken, candidate = min((self.pricer.memory(each).device_bytes, each) for each in some)
                if self.least_memory is None or taken < self.least_memory[0]:
                    self.least_memory = taken, candidate
                self.something_fits = taken <= self.request.usable_memory
                return self.something_fits

            if fits(numbers[0]):
                self.fewest[key] = numbers[0]
            elif fits(numbers[-1]):
                self.fewest[key] = numbers[bisect_left(numbers, True, lo=1, key=fits)]
            else:
                self.fewest[key] = numbers[-1] + 1
        return self.fewest[key]

    def _open_candidate(self, bound: float, candidate: Candidate) -> None:
        """Expand into placements of the axes that communicate inside every layer."""
        if self._degrees(candidate) in self.done:
            return
        memory = self.pricer.memory(candidate)
        for inner in self.pricer.enumerator.by_layer_axes(candidate.degrees):
            least = self.pricer.lower_bound(candidate, memory, inner)
            self._push(max(bound, least.seconds), _PartialPlacement(candidate, inner, memory))

    def _open_inner(self, bound: float, node: _PartialPlacement) -> None:
        if self._degrees(node.candidate) in self.done:
            return
        placements = self.pricer.enumerator.by_layer_axes(node.candidate.degrees)[node.layer_groups]
        for candidate, placement in product(self.space.with_dispatch(node.candidate), placements):
            self.priced += 1
            priced = self.pricer.price(candidate, placement, node.memory)
            self.incumbent = min(self.incumbent, priced.seconds)
            self._push(max(bound, priced.seconds), priced, priced.tie_break)

    def _accept(self, priced: PricedPlan) -> None:
        degrees = self._degrees(priced.candidate)
        if degrees not in self.done:
            self.done.add(degrees)
            if len(self.best) < self.shown:
                self.best.append(priced)
            if priced.seconds <= self._tie_limit:
                self.tied.append(priced)

    @property
    def _tie_limit(self) -> float:
        """Seconds up to which a layout ties with the fastest."""
        return tie_limit(self.best[0].seconds, self.tie_width)

    @staticmethod
    def _degrees(candidate: Candidate) -> tuple[int, ...]:
        shape, data = candidate.shape, candidate.data
        return shape.pp, data.replicate, data.shard, shape.cp, shape.tp, shape.ep
