"""Time and memory of a layout: exact at one placement, and a lower bound over all placements."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from math import inf
from operator import le
from typing import Any, NamedTuple

from danlu.cost import flops_per_token
from danlu.cost.collectives import Link
from danlu.cost.memory import MemoryEstimate
from danlu.cost.overlap import exposed_time
from danlu.cost.parallel_layout import ParallelLayout
from danlu.cost.rank_counts import RankCounts
from danlu.cost.software import ALL_AT_ONCE, DANLU, Software, TokenDispatch
from danlu.cost.step_prediction import Predictor, StepPrediction
from danlu.ops.newton_schulz import muon_traits
from danlu.ops.recompute import plan_recompute
from danlu.planner.fit_chance import fit_chance
from danlu.planner.mesh_placement import GroupShapes, MeshPlacement, PlacementEnumerator
from danlu.planner.relaxed_network import RelaxedNetworkBuilder
from danlu.planner.request import PlanRequest
from danlu.planner.search_space import (
    Candidate,
    DataKnobs,
    PlanRecompute,
    ScheduleKnobs,
    ShapeKnobs,
    dispatch_choices,
)
from danlu.spec.divisors import divisors
from danlu.spec.plan import Plan
from danlu.spec.rank_placement import ranks_per_node
from danlu.spec.recipe import PrecisionConfig

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_EXPERT_GROUPS = ("ep", "expert_shard", "expert_data")
"""Groups that exist for experts alone, see `ParallelLayout.group_shapes`."""


@dataclass(frozen=True, kw_only=True)
class PricedPlan:
    """A placed layout with its predicted time and memory."""

    request: PlanRequest
    candidate: Candidate
    placement: MeshPlacement
    prediction: StepPrediction

    @property
    def plan(self) -> Plan:
        """The layout as a plan."""
        return self.candidate.plan(self.placement.to_mapping())

    @property
    def seconds(self) -> float:
        """Of one step."""
        return self.prediction.seconds

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks, without failures."""
        return self.request.recipe.batch.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs per second over the peak of the chips."""
        request = self.request
        needed = flops_per_token(request.model, request.recipe.batch.length)
        return float(self.tokens_per_second * needed / (request.chips * request.peak))

    @property
    def peak_bytes(self) -> float:
        """Of the fullest chip, with allocator overhead, context and channels."""
        return self.prediction.memory.device_bytes

    @property
    def fits(self) -> bool:
        """Whether it fits the fullest chip, with the reserve kept free."""
        return self.peak_bytes <= self.request.usable_memory

    @property
    def fit_chance(self) -> float:
        """The share of published runs that would have fit the chip, had they been predicted to take as much of it."""
        return fit_chance(self.peak_bytes, self.request.cluster.chip.memory)

    @property
    def microbatch_size(self) -> int:
        """Sequences per microbatch."""
        shape = self.candidate.shape
        return self.request.recipe.batch.sequences // (shape.dp * shape.microbatches)

    @property
    def tie_break(self) -> tuple[object, ...]:
        """Of equally fast layouts the smallest wins: fewer ranks on the axes with most traffic."""
        shape, _, data = self.candidate
        degrees = (shape.pp, shape.cp, shape.tp, shape.ep, data.replicate)
        return *degrees, len(self.placement.mapping), self.candidate, self.placement.mapping

    @property
    def sort_key(self) -> tuple[float, tuple[object, ...]]:
        """The fastest first."""
        return self.seconds, self.tie_break


def software_for(
    request: PlanRequest,
    recompute: PlanRecompute,
    *,
    regather_inputs: bool = False,
    compiled: bool = False,
    dispatch: TokenDispatch = ALL_AT_ONCE,
    dispatch_choices: tuple[TokenDispatch, ...] = (),
) -> Software:
    """Danlu's own software traits, with the recipe's precision and document mask."""
    precision = request.recipe.precision
    return replace(
        DANLU,
        document_mask=request.recipe.data.document_mask,
        keep_gathered_inputs=not regather_inputs,
        eager=not compiled,
        dispatch=dispatch,
        dispatch_choices=dispatch_choices,
        recompute=plan_recompute(recompute, request.model.layers),
        expert_imbalance=request.expert_imbalance,
        activation_bytes=_BYTES[precision.compute],
        parameter_bytes=_BYTES[precision.compute],
        gradient_bytes=_BYTES[precision.reduce],
        quantized_input_bytes=_quantized_bytes(precision),
        ema=request.recipe.ema is not None,
        muon=muon_traits(request.model, request.recipe.optimizer),
    )


def _quantized_bytes(precision: PrecisionConfig) -> float:
    """Bytes of an input that is kept for a quantized product: e4m3 and its share of a scale; 0 if none is."""
    if precision.matmul == "none":
        return 0.0
    return 1.0 + (4.0 if precision.matmul == "fp8" else 1.0) / precision.block_of(precision.matmul)


class _SoftwareKnobs(NamedTuple):
    """What of a schedule changes the traits of the software."""

    recompute: PlanRecompute
    regather_inputs: bool = False
    compiled: bool = False
    dispatch: TokenDispatch = ALL_AT_ONCE
    dispatch_choices: tuple[TokenDispatch, ...] = ()


class _ModelTraffic(NamedTuple):
    """Seconds in which the states of the full model are sent by one rank, before compute hides any of it."""

    microbatch: float = 0.0
    """For every microbatch."""
    step: float = 0.0
    """Once, during the passes."""
    after: float = 0.0
    """After them."""


class PlanPricer:
    """Prices the layouts of one request; `lower_bound` never exceeds `price` at any placement.

    With `free_level`, as if that level of the network cost nothing.
    """

    def __init__(self, request: PlanRequest, free_level: int | None = None) -> None:
        self.request = request
        self.enumerator = PlacementEnumerator(request.cluster)
        self._dispatch_choices = lru_cache(maxsize=None)(partial(dispatch_choices, request))
        self._free_level = free_level
        self._predictor = lru_cache(maxsize=None)(self._new_predictor)
        self._relaxed_predictor = lru_cache(maxsize=None)(self._new_predictor)
        self._passes: dict[tuple[object, ...], float] = {}
        self._full_batches: dict[tuple[int, ...], float] = {}
        self._traffic = lru_cache(maxsize=None)(self._model_traffic)
        self._least_traffic = lru_cache(maxsize=None)(self._least_model_traffic)
        self._networks = RelaxedNetworkBuilder(
            self._predictor(_SoftwareKnobs("none")).context.network,
            request.chips,
            request.cluster,
            request.model.moe.top_k if request.model.moe else 1,
        )

    def for_chips(self, chips: int) -> "PlanPricer":
        """The same for another number of chips; both remember each other's bounds where these are the same.

        The bounds of layers and passes depend on the ranks of a node, and not on the number of nodes.
        """
        request, cluster = replace(self.request, chips=chips), self.request.cluster
        other = PlanPricer(request, self._free_level)
        if ranks_per_node(chips, cluster) == ranks_per_node(self.request.chips, cluster):
            other._passes, other._full_batches = self._passes, self._full_batches
        return other

    def price(self, candidate: Candidate, placement: MeshPlacement, memory: MemoryEstimate | None = None) -> PricedPlan:
        """Time and memory of a placed layout; pass `memory` if it is known from another placement."""
        layout = self._layout(candidate, placement.group_shapes)
        prediction = self._predictor_of(candidate.schedule).predict(layout, memory)
        return PricedPlan(request=self.request, candidate=candidate, placement=placement, prediction=prediction)

    def predict_with_traits(
        self, candidate: Candidate, placement: MeshPlacement, dtype: str = "", **traits: Any
    ) -> StepPrediction:
        """Predict a placed layout as if the software had other traits, or computed in another precision.

        Groups of experts are placed as usual, not as the placement has them, if the traits shard experts further.
        """
        request = self.request
        software = replace(software_for(request, **_software_knobs(candidate.schedule)._asdict()), **traits)
        shapes = placement.group_shapes
        if software.expert_tp > 1:
            shapes = tuple(each for each in shapes if each[0] not in _EXPERT_GROUPS)
        dtype = dtype or request.matmul_dtype
        predictor = Predictor(request.model, request.recipe.batch, request.cluster, software, dtype)
        return predictor.predict(self._layout(candidate, shapes))

    def price_best_placement(self, candidate: Candidate) -> PricedPlan | None:
        """A layout at its fastest placement; None if its axes cannot be placed on the levels."""
        memory = self.memory(candidate)
        plans = (self.price(candidate, each, memory) for each in self.enumerator.placements(candidate.degrees))
        return min(plans, key=lambda priced: priced.sort_key, default=None)

    def memory(self, candidate: Candidate) -> MemoryEstimate:
        """Memory of a layout; the same at every placement."""
        return self._predictor_of(candidate.schedule).memory(self._layout(candidate))

    def fits(self, candidate: Candidate) -> bool:
        """Whether a layout fits into the chip's memory."""
        return self._predictor_of(candidate.schedule).fits(self._layout(candidate), self.request.usable_memory)

    def memory_by_pp_rank(self, candidate: Candidate) -> tuple[MemoryEstimate, ...]:
        """Memory of a rank, for every pp rank."""
        return self._predictor_of(candidate.schedule).memory_by_pp_rank(self._layout(candidate))

    def counts(self, candidate: Candidate, placement: MeshPlacement, pp_rank: int) -> RankCounts:
        """FLOPs and bytes sent in a step by a rank of this pp rank."""
        layout = self._layout(candidate, placement.group_shapes)
        return self._predictor_of(candidate.schedule).counts(layout, pp_rank)

    def lower_bound(
        self, candidate: Candidate, memory: MemoryEstimate | None = None, known: GroupShapes = ()
    ) -> StepPrediction:
        """Memory, and a lower bound on the time over all placements, or over those with the `known` groups.

        And over every way in which tokens may reach their experts, unless the layout has one that is not the usual.
        """
        predictor, layout = self._relaxed(candidate, known)
        return predictor.predict(layout, memory)

    def _relaxed(self, candidate: Candidate, known: GroupShapes = ()) -> tuple[Predictor, ParallelLayout]:
        """A layout on a network on which none of its collectives is slower than at a real placement."""
        shape, schedule, data = candidate
        expert_shard = data.shard * shape.cp * shape.tp // shape.ep
        sizes = (
            shape.tp,
            data.replicate,
            data.shard * shape.cp,
            shape.dp * shape.cp,
            expert_shard,
            expert_shard * data.replicate,
            shape.cp,
            shape.ep,
        )
        network, group_shapes = self._networks.build(sizes, known)
        knobs = _software_knobs(schedule)
        choices = self._dispatch_choices(shape.ep)
        if schedule.dispatch == ALL_AT_ONCE and choices != (ALL_AT_ONCE,):
            knobs = knobs._replace(dispatch_choices=choices)
        predictor = self._relaxed_predictor(knobs).on(network)
        return predictor, self._layout(candidate, group_shapes)

    def shape_lower_bound(
        self, shape: ShapeKnobs, schedule: ScheduleKnobs | None, splits: tuple[DataKnobs, ...] = ()
    ) -> float:
        """Lower bound in seconds for all layouts with this shape (and schedule): passes through layers, and bubble.

        All ranks of a pipeline together do the passes of the full model, so the slowest takes at least an even share.
        With the `splits` of states that the layouts may have, the same holds for the traffic of states: what compute
        can hide of it grows with both, so that no share of a pipeline hides more than an even one.
        """
        pp, microbatches = shape.pp, shape.microbatches
        model_pass = self._model_pass_time(shape, schedule or self._fastest_schedule)
        compute, share, contention = (
            microbatches * model_pass,
            self._least_share(shape, schedule),
            self._least_contention,
        )
        contention, least = self._least_contention, inf
        for traffic in self._least_traffic(shape.cp, shape.tp, shape.ep, shape.dp, pp > 1, splits):
            sent = microbatches * traffic.microbatch + traffic.step
            passes = compute + exposed_time(sent, compute, contention)
            after = exposed_time(traffic.after, passes / microbatches, contention) / pp
            least = min(least, share * passes + after)
        return least

    def _least_share(self, shape: ShapeKnobs, schedule: ScheduleKnobs | None) -> float:
        """Of the passes of all ranks of a pipeline together the least that a step takes: an even share, and the bubble.

        A schedule that does not split its backward pass waits for the others' passes divided by the stages per rank;
        with one stage per rank and no more microbatches than ranks, a slow first rank hides part of that wait, and the
        rest is least where it has twice the passes of a mean one of `pp` + 1 ranks.
        """
        pp, microbatches = shape.pp, shape.microbatches
        if schedule is None or pp == 1 or schedule.schedule not in ("1f1b", "interleaved"):
            return 1 / pp
        if self.request.cluster.chip.alone > 1:  # idle ranks leave their cores to the others
            return 1 / pp
        if schedule.stages_per_rank == 1 and microbatches <= pp:
            return max(1 / pp, 2 / (pp + 1))
        return 1 / pp + (1 - 1 / pp) / (schedule.stages_per_rank * microbatches)

    @cached_property
    def _least_contention(self) -> float:
        """The least share of hidden traffic that is paid nevertheless."""
        overheads = self._predictor(_SoftwareKnobs("none")).context.overheads
        return min(overheads.contention, overheads.fsdp_contention)

    def _least_model_traffic(
        self, cp: int, tp: int, ep: int, dp: int, pipeline: bool, splits: Sequence[DataKnobs]
    ) -> list[_ModelTraffic]:
        """Of the splits those that none of the others beats in everything; no traffic if none is given."""
        every = {self._traffic(cp, tp, ep, pipeline, split) for split in splits} or {_ModelTraffic()}
        return [one for one in every if not any(all(map(le, other, one)) for other in every if other != one)]

    def _model_traffic(self, cp: int, tp: int, ep: int, pipeline: bool, split: DataKnobs) -> _ModelTraffic:
        """Lower bound on the traffic of states, at any number of microbatches, were the full model on every rank.

        It is that of one microbatch and of two, which says what happens once per step.
        """
        split = split._replace(reduces_once_per_step=pipeline or split.reduces_once_per_step)
        shape = ShapeKnobs(1, cp, tp, ep, split.replicate * split.shard, 1)
        one, two = (
            predictor.state_traffic(layout)
            for predictor, layout in (
                self._relaxed(Candidate(shape._replace(microbatches=number), self._fastest_schedule, split))
                for number in (1, 2)
            )
        )
        step = 2 * (one.passes - two.passes)
        return _ModelTraffic(one.passes - step, step, one.after)

    @property
    def _fastest_schedule(self) -> ScheduleKnobs:
        """One whose passes through layers no other beats."""
        return ScheduleKnobs("1f1b", 1, "none", compile=self.request.constraints.allows_compile(True))

    def degrees_lower_bound(self, shape: ShapeKnobs) -> float:
        """Lower bound in seconds for all layouts with these degrees, at any number of microbatches."""
        key = (shape.cp, shape.tp, shape.ep, shape.dp, shape.ring)
        found = self._full_batches.get(key)
        if found is None:
            held = self.request.recipe.batch.sequences // shape.dp
            numbers = (shape._replace(pp=1, microbatches=number) for number in divisors(held))
            found = min(self.shape_lower_bound(one, None) for one in numbers)
            self._full_batches[key] = found
        return found / shape.pp

    def _model_pass_time(self, shape: ShapeKnobs, schedule: ScheduleKnobs) -> float:
        """Lower bound on the seconds of one microbatch through the full model on one rank."""
        sequences = self.request.recipe.batch.sequences // (shape.dp * shape.microbatches)
        key = (shape.tp, shape.cp, shape.ep, shape.ring, sequences, *_software_knobs(schedule))
        found = self._passes.get(key)
        if found is None:
            alone = shape._replace(pp=1)
            plain = schedule._replace(schedule="1f1b", stages_per_rank=1, stage_layers=())
            candidate = Candidate(alone, plain, DataKnobs(1, shape.dp, True))
            predictor, layout = self._relaxed(candidate)
            found = self._passes[key] = predictor.pass_time(layout)
        return found

    def _layout(self, candidate: Candidate, group_shapes: GroupShapes = ()) -> ParallelLayout:
        shape, schedule, data = candidate
        return ParallelLayout(
            pp=shape.pp,
            replicate=data.replicate,
            shard=data.shard,
            cp=shape.cp,
            tp=shape.tp,
            ep=shape.ep,
            microbatches=shape.microbatches,
            schedule=schedule.schedule,
            stages_per_rank=schedule.stages_per_rank,
            stage_layers=schedule.stage_layers,
            reshard_after_forward=data.reshard_after_forward,
            reduces_once_per_step=data.reduces_once_per_step,
            optimizer_over_replicas=data.optimizer_over_replicas,
            loss_chunks=schedule.loss_chunks,
            ring=shape.ring,
            group_shapes=group_shapes,
        )

    def _predictor_of(self, schedule: ScheduleKnobs) -> Predictor:
        return self._predictor(_software_knobs(schedule))

    def _new_predictor(self, knobs: _SoftwareKnobs) -> Predictor:
        request, software = self.request, software_for(self.request, **knobs._asdict())
        predictor = Predictor(request.model, request.recipe.batch, request.cluster, software, request.matmul_dtype)
        if self._free_level is not None:
            network = predictor.context.network
            links = list(network.links)
            links[self._free_level] = Link(links[self._free_level].capacity, float("inf"), 0.0)
            return predictor.on(replace(network, links=tuple(links)))
        return predictor


def _software_knobs(schedule: ScheduleKnobs) -> _SoftwareKnobs:
    return _SoftwareKnobs(
        schedule.recompute,
        schedule.regather_inputs,
        schedule.compile,
        schedule.dispatch,
    )
