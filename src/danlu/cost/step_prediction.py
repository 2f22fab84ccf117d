"""Prediction of one optimizer step: time by part and memory by kind, for a model, a layout, a batch and a cluster.

`Predictor` is built once and used for many layouts (a planner prices a hundred thousand); `predict` is for one plan.
Layer times are cached, so a layout costs some tens of microseconds.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from danlu.cost.calibration import Calibration
from danlu.cost.collectives import (
    Network,
    all_gather_time,
    all_reduce_time,
    outermost_level,
    p2p_time,
    reduce_scatter_time,
)
from danlu.cost.context import cost_context
from danlu.cost.embedding_head import embedding_head_time
from danlu.cost.layer_time import PassTime
from danlu.cost.layout_cache import LayoutCache
from danlu.cost.layout_shapes import LayoutShapes
from danlu.cost.memory import EMA_BYTES, MASTER_BYTES, MemoryEstimate
from danlu.cost.muon import muon_time, muon_work
from danlu.cost.operator_time import elementwise_time
from danlu.cost.overlap import exposed_time
from danlu.cost.parallel_layout import ParallelLayout, layout_from_plan
from danlu.cost.pipeline_formula import StageTime, pipeline_time
from danlu.cost.pipeline_schedules import gathers_per_stage
from danlu.cost.rank_counts import RankCounter, RankCounts
from danlu.cost.rank_memory import RankMemoryEstimator
from danlu.cost.software import ALL_AT_ONCE, DANLU, Software, token_dispatch
from danlu.cost.stage_contents import RankParameters, StageContents
from danlu.cost.stragglers import straggler_slowdown
from danlu.ops.embedding_head import table_parameters
from danlu.ops.mtp import table_gathers
from danlu.ops.recompute import plan_recompute
from danlu.spec.cluster import Cluster
from danlu.spec.model import Model
from danlu.spec.plan import Plan
from danlu.spec.recipe import BatchConfig

NOT_SLOWED = ("gather", "transfer")
"""Parts of a microbatch that take no longer on a slow chip."""
NOT_SLOWED_IF_PROBED = (*NOT_SLOWED, "tensor", "expert", "context")
"""The same where collectives were measured, which is on slow chips too; calibrated constants do not know that."""


@dataclass(frozen=True, kw_only=True)
class StepPrediction:
    """One optimizer step."""

    seconds: float
    parts: dict[str, float]
    """Seconds by part, on the critical rank; they add up to `seconds`."""
    memory: MemoryEstimate
    assumptions: tuple[str, ...] = ()
    """What was assumed."""

    def fits(self, memory: float) -> bool:
        """Whether it fits a chip with this many bytes."""
        return self.memory.device_bytes <= memory


class StateTraffic(NamedTuple):
    """Seconds in which the parameters and gradients of a rank are sent, before compute hides any of it."""

    passes: float
    """In the passes of one microbatch."""
    after: float
    """After the last one."""


class Predictor:
    """Predicts steps of one model and batch on one cluster with one software."""

    def __init__(
        self,
        model: Model,
        batch: BatchConfig,
        cluster: Cluster,
        software: Software = DANLU,
        dtype: str = "bf16",
        constants: Calibration | None = None,
    ) -> None:
        self.context = cost_context(model, batch, cluster, software, dtype, constants)
        self._cache = LayoutCache()

    def on(self, network: Network) -> "Predictor":
        """The same on another network; what does not depend on it is computed once for both."""
        other = copy(self)
        other.context = replace(self.context, network=network)
        return other

    def predict(self, layout: ParallelLayout, memory: MemoryEstimate | None = None) -> StepPrediction:
        """Predict one step of a layout that divides the batch and the model.

        `memory` is that of the same layout at another placement, if known: it does not change.
        """
        return _StepEstimator(self.context, layout, self._cache).prediction(memory)

    def pass_time(self, layout: ParallelLayout) -> float:
        """Seconds of one microbatch in the first rank of a pipeline, both passes, without traffic of states."""
        return _StepEstimator(self.context, layout, self._cache).pass_time()

    def state_traffic(self, layout: ParallelLayout) -> StateTraffic:
        """Traffic of the states of the first rank of a pipeline."""
        return _StepEstimator(self.context, layout, self._cache).state_traffic()

    def memory(self, layout: ParallelLayout) -> MemoryEstimate:
        """Memory of the fullest rank alone."""
        return RankMemoryEstimator(self.context, layout, self._cache).peak()

    def fits(self, layout: ParallelLayout, device_bytes: float) -> bool:
        """Whether the fullest rank fits into so many bytes of a device: cheaper than its memory."""
        return RankMemoryEstimator(self.context, layout, self._cache).fits(device_bytes)

    def memory_by_pp_rank(self, layout: ParallelLayout) -> tuple[MemoryEstimate, ...]:
        """Memory of a rank, for every pp rank."""
        estimator = RankMemoryEstimator(self.context, layout, self._cache)
        return tuple(estimator.estimate(rank) for rank in range(layout.pp))

    def counts(self, layout: ParallelLayout, pp_rank: int) -> RankCounts:
        """FLOPs and bytes sent in a step by a rank of this pp rank."""
        return RankCounter(self.context, layout, self._cache).count(pp_rank)


def predict(
    model: Model,
    plan: Plan,
    batch: BatchConfig,
    cluster: Cluster,
    software: Software = DANLU,
    dtype: str = "bf16",
    constants: Calibration | None = None,
) -> StepPrediction:
    """Predict one step of a plan: seconds by part, memory by kind."""
    if software.recompute is None:
        software = replace(software, recompute=plan_recompute(plan.recompute, model.layers))
    if plan.compile:
        software = replace(software, eager=False)
    if plan.regather_inputs:
        software = replace(software, keep_gathered_inputs=False)
    if token_dispatch(plan) != ALL_AT_ONCE:
        software = replace(software, dispatch=token_dispatch(plan))
    return Predictor(model, batch, cluster, software, dtype, constants).predict(layout_from_plan(plan, cluster))


class _StepEstimator(LayoutShapes):
    """Computes one prediction."""

    def prediction(self, memory: MemoryEstimate | None) -> StepPrediction:
        """Time and memory."""
        layout = self.layout
        kinds = {contents: self._stage(contents) for contents in set(self.stages)}
        hops = self._p2p_times()
        stages = [self._with_p2p(kinds[contents][0], rank, hops) for rank, contents in enumerate(self.stages)]
        pipeline = pipeline_time(stages, layout.microbatches, layout.schedule, layout.stages_per_rank)
        # While some ranks of a pipeline wait, those they share cores with run faster.
        busy = layout.microbatches * sum(stage.compute for stage in stages) / layout.pp
        pipeline = busy + max(0.0, pipeline - busy) / self.context.solo_speedup
        slowest = max(range(layout.pp), key=lambda rank: stages[rank].per_microbatch)
        parts = dict(kinds[self.stages[slowest]][1]) | {"transfer": stages[slowest].p2p}
        for name in parts:
            parts[name] *= layout.microbatches
        parts["bubble"] = pipeline - layout.microbatches * stages[slowest].per_microbatch
        ends = [self._optimizer_phase(contents, kinds[contents][0]) for contents in set(self.stages)]
        worst = max(ends, key=lambda end: sum(end.values()))
        parts.update(worst)
        stage_times, chips = [stage.per_microbatch for stage in stages], layout.world // layout.pp
        kept = NOT_SLOWED_IF_PROBED if self.device.measured else NOT_SLOWED
        waiting = sum(parts.get(name, 0.0) for name in kept) / (layout.microbatches * stage_times[slowest])
        parts["stragglers"] = (1 - waiting) * pipeline * straggler_slowdown(stage_times, chips, self.context.spread)
        parts["other"] = self.overheads.step_overhead
        return StepPrediction(
            seconds=pipeline + sum(worst.values()) + parts["stragglers"] + self.overheads.step_overhead,
            parts=parts,
            memory=memory or RankMemoryEstimator(self.context, layout, self._cache).peak(),
            assumptions=self.context.assumptions,
        )

    def pass_time(self) -> float:
        """Of the first rank of a pipeline, by one microbatch."""
        _, parts = self._stage(self.stages[0])
        return sum(seconds for name, seconds in parts.items() if name != "gather")

    def state_traffic(self) -> StateTraffic:
        """Of the first rank of a pipeline; none on a probed machine, where it follows no formula."""
        if self.device.measured:
            return StateTraffic(0.0, 0.0)
        reduce, gather, update = self._traffic_after_passes(self.stages[0])
        return StateTraffic(sum(self._shard_comm(self.stages[0]) or ()), reduce + gather + update)

    def _stage(self, contents: StageContents) -> tuple[StageTime, dict[str, float]]:
        """One rank's passes of one microbatch, and their time by part."""
        parts = dict.fromkeys(
            ("linear", "attention", "elementwise", "recompute", "head", "tensor", "expert", "context", "waiting"), 0.0
        )
        forward = backward = weights = 0.0
        ratio = 1.0
        if self.software.recomputed_layers is not None:
            ratio = min(1.0, self.software.recomputed_layers / self.shape.layers)
        for kind, count in contents.runs:
            time = self.layer_time(kind)
            for once in (time.forward, time.backward):
                _add(parts, once, count)
            parts["recompute"] += count * ratio * time.recompute.compute
            _add(parts, time.recompute._replace(attention=0.0, linear=0.0, elementwise=0.0), count * ratio)
            forward += count * time.forward.total
            backward += count * (time.backward.total + ratio * time.recompute.total)
            weights += count * time.weight_grad
        ends_forward, ends_backward = embedding_head_time(
            self.context,
            self.local,
            embedding=contents.has_embedding,
            head=contents.has_head,
            logits_again=self.layout.loss_chunks > 1,
        )
        parts["head"] += ends_forward + ends_backward
        forward, backward = forward + ends_forward, backward + ends_backward
        if self.software.unfused_grad_accumulation and self.layout.microbatches > 1:
            # The new gradient in half precision is written and read, the accumulated one read and written.
            mine = self.rank_parameters(contents)
            moved = (mine.dense + mine.experts) * (4.0 + 2.0 * self.software.gradient_bytes)
            parts["accumulate"] = elementwise_time(self.device, moved, 1)
            backward += parts["accumulate"]
        gathers = self._shard_comm(contents)
        if gathers:
            first, second = gathers
            if self.software.overlap_grad_reduce:
                compiled, overheads = self.software.compiled_gathers, self.overheads
                contention = overheads.contention if compiled else overheads.fsdp_contention
                first = exposed_time(first, forward, contention)
                second = exposed_time(second, backward, contention)
            parts["gather"] = first + second
            forward, backward = forward + first, backward + second
        if copied := self.replicated_gradient_bytes:
            summed = contents.layers * all_reduce_time(self.network, self.groups.tp, copied)
            parts["gather"] = parts.get("gather", 0.0) + summed
            backward += summed
        return StageTime(forward, backward, weights), parts

    def _shard_comm(self, contents: StageContents) -> tuple[float, float] | None:
        """Traffic of sharded parameters and gradients in the passes of one microbatch, before overlap."""
        over = self.sharding.parameters
        every = self.reduces_every_microbatch
        if over == "none" and not every:
            return None
        mine = self.rank_parameters(contents)
        pieces = max(1, contents.layers)
        gather = scatter = table_gather = 0.0
        table = table_parameters(self.shape) / self.layout.tp if contents.has_head else 0.0
        for count, dense in ((mine.dense, True), (mine.experts, False)):
            span = self.groups.shard_group(dense, over if over != "none" else self.sharding.gradients)
            if not count or prod(span) == 1:
                continue
            if over != "none":
                seconds = pieces * all_gather_time(self.network, span, count * self.software.parameter_bytes / pieces)
                gather += seconds
                table_gather += seconds * table / count if dense else 0.0
            if every:
                gradients = count * self.software.gradient_bytes / pieces
                scatter += pieces * reduce_scatter_time(self.network, span, gradients)
                if self.sharding.gradients == "group":
                    part = gradients / prod(span)
                    often = 1 / self.layout.microbatches if self.software.reduce_replicas_once else 1.0
                    scatter += often * pieces * all_reduce_time(self.network, self.groups.replicate, part)
        # Gathers and reductions copy through buffers; a measured `unit` is two gathers and a reduction.
        units = self._fsdp_unit_overhead(mine, contents) / 3
        gather += units
        table_gather += units * table / (mine.dense + mine.experts)
        if every:
            scatter += units
        layout = self.layout
        if layout.reshard_after_forward:
            again = table_gather * table_gathers(contents.mtp) / 2
            # The backward pass begins with the head, so it is not freed in between.
            return gather + again, gather - table_gather + again + scatter
        if layout.microbatches > 1 and (layout.pp > 1 or self.defers_reduce):
            often = gathers_per_stage(layout.schedule, layout.pp, layout.microbatches, layout.stages_per_rank)
            gather *= min(1.0, often / layout.microbatches)
        return gather, scatter

    def _fsdp_unit_overhead(self, mine: RankParameters, contents: StageContents) -> float:
        """Cost of FSDP beside its traffic: two gathers and a reduction of all units of a rank."""
        if self.device.measured is None:
            return 0.0
        pieces = max(1, contents.layers) + contents.has_embedding + contents.has_head
        return self.device.measured.seconds("unit", (mine.dense + mine.experts) / pieces, pieces)

    def _p2p_times(self) -> tuple[float, ...]:
        """Exposed seconds of one microbatch's transfers from every pp rank to the next, over all its stages."""
        layout = self.layout
        if layout.pp == 1:
            return (0.0,)
        stream = self.device.element_bytes * self.shard.tokens * self.shape.width
        # Every tensor-parallel rank sends its shard, and the receivers gather it (SC 2021, section 4.1).
        gather = 0.0 if self.software.sequence_parallel else all_gather_time(self.network, self.groups.tp, stream)
        hidden = self.software.overlap_p2p_comm and layout.stages_per_rank > 1
        often = (self.overheads.contention if hidden else 1.0) * layout.stages_per_rank
        levels = [self.groups.p2p_level(rank) for rank in range(layout.pp)]
        known = {level: often * (p2p_time(self.network, level, stream / layout.tp) + gather) for level in set(levels)}
        return tuple(known[level] for level in levels)

    def _with_p2p(self, stage: StageTime, rank: int, hops: Sequence[float]) -> StageTime:
        """The same rank with its transfers.

        The first stage receives nothing and the last sends nothing. The last rank sends to the first if that holds
        more than the first stage.
        """
        layout = self.layout
        round_trip = 0.0 if layout.schedule == "zbv" else 1 - 1 / layout.stages_per_rank
        before = hops[rank - 1] * (1.0 if rank > 0 else round_trip)
        after = hops[rank] * (1.0 if rank < layout.pp - 1 else round_trip)
        sending = (2 if self.software.serial_p2p else 1) * (before + after)
        return stage._replace(p2p=sending, p2p_next=2 * hops[rank], p2p_previous=2 * hops[rank - 1])

    def _optimizer_phase(self, contents: StageContents, stage: StageTime) -> dict[str, float]:
        """After the last microbatch: gradients between replicas, the optimizer, parameters back to replicas."""
        mine, software = self.rank_parameters(contents), self.software
        reduce, gather, update = self._traffic_after_passes(contents)
        updated = sum(
            count / self.groups.replicas(dense).shards(self.sharding.optimizer)
            for count, dense in ((mine.dense, True), (mine.experts, False))
        )
        optimizer = (
            updated
            * self.overheads.optimizer_bytes_moved
            / (self.device.bandwidth * self.context.efficiency.memory_bandwidth)
        )
        if self.device.measured:
            optimizer = self.device.measured.seconds("optimizer", updated)
            if not self.reduces_every_microbatch:
                reduce += self._fsdp_unit_overhead(mine, contents) / 3
        if software.ema:  # the average is read and written, the parameter read
            optimizer += elementwise_time(self.device, 3 * EMA_BYTES * updated, 1)
        if software.overlap_grad_reduce:
            reduce = exposed_time(reduce, stage.backward, self.overheads.contention)
            gather = exposed_time(gather, stage.forward, self.overheads.contention)
        tied = 0.0
        ends = self.layout.pp > 1 and (contents.has_embedding or contents.has_head)
        if ends and (self.shape.tied or self.shape.mtp):
            table = table_parameters(self.shape) / self.layout.tp * software.gradient_bytes
            if self.shape.mtp:  # the values there and the gradient back, of a rank's shard
                table *= 2 / self.groups.dense.shards(self.sharding.optimizer)
            tied = p2p_time(self.network, outermost_level(self.groups.pp), table)
        phase = {"gradients": reduce + tied, "parameters": gather + update, "optimizer": optimizer}
        if software.muon:
            work = muon_work(software.muon, contents, self.layout, self.groups)
            phase["orthogonalization"], phase["exchange"] = muon_time(self.context, work, self.groups)
        return phase

    def _traffic_after_passes(self, contents: StageContents) -> tuple[float, float, float]:
        """Before overlap: gradients are reduced, parameters gathered, and updated ones sent to replicas."""
        mine, software = self.rank_parameters(contents), self.software
        reduce = gather = update = 0.0
        for count, dense in ((mine.dense, True), (mine.experts, False)):
            if not count:
                continue
            replicas = self.groups.replicas(dense)
            every = self.groups.shard_group(dense, "all")
            gradients = count * software.gradient_bytes
            parameters = count * software.parameter_bytes
            over = self.sharding
            if over.gradients == "group" and (not self.reduces_every_microbatch or replicas.per_group == 1):
                reduce += reduce_scatter_time(self.network, self.groups.shard_group(dense, "group"), gradients)
                reduce += all_reduce_time(self.network, self.groups.replicate, gradients / replicas.per_group)
            elif not self.reduces_every_microbatch:
                if over.optimizer == "none" or software.all_reduce_gradients:
                    reduce += all_reduce_time(self.network, every, gradients)
                else:
                    reduce += reduce_scatter_time(self.network, every, gradients)
            if over.parameters == "none" and over.optimizer != "none":
                gather += all_gather_time(self.network, every, parameters)
            elif over.parameters == "group" and over.optimizer == "all":  # of what the optimizer updates, in fp32
                shard = count * MASTER_BYTES / replicas.per_group
                update += all_gather_time(self.network, self.groups.replicate, shard)
        return reduce, gather, update


def _add(parts: dict[str, float], once: PassTime, times: float) -> None:
    parts["linear"] += times * once.linear
    parts["attention"] += times * once.attention
    parts["elementwise"] += times * once.elementwise
    parts["tensor"] += times * once.tensor
    parts["expert"] += times * once.expert
    parts["context"] += times * once.context
    parts["waiting"] += times * once.host_wait
