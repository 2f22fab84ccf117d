"""Every layout that the runtime accepts for a request: the rules of `spec` decide, this file only enumerates.

A layout is checked in three steps, because a rule sees only some of the knobs: degrees, the pipeline with its
recompute and resharding, and the microbatches. The result of each step is cached.
"""

from collections.abc import Iterator
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

from danlu.cost.software import ALL_AT_ONCE, TokenDispatch, token_dispatch
from danlu.planner.request import (
    DISPATCHES,
    RECOMPUTE_MODES,
    SEARCHED_SCHEDULES,
    SENT_ONCE,
    STAGES_PER_RANK,
    PlanRequest,
)
from danlu.spec.divisors import divisors
from danlu.spec.load import ParsedSpec
from danlu.spec.plan import (
    LOOPED_SCHEDULES,
    ContextParallel,
    Degrees,
    PipelineConfig,
    PipelineSchedule,
    Plan,
    split_layers_evenly,
)
from danlu.spec.problem import Problem
from danlu.spec.recompute import RecomputeLayers, RecomputeMode
from danlu.spec.rules.batch import BATCH_RULES, microbatches_fill_the_pipeline, ramp_divides
from danlu.spec.rules.matmul import DECODER_MATMUL_LAYOUT_RULES, MATMUL_LAYOUT_RULES
from danlu.spec.rules.pipeline import PIPELINE_RULES, STAGE_RULES
from danlu.spec.rules.regather import DECODER_REGATHER_RULES, REGATHER_RULES
from danlu.spec.rules.shape import SHAPE_RULES
from danlu.spec.toml import TomlDocument

PlanRecompute = RecomputeMode | RecomputeLayers
"""By layer only for a plan that is given; the search varies the mode of all layers."""
LIGHTER_ENDS = ((0, 1), (1, 1), (0, 2), (1, 2))
"""Searched reductions of the first and last stage, in layers: embedding, head and loss cost time and memory too.

The head over 128,256 tokens of an 8B model is as many FLOPs as 2.4 of its layers, of a 405B model as 0.7.
"""


class ShapeKnobs(NamedTuple):
    """What sets the compute of a step: sharding of matrices, sequences, layers and experts, and the microbatches."""

    pp: int
    cp: int
    tp: int
    ep: int
    dp: int
    """`replicate` × `shard`."""
    microbatches: int
    ring: bool = False
    """`context_parallel` is ring; only with several ranks of `cp`."""


class ScheduleKnobs(NamedTuple):
    """The pipeline schedule of a shape, and its recompute."""

    schedule: PipelineSchedule
    stages_per_rank: int
    recompute: PlanRecompute
    stage_layers: tuple[int, ...] = ()
    """Of every stage; as even as possible when empty."""
    regather_inputs: bool = False
    """Of layers without recompute; only with tensor parallelism."""
    compile: bool = False
    """Every block; searched only if it is asked for."""
    loss_chunks: int = 1
    """Not searched."""
    dispatch: TokenDispatch = ALL_AT_ONCE
    """Only with expert parallelism; the search chooses it together with the placement on the network."""


class DataKnobs(NamedTuple):
    """How states are sharded over the data-parallel ranks."""

    replicate: int
    shard: int
    reshard_after_forward: bool
    reduces_once_per_step: bool = False
    """`reduce_gradients` is "step"; not searched."""
    optimizer_over_replicas: bool = False
    """`shard_optimizer_over_replicas`; not searched."""


