"""The best layouts of a question, and the proof that no other is better.

Layouts are a tree: a core (how the model and the batch are cut), its pipelines, how states are split, the place on the
network. Every node has a time that none of the layouts below it beats. The node with the least is opened next, so that
a whole layout that comes up first is the best of all: the search is exact, and opens only what could have won.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from time import monotonic
from typing import NamedTuple

from danlu.cost import flops_per_token
from danlu.cost.memory import Memory
from danlu.cost.step import Prediction
from danlu.planner.places import Place, Places, Spans, place_of
from danlu.planner.pricing import Pricing
from danlu.planner.question import Question
from danlu.planner.space import Candidate, Core, Space, Work, candidate_of
from danlu.spec.plan import Plan

SHOWN = 5
"""Layouts that an answer holds, unless more are asked for."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A layout in its place, priced."""

    question: Question
    candidate: Candidate
    place: Place
    prediction: Prediction

    @property
    def plan(self) -> Plan:
        """As a file holds it."""
        return self.candidate.plan(self.place.as_mapping())

    @property
    def seconds(self) -> float:
        """Of one step."""
        return self.prediction.seconds

    @property
    def tokens_per_second(self) -> float:
        """Of the whole run while nothing breaks."""
        return self.question.recipe.batch.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Share of the chips' peak that goes into model FLOPs."""
        question, chip = self.question, self.question.cluster.chip
        peak = chip.peak.get(question.dtype) or max(chip.peak.values())  # type: ignore[call-overload]
        needed = flops_per_token(question.model, question.recipe.batch.length)
        return float(self.tokens_per_second * needed / (question.chips * peak))

    @property
    def bytes(self) -> float:
        """Of the fullest chip, everything included."""
        return self.prediction.memory.device

    @property
    def fits(self) -> bool:
        """Whether the fullest chip holds it, reserve included."""
        return self.bytes <= self.question.memory

    @property
    def microbatch(self) -> int:
        """Sequences of a microbatch."""
        core = self.candidate.core
        return self.question.recipe.batch.sequences // (core.data * core.microbatches)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a search found."""

    question: Question
    best: tuple[Choice, ...]
    """Fastest first, each with other degrees than those before it; empty where nothing fits."""
    layouts: int
    """In the space searched, without their places on the network."""
    priced: int
    """Layouts in their places that had to be priced; all others were ruled out by a bound."""
    seconds: float
    """That the search took."""
    leanest: Choice | None
    """The layout with the fewest bytes, where none fits."""


Progress = Callable[[float, int], None]
"""Told now and then: share of the proof that is done (0 while no whole layout is known), and nodes opened."""


def price(question: Question, plan: Plan) -> Choice:
    """Price one plan; raises `UnplaceableError` where its axes do not fit the network."""
    candidate, place = candidate_of(plan), place_of(plan, question.cluster)
    return Choice(
        question=question, candidate=candidate, place=place, prediction=Pricing(question).exact(candidate, place)
    )


def in_best_place(question: Question, candidate: Candidate) -> Choice:
    """Price one layout in the place where it is fastest."""
    pricing = Pricing(question)
    memory = pricing.bytes(candidate)
    choices = (
        Choice(question=question, candidate=candidate, place=place, prediction=pricing.exact(candidate, place, memory))
        for place in Places(question.cluster).of(candidate.degrees)
    )
    return min(choices, key=_rank)


def search(question: Question, shown: int = SHOWN, progress: Progress | None = None) -> Answer:
    """Find the fastest layouts that fit, with the proof that there is no faster one."""
    return _Search(question, shown, progress).run()


def exhaustive(question: Question) -> Choice | None:
    """The fastest layout that fits by pricing every one of them in every place: only for small questions."""
    space, pricing, places = Space(question), Pricing(question), Places(question.cluster)
    best: Choice | None = None
    for candidate in space.candidates():
        for place in places.of(candidate.degrees):
            prediction = pricing.exact(candidate, place)
            choice = Choice(question=question, candidate=candidate, place=place, prediction=prediction)
            if choice.fits and (best is None or _rank(choice) < _rank(best)):
                best = choice
    return best


def _rank(choice: Choice) -> tuple[float, tuple[object, ...]]:
    """What is better: fewer seconds; of equals, what has fewer ranks on the demanding axes."""
    return choice.seconds, _simplicity(choice.candidate, choice.place)


def _simplicity(candidate: Candidate, place: Place) -> tuple[object, ...]:
    core, _, split = candidate
    return (
        core.pp,
        core.cp,
        core.tp,
        core.ep,
        split.replicate,
        len(place.mapping),
        candidate,
        place.mapping,
    )


class _Inner(NamedTuple):
    """A layout some of whose axes have their place."""

    candidate: Candidate
    spans: Spans
    memory: Memory


_Item = tuple[float, int, tuple[object, ...], int, object]


