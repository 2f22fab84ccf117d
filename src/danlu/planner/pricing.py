"""Time and memory of a layout: exact at one placement, and a lower bound over all placements."""

from dataclasses import replace

from danlu.cost.collectives import Link
from danlu.cost.memory import MemoryEstimate
from danlu.cost.parallel_layout import ParallelLayout
from danlu.cost.rank_counts import RankCounts
from danlu.cost.software import DANLU, Software
from danlu.cost.step_prediction import Predictor, StepPrediction
from danlu.ops.recompute import plan_recompute
from danlu.planner.mesh_placement import GroupShapes, MeshPlacement
from danlu.planner.relaxed_network import RelaxedNetworkBuilder
from danlu.planner.request import PlanRequest
from danlu.planner.search_space import Candidate, DataKnobs, PlanRecompute, ScheduleKnobs, ShapeKnobs

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_NO_MEMORY = MemoryEstimate(
    parameters=0, gradients=0, optimizer=0, activations=0, logits=0, buffers=0, process_groups=0
)
"""Passed where only the time is needed."""
_NOT_PASSES = ("gather", "transfer", "bubble", "gradients", "parameters", "optimizer", "stragglers", "other")
"""Parts of a step outside the passes through layers."""


def software_for(request: PlanRequest, recompute: PlanRecompute) -> Software:
    """Danlu's own software traits, with the recipe's precision."""
    precision = request.recipe.precision
    return replace(
        DANLU,
        recompute=plan_recompute(recompute, request.model.layers),
        expert_imbalance=request.expert_imbalance,
        activation_bytes=_BYTES[precision.compute],
        parameter_bytes=_BYTES[precision.compute],
        gradient_bytes=_BYTES[precision.reduce],
    )


class PlanPricer:
    """Prices the layouts of one request; `lower_bound` never exceeds `price` at any placement."""

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        self._free_level: int | None = None
        self._exact: dict[PlanRecompute, Predictor] = {}
        self._relaxed: dict[PlanRecompute, Predictor] = {}
        self._passes: dict[tuple[int, int, int, int, PlanRecompute], float] = {}
        self._networks = RelaxedNetworkBuilder(self._predictor("none").context.network, request.chips, request.cluster)

    def price(
        self, candidate: Candidate, placement: MeshPlacement, memory: MemoryEstimate | None = None
    ) -> StepPrediction:
        """Time and memory of a placed layout; pass `memory` if it is known from another placement."""
        return self._predictor(candidate.schedule.recompute).predict(
            self._layout(candidate, placement.group_shapes), memory
        )

    def memory(self, candidate: Candidate) -> MemoryEstimate:
        """Memory of a layout; the same at every placement."""
        return self._predictor(candidate.schedule.recompute).memory(self._layout(candidate, ()))

    def memory_by_pp_rank(self, candidate: Candidate) -> tuple[MemoryEstimate, ...]:
        """Memory of a rank, for every pp rank."""
        return self._predictor(candidate.schedule.recompute).memory_by_pp_rank(self._layout(candidate, ()))

    def counts(self, candidate: Candidate, pp_rank: int) -> RankCounts:
        """FLOPs and bytes sent in a step by a rank of this pp rank."""
        return self._predictor(candidate.schedule.recompute).counts(self._layout(candidate, ()), pp_rank)

    def lower_bound(
        self, candidate: Candidate, memory: MemoryEstimate | None = None, known: GroupShapes = ()
    ) -> StepPrediction:
        """Memory, and a lower bound on the time over all placements, or over those with the `known` groups."""
        shape, schedule, data = candidate
        expert_shard = data.shard * shape.cp * shape.tp // shape.ep
        predictor = self._relaxed.get(schedule.recompute)
        if predictor is None:
            predictor = self._relaxed[schedule.recompute] = self._new_predictor(schedule.recompute)
        network, spans = self._networks.network(
            (
                shape.tp,
                data.replicate,
                data.shard * shape.cp,
                shape.dp * shape.cp,
                expert_shard,
                expert_shard * data.replicate,
                shape.cp,
                shape.ep,
            ),
            known,
        )
        return predictor.on(network).predict(self._layout(candidate, spans), memory)

    def shape_lower_bound(self, shape: ShapeKnobs, schedule: ScheduleKnobs | None) -> float:
        """Lower bound in seconds for all layouts with this shape (and schedule): passes through layers, and bubble.

        All ranks of a pipeline together do the passes of the full model, so the slowest takes at least an even share.
        A schedule that does not split its backward pass waits for the others' passes divided by the stages per rank;
        with one stage per rank and no more microbatches than ranks, a slow first rank hides part of that wait, and the
        rest is least where it has twice the passes of a mean one of `pp` + 1 ranks.
        """
        recompute: PlanRecompute = schedule.recompute if schedule else "none"
        model_pass = self._model_pass_time(shape, recompute)
        even = shape.microbatches * model_pass / shape.pp
        if schedule is None or shape.pp == 1 or schedule.schedule not in ("1f1b", "interleaved"):
            return even
        if self.request.cluster.chip.alone > 1:  # idle ranks leave their cores to the others
            return even
        if schedule.stages_per_rank == 1 and shape.microbatches <= shape.pp:
            return max(even, 2 * shape.microbatches * model_pass / (shape.pp + 1))
        return even + (model_pass - model_pass / shape.pp) / schedule.stages_per_rank

    def with_free_level(self, level: int) -> "PlanPricer":
        """A pricer for the same request whose network level `level` is free."""
        other = PlanPricer(self.request)
        other._free_level, other._exact = level, {}
        return other

    def _model_pass_time(self, shape: ShapeKnobs, recompute: PlanRecompute) -> float:
        """Lower bound on the seconds of one microbatch through the full model on one rank."""
        sequences = self.request.recipe.batch.sequences // (shape.dp * shape.microbatches)
        key = (shape.tp, shape.cp, shape.ep, sequences, recompute)
        found = self._passes.get(key)
        if found is None:
            alone = shape._replace(pp=1)
            candidate = Candidate(alone, ScheduleKnobs("1f1b", 1, recompute), DataKnobs(1, shape.dp, True))
            parts = self.lower_bound(candidate, _NO_MEMORY).parts
            found = sum(seconds for name, seconds in parts.items() if name not in _NOT_PASSES) / shape.microbatches
            self._passes[key] = found
        return found

    def _layout(self, candidate: Candidate, spans: GroupShapes) -> ParallelLayout:
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
            group_shapes=spans,
        )

    def _predictor(self, recompute: PlanRecompute) -> Predictor:
        found = self._exact.get(recompute)
        if found is None:
            found = self._new_predictor(recompute)
            if self._free_level is not None:
                links = list(found.context.network.links)
                links[self._free_level] = Link(links[self._free_level].capacity, float("inf"), 0.0)
                found = found.on(replace(found.context.network, links=tuple(links)))
            self._exact[recompute] = found
        return found

    def _new_predictor(self, recompute: PlanRecompute) -> Predictor:
        request, software = self.request, software_for(self.request, recompute)
        return Predictor(request.model, request.recipe.batch, request.cluster, software, request.dtype)