class Candidate(NamedTuple):
    """One layout, before its axes are placed on the network."""

    shape: ShapeKnobs
    schedule: ScheduleKnobs
    data: DataKnobs

    @property
    def degrees(self) -> Degrees:
        """Ranks along every axis."""
        shape, data = self.shape, self.data
        return Degrees(pp=shape.pp, replicate=data.replicate, shard=data.shard, cp=shape.cp, tp=shape.tp, ep=shape.ep)

    def plan(self, mapping: dict[str, dict[str, int]] | None = None) -> Plan:
        """The layout as a plan; defaults are omitted."""
        shape, schedule, data = self.shape, self.schedule, self.data
        usual = shape.pp == 1
        return Plan(
            degrees=self.degrees,
            mapping=mapping or {},  # type: ignore[arg-type]
            microbatches=shape.microbatches,
            context_parallel=context_kind(shape.ring),
            pipeline=_pipeline(schedule) if shape.pp > 1 else PipelineConfig(),
            recompute=schedule.recompute,
            regather_inputs=schedule.regather_inputs,
            compile=schedule.compile,
            token_dispatcher=schedule.dispatch.dispatcher,
            reshard_after_forward=None if data.reshard_after_forward == usual else data.reshard_after_forward,
            reduce_gradients="step" if data.reduces_once_per_step else None,
            shard_optimizer_over_replicas=data.optimizer_over_replicas,
            loss_chunks=schedule.loss_chunks,
            dispatch_chunks=schedule.dispatch.chunks,
        )


def dispatch_choices(request: PlanRequest, ep: int) -> tuple[TokenDispatch, ...]:
    """How tokens may reach the experts of `ep` ranks."""
    allows = request.constraints.allows
    every = DISPATCHES if allows("dispatcher", "alltoall") else SENT_ONCE
    return tuple(
        dispatch
        for dispatch in (every if ep > 1 else (ALL_AT_ONCE,))
        if allows("dispatcher", dispatch.dispatcher) and allows("chunks", dispatch.chunks)
    )


def context_kind(ring: bool) -> ContextParallel:
    """The plan's word for how `cp` attends."""
    return "ring" if ring else "ulysses"


def candidate_from_plan(plan: Plan) -> Candidate:
    """The layout of a plan, without its placement on the network."""
    degrees, pipeline = plan.degrees, plan.pipeline
    shape = ShapeKnobs(degrees.pp, degrees.cp, degrees.tp, degrees.ep, degrees.dp, plan.microbatches)
    shape = shape._replace(ring=plan.context_parallel == "ring")
    schedule = ScheduleKnobs(
        pipeline.schedule,
        pipeline.stages_per_rank,
        plan.recompute,
        tuple(pipeline.layers),
        plan.regather_inputs,
        plan.compile,
        plan.loss_chunks,
        token_dispatch(plan),
    )
    data = DataKnobs(
        degrees.replicate,
        degrees.shard,
        plan.resolved_reshard_after_forward,
        plan.reduce_gradients == "step",
        plan.shard_optimizer_over_replicas,
    )
    return Candidate(shape, schedule, data)


