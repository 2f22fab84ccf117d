"""Every layout that the runtime accepts for a question: the rules of `spec` decide, this file only lists.

A layout is asked in three parts, because a rule sees only some of the knobs: degrees, the pipeline with what it does in
a backward pass, and the microbatches. What a rule said of a part is kept.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Literal, NamedTuple

from danlu.planner.question import RECOMPUTES, SCHEDULES, VIRTUAL, Question
from danlu.spec.load import Sourced
from danlu.spec.numbers import divisors
from danlu.spec.plan import LOOPED_SCHEDULES, Degrees, Pipeline, Plan, Schedule, evenly
from danlu.spec.problem import Problem
from danlu.spec.rules.batch import microbatches_fill_the_pipeline
from danlu.spec.rules.pipeline import PIPELINE_RULES, STAGE_RULES
from danlu.spec.rules.shape import SHAPE_RULES
from danlu.spec.toml import Document

Recompute = Literal["none", "selective", "full"]
LIGHTER_ENDS = ((0, 1), (1, 1))
"""Layers fewer on the first and on the last stage that are searched: the embedding, the head and the loss weigh too."""


class Core(NamedTuple):
    """What sets the compute of a step: how matrices, sequences, layers and experts are cut, and the microbatches."""

    pp: int
    cp: int
    tp: int
    ep: int
    data: int
    """`replicate` × `shard`."""
    microbatches: int


class Work(NamedTuple):
    """The pipeline of a core, and what is computed again."""

    schedule: Schedule
    virtual: int
    recompute: Recompute
    layers: tuple[int, ...] = ()
    """Of every stage; as even as possible when left out."""


class Split(NamedTuple):
    """How the data-parallel ranks hold states."""

    replicate: int
    shard: int
    reshards: bool


class Candidate(NamedTuple):
    """One layout, without its place on the network."""

    core: Core
    work: Work
    split: Split

    @property
    def degrees(self) -> Degrees:
        """Ranks along every axis."""
        core, split = self.core, self.split
        return Degrees(pp=core.pp, replicate=split.replicate, shard=split.shard, cp=core.cp, tp=core.tp, ep=core.ep)

    def plan(self, mapping: dict[str, dict[str, int]] | None = None) -> Plan:
        """The layout as a plan; what is the default is left out."""
        core, work = self.core, self.work
        usual = core.pp == 1
        return Plan(
            degrees=self.degrees,
            mapping=mapping or {},  # type: ignore[arg-type]
            microbatches=core.microbatches,
            pipeline=_pipeline(work) if core.pp > 1 else Pipeline(),
            recompute=work.recompute,
            reshard_after_forward=None if self.split.reshards == usual else self.split.reshards,
        )


def candidate_of(plan: Plan) -> Candidate:
    """The layout of a plan, without its place on the network."""
    degrees, pipeline = plan.degrees, plan.pipeline
    core = Core(degrees.pp, degrees.cp, degrees.tp, degrees.ep, degrees.data, plan.microbatches)
    work = Work(pipeline.schedule, pipeline.stages_per_rank, plan.recompute, tuple(pipeline.layers))
    return Candidate(core, work, Split(degrees.replicate, degrees.shard, plan.reshards))


class Space:
    """The layouts of one question."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self._recipe = question.source
        self.shape_problem = lru_cache(maxsize=None)(self._shape_problem)
        self.stage_problem = lru_cache(maxsize=None)(self._stage_problem)
        self.fill_problem = lru_cache(maxsize=None)(self._fill_problem)
        self.works = lru_cache(maxsize=None)(lambda pp: tuple(self._works(pp)))
        self._filled = lru_cache(maxsize=None)(self._filled_works)
        self._splits = lru_cache(maxsize=None)(lambda core, work: tuple(self._all_splits(core, work)))

    def cores(self) -> Iterator[Core]:
        """Every way to cut matrices, sequences, layers, experts and the batch."""
        question, allow = self.question, self.question.limits.allow
        world, sequences = question.chips, question.recipe.batch.sequences
        for tp in divisors(world):
            if not allow("tp", tp) or self.shape_problem(tp, 1, 1, 1):
                continue
            for cp in divisors(world // tp):
                if not allow("cp", cp) or self.shape_problem(tp, cp, 1, 1):
                    continue
                for pp in divisors(world // tp // cp):
                    data = world // tp // cp // pp
                    if not allow("pp", pp) or sequences % data or not self.works(pp):
                        continue
                    for ep in self._expert_degrees(data, cp, tp):
                        core = Core(pp, cp, tp, ep, data, 1)
                        for number in self.microbatches(core):
                            yield core._replace(microbatches=number)

    def _works(self, pp: int) -> Iterator[Work]:
        """Every pipeline of so many ranks, with what it may compute again."""
        allow = self.question.limits.allow
        for schedule in SCHEDULES if pp > 1 else ("1f1b",):
            if pp > 1 and not allow("schedule", schedule):
                continue
            for virtual in VIRTUAL if schedule in LOOPED_SCHEDULES else (1,):
                if not allow("virtual", virtual):
                    continue
                for recompute, layers in product(RECOMPUTES, self._cuts(pp * virtual)):
                    work = Work(schedule, virtual, recompute, layers)  # type: ignore[arg-type]
                    if allow("recompute", recompute) and not self.stage_problem(pp, work, False):
                        yield work

    def _cuts(self, stages: int) -> list[tuple[int, ...]]:
        """Ways to cut layers into stages: as even as possible, and with fewer beside the head, or beside both ends."""
        cuts: list[tuple[int, ...]] = [()]
        layers = self.question.model.layers
        if 1 < stages < layers:
            even = evenly(layers, stages)
            cuts += [cut for spared in LIGHTER_ENDS if (cut := _lighter(layers, stages, *spared)) != even]
        return cuts

    def works_of(self, core: Core) -> tuple[Work, ...]:
        """Every pipeline that the microbatches of a core fill."""
        return self._filled(core.pp, core.microbatches)

    def _filled_works(self, pp: int, microbatches: int) -> tuple[Work, ...]:
        return tuple(
            work for work in self.works(pp) if not self.fill_problem(pp, work.schedule, work.virtual, microbatches)
        )

    def splits(self, core: Core, work: Work) -> tuple[Split, ...]:
        """Every way for the data-parallel ranks to hold states."""
        return self._splits(core._replace(microbatches=1), work)

    def _all_splits(self, core: Core, work: Work) -> Iterator[Split]:
        allow = self.question.limits.allow
        for shard in divisors(core.data):
            split = Split(core.data // shard, shard, False)
            if not allow("shard", shard) or not allow("replicate", split.replicate):
                continue
            if self.shape_problem(core.tp, core.cp, core.ep, shard):
                continue
            for reshards in (True, False):
                if allow("reshard", reshards) and not self.stage_problem(core.pp, work, reshards):
                    yield split._replace(reshards=reshards)

    def candidates(self) -> Iterator[Candidate]:
        """Every layout, one after another: only for spaces that are small."""
        for core in self.cores():
            for work in self.works_of(core):
                for split in self.splits(core, work):
                    yield Candidate(core, work, split)

    def _expert_degrees(self, data: int, cp: int, tp: int) -> Iterator[int]:
        moe = self.question.model.moe
        experts = moe.experts if moe else 1
        for ep in divisors(experts):
            if (
                (data * cp * tp) % ep == 0
                and self.question.limits.allow("ep", ep)
                and not self.shape_problem(tp, cp, ep, data)
            ):
                yield ep

    def microbatches(self, core: Core) -> list[int]:
        """Pieces in which a rank can take its share of the batch, fewest first."""
        held, allow = self.question.recipe.batch.sequences // core.data, self.question.limits.allow
        return [n for n in divisors(held) if allow("microbatches", n) and allow("microbatch", held // n)]

    def _shape_problem(self, tp: int, cp: int, ep: int, shard: int) -> Problem | None:
        """What the rules say against degrees that cut the model."""
        plan = _sourced(Plan(degrees=Degrees(tp=tp, cp=cp, ep=ep, shard=shard)))
        return next((problem for rule in SHAPE_RULES for problem in rule(self._recipe, plan)), None)

    def _stage_problem(self, pp: int, work: Work, reshards: bool) -> Problem | None:
        """What the rules say against a pipeline."""
        plan = _sourced(
            Plan(
                degrees=Degrees(pp=pp),
                pipeline=_pipeline(work),
                recompute=work.recompute,
                reshard_after_forward=reshards,
            )
        )
        problems = (problem for rule in STAGE_RULES for problem in rule(plan))
        problem = next(problems, None)
        return problem or next((found for rule in PIPELINE_RULES for found in rule(self._recipe, plan)), None)

    def _fill_problem(self, pp: int, schedule: Schedule, virtual: int, microbatches: int) -> Problem | None:
        """What the rules say against so few microbatches."""
        pipeline = Pipeline(schedule=schedule, stages_per_rank=virtual)
        plan = _sourced(Plan(degrees=Degrees(pp=pp), pipeline=pipeline, microbatches=microbatches))
        return next(microbatches_fill_the_pipeline(self._recipe, plan), None)


def _lighter(layers: int, stages: int, first: int, last: int) -> tuple[int, ...]:
    """Even stages, of which the first and the last hold so many layers fewer."""
    counts = list(evenly(layers + first + last, stages))
    counts[0] -= first
    counts[-1] -= last
    return tuple(counts)


def _pipeline(work: Work) -> Pipeline:
    return Pipeline(schedule=work.schedule, stages_per_rank=work.virtual, layers=work.layers)


def _sourced(plan: Plan) -> Sourced[Plan]:
    return Sourced(plan, Document(Path("plan"), {}, {}))