class _Search:
    def __init__(self, question: Question, shown: int, progress: Progress | None) -> None:
        self.question, self.shown, self.progress = question, shown, progress
        self.space, self.pricing = Space(question), Pricing(question)
        self.places = Places(question.cluster)
        self.heap: list[_Item] = []
        self.order = count()
        self.best: list[Choice] = []
        self.done: set[tuple[int, ...]] = set()
        self.priced = self.layouts = self.opened = 0
        self.leanest: tuple[float, Candidate] | None = None
        self.fewest: dict[tuple[Core, Work], int] = {}
        self.incumbent = float("inf")

    def run(self) -> Answer:
        begin = monotonic()
        self._plant()
        while self.heap and len(self.best) < self.shown:
            bound, _, _, _, node = heapq.heappop(self.heap)
            self.opened += 1
            if self.progress and self.opened % 64 == 0:
                self.progress(0.0 if self.incumbent == float("inf") else bound / self.incumbent, self.opened)
            if isinstance(node, Choice):
                self._take(node)
            elif isinstance(node, Core):
                self._open_core(bound, node)
            elif isinstance(node, Candidate):
                self._open_candidate(bound, node)
            elif isinstance(node, _Inner):
                self._open_inner(bound, node)
            else:
                assert isinstance(node, tuple)
                self._open_work(bound, *node)
        return Answer(
            question=self.question,
            best=tuple(self.best),
            layouts=self.layouts,
            priced=self.priced,
            seconds=monotonic() - begin,
            leanest=None if self.best or self.leanest is None else in_best_place(self.question, self.leanest[1]),
        )

    def _push(self, bound: float, node: object, rank: tuple[object, ...] = ()) -> None:
        # Of equal bounds what is still to be opened comes before what is whole: it may hold an equal that is simpler.
        heapq.heappush(self.heap, (bound, int(bool(rank)), rank, next(self.order), node))

    def _plant(self) -> None:
        for core in self.space.cores():
            self.layouts += sum(len(self.space.splits(core, work)) for work in self.space.works_of(core))
            self._push(self.pricing.least_of(core, None), core)

    def _open_core(self, bound: float, core: Core) -> None:
        for work in self.space.works_of(core):
            self._push(max(bound, self.pricing.least_of(core, work)), (core, work))

    def _open_work(self, bound: float, core: Core, work: Work) -> None:
        """Split states in every way that fits."""
        splits = self.space.splits(core, work)
        if not splits or core.microbatches < self._fewest(core._replace(microbatches=1), work):
            return
        for split in splits:
            candidate = Candidate(core, work, split)
            if self._degrees(candidate) in self.done:
                continue
            memory = self.pricing.bytes(candidate)
            if memory.device <= self.question.memory:
                self._push(max(bound, self.pricing.least(candidate, memory).seconds), candidate)

    def _fewest(self, core: Core, work: Work) -> int:
        """The fewest microbatches that can fit; most shards take the fewest bytes.

        They are tried one by one: with a single microbatch gradients come only as activations go, so that two can take
        more bytes than one.
        """
        key = (core, work)
        if key not in self.fewest:
            splits = self.space.splits(core, work)
            most = max(split.shard for split in splits)
            leanest = [split for split in splits if split.shard == most]
            numbers = self.space.microbatches(core)

            def fits(number: int) -> bool:
                some = [Candidate(core._replace(microbatches=number), work, split) for split in leanest]
                taken, candidate = min((self.pricing.bytes(each).device, each) for each in some)
                if self.leanest is None or taken < self.leanest[0]:
                    self.leanest = taken, candidate
                return taken <= self.question.memory

            self.fewest[key] = next((number for number in numbers if fits(number)), numbers[-1] + 1)
        return self.fewest[key]

    def _open_candidate(self, bound: float, candidate: Candidate) -> None:
        """Settle where the axes lie that send inside every layer."""
        if self._degrees(candidate) in self.done:
            return
        memory = self.pricing.bytes(candidate)
        for inner in self.places.by_inner(candidate.degrees):
            least = self.pricing.least(candidate, memory, inner)
            self._push(max(bound, least.seconds), _Inner(candidate, inner, memory))

    def _open_inner(self, bound: float, node: _Inner) -> None:
        if self._degrees(node.candidate) in self.done:
            return
        for place in self.places.by_inner(node.candidate.degrees)[node.spans]:
            choice = self._choice(node.candidate, place, node.memory)
            self.incumbent = min(self.incumbent, choice.seconds)
            self._push(max(bound, choice.seconds), choice, _simplicity(choice.candidate, choice.place))

    def _choice(self, candidate: Candidate, place: Place, memory: Memory) -> Choice:
        self.priced += 1
        prediction = self.pricing.exact(candidate, place, memory)
        return Choice(question=self.question, candidate=candidate, place=place, prediction=prediction)

    def _take(self, choice: Choice) -> None:
        degrees = self._degrees(choice.candidate)
        if degrees not in self.done:
            self.done.add(degrees)
            self.best.append(choice)

    @staticmethod
    def _degrees(candidate: Candidate) -> tuple[int, ...]:
        core, split = candidate.core, candidate.split
        return core.pp, split.replicate, split.shard, core.cp, core.tp, core.ep