class SearchSpace:
    """The layouts of one request."""

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        self._recipe = request.parsed_recipe
        self._dispatch_choices = lru_cache(maxsize=None)(partial(dispatch_choices, request))
        self.shape_problem = lru_cache(maxsize=None)(self._shape_problem)
        self.stage_problem = lru_cache(maxsize=None)(self._stage_problem)
        self.microbatch_problem = lru_cache(maxsize=None)(self._fill_problem)
        self.schedules = lru_cache(maxsize=None)(lambda pp: tuple(self._schedules(pp)))
        self._numbers = lru_cache(maxsize=None)(self._allowed_microbatches)
        self._filled = lru_cache(maxsize=None)(self._filled_schedules)
        self._shards = lru_cache(maxsize=None)(self._allowed_shards)
        self._reshards = lru_cache(maxsize=None)(self._allowed_reshards)
        self._reshard_choices = lru_cache(maxsize=None)(self._count_reshards)
        self._splits = lru_cache(maxsize=None)(_splits)

    def shapes(self) -> Iterator[ShapeKnobs]:
        """Every way to shard matrices, sequences, layers, experts and the batch."""
        for shape in self.degree_shapes(self.request.chips):
            for number in self.microbatches(shape):
                yield shape._replace(microbatches=number)

    def degree_shapes(self, world: int) -> Iterator[ShapeKnobs]:
        """The same for any number of ranks, with one microbatch."""
        allow, sequences = self.request.constraints.allows, self.request.recipe.batch.sequences
        for tp in divisors(world):
            if not allow("tp", tp) or self.shape_problem(tp, 1, 1, 1):
                continue
            for cp in divisors(world // tp):
                kinds = [ring for ring in self.context_kinds(cp) if not self.shape_problem(tp, cp, 1, 1, ring)]
                if not allow("cp", cp) or not kinds:
                    continue
                for pp in divisors(world // tp // cp):
                    dp = world // tp // cp // pp
                    if not allow("pp", pp) or sequences % dp or not self.schedules(pp):
                        continue
                    for ep in self._expert_degrees(dp, cp, tp, kinds[0]):
                        for ring in kinds:
                            yield ShapeKnobs(pp, cp, tp, ep, dp, 1, ring)

    def context_kinds(self, cp: int) -> list[bool]:
        """Whether this many ranks of `cp` may form a ring, and whether they may not."""
        constraints = self.request.constraints
        if cp > 1:
            return [ring for ring in (False, True) if constraints.allows("context", context_kind(ring))]
        # A ring is fixed, and without `cp` it would be ignored.
        return [] if constraints.allowed.get("context") == frozenset({"ring"}) else [False]

    def _schedules(self, pp: int) -> Iterator[ScheduleKnobs]:
        """Every schedule for this many pipeline ranks, with every recompute mode."""
        allow, fixed = self.request.constraints.allows, self.request.constraints.allowed
        if pp > self.request.model.layers:
            return  # the rules say so too, of every schedule, at a millisecond each
        for schedule in SEARCHED_SCHEDULES if pp > 1 else ("1f1b",):
            if pp > 1 and not allow("schedule", schedule):
                continue
            if pp == 1 and schedule not in fixed.get("schedule", (schedule,)):
                continue  # a schedule is fixed, and without a pipeline it would be ignored
            for virtual in STAGES_PER_RANK if schedule in LOOPED_SCHEDULES else (1,):
                if not allow("virtual", virtual):
                    continue
                compiled = [each for each in (False, True) if self.request.constraints.allows_compile(each)]
                memory = product(RECOMPUTE_MODES, self._stage_layer_counts(pp * virtual), (False, True), compiled)
                for recompute, *rest in memory:
                    knobs = ScheduleKnobs(schedule, virtual, recompute, *rest)  # type: ignore[arg-type]
                    wanted = allow("recompute", recompute) and allow("regather", knobs.regather_inputs)
                    if wanted and not self.stage_problem(pp, knobs, False):
                        yield knobs

    def _stage_layer_counts(self, stages: int) -> list[tuple[int, ...]]:
        """Layers per stage: as even as possible, and with fewer next to the head, or next to both ends."""
        splits: list[tuple[int, ...]] = [()]
        layers = self.request.model.layers
        if 1 < stages < layers:
            even = split_layers_evenly(layers, stages)
            lighter = dict.fromkeys(_lighter_ends(layers, stages, *spared) for spared in LIGHTER_ENDS)
            splits += [split for split in lighter if split != even]
        return splits

    def schedules_of(self, shape: ShapeKnobs) -> tuple[ScheduleKnobs, ...]:
        """Every schedule that the microbatches of a shape can fill."""
        return self._filled(shape.pp, shape.microbatches, shape.tp > 1)

    def _filled_schedules(self, pp: int, microbatches: int, gathers: bool) -> tuple[ScheduleKnobs, ...]:
        return tuple(
            schedule
            for schedule in self.schedules(pp)
            if (gathers or not schedule.regather_inputs)
            and not self.microbatch_problem(pp, schedule.schedule, schedule.stages_per_rank, microbatches)
        )

    def data_splits(self, shape: ShapeKnobs, schedule: ScheduleKnobs) -> tuple[DataKnobs, ...]:
        """Every way to shard states over the data-parallel ranks."""
        shards = self._shards(shape.dp, shape.cp, shape.tp, shape.ep, shape.ring)
        return self._splits(shape.dp, shards, self._reshards(shape.pp, schedule))

    def count(self, shape: ShapeKnobs) -> int:
        """How many layouts have a shape; there are millions, so they are not made to be counted."""
        shards = self._shards(shape.dp, shape.cp, shape.tp, shape.ep, shape.ring)
        dispatches = len(self._dispatch_choices(shape.ep))
        return len(shards) * dispatches * self._reshard_choices(shape.pp, shape.microbatches, shape.tp > 1)

    def _allowed_shards(self, dp: int, cp: int, tp: int, ep: int, ring: bool) -> tuple[int, ...]:
        """Over how many of the data-parallel ranks states may be sharded."""
        allow = self.request.constraints.allows
        return tuple(
            shard
            for shard in divisors(dp)
            if allow("shard", shard) and allow("replicate", dp // shard)
            if not self.shape_problem(tp, cp, ep, shard, ring)
        )

    def _allowed_reshards(self, pp: int, schedule: ScheduleKnobs) -> tuple[bool, ...]:
        """Whether gathered parameters may be freed after the forward pass, and whether they may be kept."""
        allow = self.request.constraints.allows
        return tuple(
            each for each in (True, False) if allow("reshard", each) if not self.stage_problem(pp, schedule, each)
        )

    def _count_reshards(self, pp: int, microbatches: int, gathers: bool) -> int:
        """Over all schedules that so many microbatches can fill."""
        return sum(len(self._reshards(pp, schedule)) for schedule in self._filled(pp, microbatches, gathers))

    def candidates(self) -> Iterator[Candidate]:
        """Every layout, one after another; only for small spaces."""
        for shape in self.shapes():
            for schedule in self.schedules_of(shape):
                for data in self.data_splits(shape, schedule):
                    yield from self.with_dispatch(Candidate(shape, schedule, data))

    def with_dispatch(self, candidate: Candidate) -> Iterator[Candidate]:
        """A layout with every way in which its tokens may reach the experts of other ranks."""
        for dispatch in self._dispatch_choices(candidate.shape.ep):
            yield candidate._replace(schedule=candidate.schedule._replace(dispatch=dispatch))

    def most_sharded(self, shape: ShapeKnobs, schedule: ScheduleKnobs) -> list[Candidate]:
        """The layouts of a shape and schedule that shard states most: one of them takes the least memory."""
        splits = self.data_splits(shape, schedule)
        most = max((data.shard for data in splits), default=0)
        return [Candidate(shape, schedule, data) for data in splits if data.shard == most]

    def least_memory_candidates(self) -> Iterator[Candidate]:
        """Layouts among which is the one with the least memory.

        One microbatch holds no gradients yet; of several, the smallest take the least memory.
        """
        for shape in self.shapes():
            numbers = self.microbatches(shape)
            if shape.microbatches in (numbers[0], numbers[-1]):
                for schedule in self.schedules_of(shape):
                    yield from self.most_sharded(shape, schedule)

    def _expert_degrees(self, dp: int, cp: int, tp: int, ring: bool) -> Iterator[int]:
        moe = self.request.model.moe
        experts = moe.experts if moe else 1
        for ep in divisors(experts):
            if (
                (dp * cp * tp) % ep == 0
                and self.request.constraints.allows("ep", ep)
                and self._dispatch_choices(ep)
                and not self.shape_problem(tp, cp, ep, dp, ring)
            ):
                yield ep

    def microbatches(self, shape: ShapeKnobs) -> tuple[int, ...]:
        """Numbers of microbatches that divide a rank's share of the batch, fewest first."""
        return self._numbers(shape.dp, shape.pp > 1)

    def _allowed_microbatches(self, dp: int, pipeline: bool) -> tuple[int, ...]:
        batch, allow = self.request.recipe.batch, self.request.constraints.allows
        held = batch.sequences // dp
        wanted = (n for n in divisors(held) if allow("microbatches", n) and allow("microbatch", held // n))
        return tuple(n for n in wanted if not batch.ramp or ramp_divides(batch, dp, n, pipeline=pipeline))

    def _shape_problem(self, tp: int, cp: int, ep: int, shard: int, ring: bool = False) -> Problem | None:
        """The first problem that the rules find with degrees that shard the model."""
        degrees = Degrees(tp=tp, cp=cp, ep=ep, shard=shard)
        plan = plan_without_file(Plan(degrees=degrees, context_parallel=context_kind(ring)))
        rules = (*SHAPE_RULES, *DECODER_MATMUL_LAYOUT_RULES)
        return next((problem for rule in rules for problem in rule(self._recipe, plan)), None)

    def batch_problem(self, candidate: Candidate) -> Problem | None:
        """The first problem that the rules find with how a layout splits the batch."""
        plan = plan_without_file(candidate.plan())
        return next((problem for rule in BATCH_RULES for problem in rule(self._recipe, plan)), None)

    def _stage_problem(self, pp: int, schedule: ScheduleKnobs, reshards: bool) -> Problem | None:
        """The first problem that the rules find with a pipeline, its recompute and its gathered inputs."""
        tp = 2 if schedule.regather_inputs else 1  # whatever it is: shapes without it get no such schedule
        plan = plan_without_file(
            Plan(
                degrees=Degrees(pp=pp, tp=tp),
                pipeline=_pipeline(schedule),
                recompute=schedule.recompute,
                regather_inputs=schedule.regather_inputs,
                compile=schedule.compile,
                reshard_after_forward=reshards,
            )
        )
        problems = (problem for rule in (*STAGE_RULES, *REGATHER_RULES) for problem in rule(plan))
        rules = (*PIPELINE_RULES, *DECODER_REGATHER_RULES, *MATMUL_LAYOUT_RULES)
        return next(problems, None) or next((found for rule in rules for found in rule(self._recipe, plan)), None)

    def _fill_problem(self, pp: int, schedule: PipelineSchedule, virtual: int, microbatches: int) -> Problem | None:
        """The first problem that the rules find with a number of microbatches."""
        pipeline, batch = PipelineConfig(schedule=schedule, stages_per_rank=virtual), self.request.recipe.batch
        numbers = [microbatches]
        if pp > 1:
            numbers += [stage.sequences * microbatches // batch.sequences for stage in batch.ramp]
        for number in numbers:
            plan = plan_without_file(Plan(degrees=Degrees(pp=pp), pipeline=pipeline, microbatches=max(1, number)))
            for problem in microbatches_fill_the_pipeline(self._recipe, plan):
                return problem
        return None


def _splits(dp: int, shards: tuple[int, ...], reshards: tuple[bool, ...]) -> tuple[DataKnobs, ...]:
    return tuple(DataKnobs(dp // shard, shard, each) for shard in shards for each in reshards)


def _lighter_ends(layers: int, stages: int, first: int, last: int) -> tuple[int, ...]:
    """Even stages, except that the first and the last hold this many layers fewer."""
    counts = list(split_layers_evenly(layers + first + last, stages))
    counts[0] -= first
    counts[-1] -= last
    return tuple(counts)


def _pipeline(schedule: ScheduleKnobs) -> PipelineConfig:
    return PipelineConfig(
        schedule=schedule.schedule, stages_per_rank=schedule.stages_per_rank, layers=schedule.stage_layers
    )


def plan_without_file(plan: Plan) -> ParsedSpec[Plan]:
    """A plan in the form that the rules of `spec` read."""
    return ParsedSpec(plan, TomlDocument(Path("plan"), {}, {}))
