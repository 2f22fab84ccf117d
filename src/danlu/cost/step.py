"""The prediction of one optimiser step: time by part and bytes by kind, for a model, a layout, a batch and a cluster.

`Predictor` is made once and asked for many layouts (a planner asks for a hundred thousand); `predict` answers for one
plan. Layer times are cached by what they depend on, so a layout costs some tens of microseconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from danlu.cost.bubble import StageTime, pipeline_time
from danlu.cost.calibration import Calibration, calibration
from danlu.cost.collectives import all_gather, all_reduce, network_of, outermost, reduce_scatter, transfer
from danlu.cost.counts import Counting, Counts
from danlu.cost.cutting import Cutting
from danlu.cost.ends import ends_time
from danlu.cost.layer import Cut, LayerTime, Pass, layer_time
from danlu.cost.layout import Layout, Places, layout_of
from danlu.cost.memory import Memory, layer_activations, layer_gradients
from danlu.cost.operators import device_of, elementwise
from danlu.cost.overlap import exposed
from danlu.cost.rank_memory import RankMemory
from danlu.cost.schedule import gathers
from danlu.cost.shape import shape_of
from danlu.cost.software import OURS, Software
from danlu.cost.stages import Held, Holding
from danlu.cost.stragglers import straggling
from danlu.spec.cluster import Cluster
from danlu.spec.model import Model
from danlu.spec.plan import Plan
from danlu.spec.recipe import Batch


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One optimiser step."""

    seconds: float
    parts: dict[str, float]
    """Seconds by part, on the critical rank; they add up to `seconds`."""
    memory: Memory
    notes: tuple[str, ...] = ()
    """What the figures rest on that was assumed."""

    def fits(self, memory: float) -> bool:
        """Whether a chip of so many bytes holds it."""
        return self.memory.device <= memory


class Predictor:
    """Predicts steps of one model and batch on one cluster under one program."""

    def __init__(
        self,
        model: Model,
        batch: Batch,
        cluster: Cluster,
        software: Software = OURS,
        dtype: str = "bf16",
        constants: Calibration | None = None,
    ) -> None:
        constants = constants or calibration()
        self.shape = shape_of(model, software.latent)
        self.batch, self.software, self.habits = batch, software, constants.habits
        chip = cluster.chip
        self.efficiency = constants.of(chip.name, software.attention == "native")
        self.device = device_of(chip, dtype, self.efficiency)
        if not chip.overlaps:
            software = self.software = replace(software, hides_gradients=False, hides_transfers=False)
        self.alone = chip.alone
        self.spread = self.habits.spread if chip.spread is None else chip.spread
        inner, outer = self.efficiency.inner, self.efficiency.outer
        self.network = network_of(cluster, inner, outer, self.habits.collective, software.ring_bandwidth)
        self.notes = constants.notes(chip, dtype)
        self._places: dict[object, Places] = {}
        self._layers: dict[tuple[Cut, bool], LayerTime] = {}
        self._kept: dict[tuple[Cut, bool], tuple[float, float]] = {}

    def places(self, layout: Layout) -> Places:
        """Where the groups of a layout lie."""
        key = (layout.pp, layout.replicate, layout.shard, layout.cp, layout.tp, layout.ep, layout.spans)
        found = self._places.get(key)
        if found is None:
            found = self._places[key] = Places(layout, self.network, self.software.expert_tp)
        return found

    def layer(self, cut: Cut, moe: bool) -> LayerTime:
        """Time of one layer."""
        found = self._layers.get((cut, moe))
        if found is None:
            found = layer_time(self.shape, cut, self.device, self.network, self.software, self.habits, moe=moe)
            self._layers[cut, moe] = found
        return found

    def kept(self, cut: Cut, moe: bool) -> tuple[float, float]:
        """Bytes that one layer keeps, and those that its backward pass needs besides: recomputed, and gradients."""
        found = self._kept.get((cut, moe))
        if found is None:
            software, fp8 = self.software, self.device.fp8
            again = 0.0
            if software.recompute in ("full", "elementwise", "alternate", "latent"):
                plain = replace(software, recompute="none")
                again = layer_activations(self.shape, cut, plain, moe=moe, fp8=fp8)
            again += layer_gradients(self.shape, cut, software, moe=moe)
            found = self._kept[cut, moe] = layer_activations(self.shape, cut, software, moe=moe, fp8=fp8), again
        return found

    def step(self, layout: Layout, memory: Memory | None = None) -> Prediction:
        """Predict one step of a layout that divides the batch and the model.

        `memory` is that of the same layout elsewhere on the network, where it is known already: bytes do not change.
        """
        return _Step(self, layout).prediction(memory)

    def memory(self, layout: Layout) -> Memory:
        """Bytes of the fullest rank alone."""
        return RankMemory(self, layout).fullest()

    def memory_by_place(self, layout: Layout) -> tuple[Memory, ...]:
        """Bytes of a rank at every place on the pipeline."""
        working = RankMemory(self, layout)
        return tuple(working.of_rank(rank) for rank in range(layout.pp))

    def counts(self, layout: Layout, place: int) -> Counts:
        """FLOPs and bytes sent in a step by a rank at a place on the pipeline."""
        return Counting(self, layout).of_rank(place)


def predict(
    model: Model,
    plan: Plan,
    batch: Batch,
    cluster: Cluster,
    software: Software = OURS,
    dtype: str = "bf16",
    constants: Calibration | None = None,
) -> Prediction:
    """Predict one step of a plan: seconds by part, bytes by kind."""
    if software.recompute is None:
        words = {"none": "none", "selective": "elementwise", "full": "full"}
        software = replace(software, recompute=words[plan.recompute])  # type: ignore[arg-type]
    if plan.compile:
        software = replace(software, eager=False)
    return Predictor(model, batch, cluster, software, dtype, constants).step(layout_of(plan, cluster))


class _Step(Cutting):
    """The working of one prediction."""

    def prediction(self, memory: Memory | None) -> Prediction:
        """Seconds and bytes."""
        layout = self.layout
        kinds = {holding: self._stage(holding) for holding in set(self.holdings)}
        hops = self._hops()
        stages = [self._sending(kinds[holding][0], rank, hops) for rank, holding in enumerate(self.holdings)]
        pipeline = pipeline_time(stages, layout.microbatches, layout.schedule, layout.stages_per_rank)
        # While some ranks of a pipeline wait, those they share cores with go faster.
        busy = layout.microbatches * sum(stage.passes for stage in stages) / layout.pp
        pipeline = busy + max(0.0, pipeline - busy) / self.of.alone
        slowest = max(range(layout.pp), key=lambda rank: stages[rank].slot)
        parts = dict(kinds[self.holdings[slowest]][1]) | {"transfer": stages[slowest].sending}
        for name in parts:
            parts[name] *= layout.microbatches
        parts["bubble"] = pipeline - layout.microbatches * stages[slowest].slot
        ends = [self._end(holding, kinds[holding][0]) for holding in set(self.holdings)]
        worst = max(ends, key=lambda end: sum(end.values()))
        parts.update(worst)
        slots, chips = [stage.slot for stage in stages], layout.world // layout.pp
        waiting = (parts["transfer"] + parts.get("gather", 0.0)) / (layout.microbatches * slots[slowest])
        parts["stragglers"] = (1 - waiting) * pipeline * straggling(slots, chips, self.of.spread)
        parts["other"] = self.habits.step
        return Prediction(
            seconds=pipeline + sum(worst.values()) + parts["stragglers"] + self.habits.step,
            parts=parts,
            memory=memory or RankMemory(self.of, layout).fullest(),
            notes=self.of.notes,
        )

    def _stage(self, holding: Holding) -> tuple[StageTime, dict[str, float]]:
        """One rank's passes of one microbatch, and their parts."""
        parts = dict.fromkeys(
            ("linear", "attention", "elementwise", "recompute", "head", "tensor", "expert", "context", "waiting"), 0.0
        )
        forward = backward = weights = 0.0
        ratio = 1.0
        if self.software.recomputed_layers is not None:
            ratio = min(1.0, self.software.recomputed_layers / self.shape.layers)
        for count, moe in ((holding.dense, False), (holding.moe, True)):
            if not count:
                continue
            time = self.of.layer(self.cut, moe)
            for once in (time.forward, time.backward):
                _add(parts, once, count)
            parts["recompute"] += count * ratio * time.again.compute
            _add(parts, time.again._replace(attention=0.0, linear=0.0, elementwise=0.0), count * ratio)
            forward += count * time.forward.total
            backward += count * (time.backward.total + ratio * time.again.total)
            weights += count * time.weights
        ends_forward, ends_backward = ends_time(
            self.shape,
            self.cut,
            self.device,
            self.network,
            self.habits,
            embedding=holding.embedding,
            head=holding.head,
            predicted_ahead=self.software.predicts_ahead,
        )
        parts["head"] += ends_forward + ends_backward
        forward, backward = forward + ends_forward, backward + ends_backward
        if self.software.accumulates_apart and self.layout.microbatches > 1:
            # A new gradient in half precision is written and read, the sum read and written.
            mine = self.held(holding)
            moved = (mine.dense + mine.experts) * (4.0 + 2.0 * self.software.gradient_bytes)
            parts["accumulate"] = elementwise(self.device, moved, 1)
            backward += parts["accumulate"]
        gathers = self._gathers(holding)
        if gathers:
            first, second = gathers
            if self.software.hides_gradients:
                first = exposed(first, forward, self.habits.contention)
                second = exposed(second, backward, self.habits.contention)
            parts["gather"] = first + second
            forward, backward = forward + first, backward + second
        return StageTime(forward, backward, weights), parts

    def _gathers(self, holding: Holding) -> tuple[float, float] | None:
        """Traffic of split parameters and gradients in the passes of one microbatch, before any is hidden."""
        over = self.sharding.parameters
        every = self.every
        if over == "none" and not every:
            return None
        mine = self.held(holding)
        pieces = max(1, holding.layers)
        gather = scatter = 0.0
        for count, dense in ((mine.dense, True), (mine.experts, False)):
            span = self.places.over(dense, over if over != "none" else self.sharding.gradients)
            if not count or prod(span) == 1:
                continue
            if over != "none":
                gather += pieces * all_gather(self.network, span, count * self.software.parameter_bytes / pieces)
            if every:
                gradients = count * self.software.gradient_bytes / pieces
                scatter += pieces * reduce_scatter(self.network, span, gradients)
                if self.sharding.gradients == "group":
                    part = gradients / prod(span)
                    scatter += pieces * all_reduce(self.network, self.places.replicate, part)
        # Gathered parameters and gradients to be reduced go through buffers; the two are a gather and a third each.
        units = self._units(mine, holding) / 3
        gather += units
        if every:
            scatter += units
        layout = self.layout
        if layout.reshards:
            # The backward pass begins with the head, so it is not freed before.
            kept = self.shape.vocabulary * self.shape.width / layout.tp if holding.head else 0.0
            return gather, gather * (1 - kept / (mine.dense + mine.experts)) + scatter
        if layout.microbatches > 1 and layout.pp > 1:
            often = gathers(layout.schedule, layout.pp, layout.microbatches, layout.stages_per_rank)
            gather *= min(1.0, often / layout.microbatches)
        return gather, scatter

    def _units(self, mine: Held, holding: Holding) -> float:
        """What sharding costs one pass beside its traffic: two gathers and a reduction of everything held here."""
        if self.device.measured is None:
            return 0.0
        pieces = max(1, holding.layers) + holding.embedding + holding.head
        return self.device.measured.of("unit", (mine.dense + mine.experts) / pieces, pieces)

    def _hops(self) -> tuple[float, ...]:
        """Exposed seconds of one microbatch's ways from every rank of the pipeline to the next, of all its stages."""
        layout = self.layout
        if layout.pp == 1:
            return (0.0,)
        stream = self.device.width * self.cut.sequences * self.cut.length / self.cut.cp * self.shape.width
        # Every tensor-parallel rank sends its part, and they gather it again (SC 2021, section 4.1).
        whole = 0.0 if self.software.sequence_parallel else all_gather(self.network, self.places.tp, stream)
        hidden = self.software.hides_transfers and layout.stages_per_rank > 1
        often = (self.habits.contention if hidden else 1.0) * layout.stages_per_rank
        levels = [self.places.hop(rank) for rank in range(layout.pp)]
        known = {level: often * (transfer(self.network, level, stream / layout.tp) + whole) for level in set(levels)}
        return tuple(known[level] for level in levels)

    def _sending(self, stage: StageTime, rank: int, hops: Sequence[float]) -> StageTime:
        """The same rank with its transfers.

        The first stage has nothing before it and the last nothing behind it. The last rank sends to the first where
        that holds more than the first stage.
        """
        layout = self.layout
        round_trip = 0.0 if layout.schedule == "zbv" else 1 - 1 / layout.stages_per_rank
        before = hops[rank - 1] * (1.0 if rank > 0 else round_trip)
        after = hops[rank] * (1.0 if rank < layout.pp - 1 else round_trip)
        sending = (2 if self.software.serial_transfers else 1) * (before + after)
        return stage._replace(sending=sending, ahead=2 * hops[rank], behind=2 * hops[rank - 1])

    def _end(self, holding: Holding, stage: StageTime) -> dict[str, float]:
        """After the last microbatch: gradients between replicas, the optimiser, parameters back to replicas."""
        mine, software = self.held(holding), self.software
        reduce = gather = 0.0
        updated = 0.0
        for count, dense in ((mine.dense, True), (mine.experts, False)):
            if not count:
                continue
            replicas = self.places.replicas(dense)
            every = self.places.over(dense, "all")
            gradients = count * software.gradient_bytes
            parameters = count * software.parameter_bytes
            over = self.sharding
            if over.gradients == "group" and (not self.every or replicas.group == 1):
                reduce += reduce_scatter(self.network, self.places.over(dense, "group"), gradients)
                reduce += all_reduce(self.network, self.places.replicate, gradients / replicas.group)
            elif not self.every:
                if over.optimizer == "none" or software.reduces_whole:
                    reduce += all_reduce(self.network, every, gradients)
                else:
                    reduce += reduce_scatter(self.network, every, gradients)
            if over.parameters == "none" and over.optimizer != "none":
                gather += all_gather(self.network, every, parameters)
            updated += count / replicas.over(over.optimizer)
        optimizer = updated * self.habits.optimizer / (self.device.bandwidth * self.of.efficiency.memory)
        if self.device.measured:
            optimizer = self.device.measured.of("optimizer", updated)
            if not self.every:
                reduce += self._units(mine, holding) / 3
        if software.hides_gradients:
            reduce = exposed(reduce, stage.backward, self.habits.contention)
            gather = exposed(gather, stage.forward, self.habits.contention)
        tied = 0.0
        if self.shape.tied and self.layout.pp > 1 and (holding.embedding or holding.head):
            table = self.shape.vocabulary * self.shape.width / self.layout.tp * software.gradient_bytes
            tied = transfer(self.network, outermost(self.places.pp), table)
        return {"gradients": reduce + tied, "parameters": gather, "optimizer": optimizer}


def _add(parts: dict[str, float], once: Pass, times: float) -> None:
    parts["linear"] += times * once.linear
    parts["attention"] += times * once.attention
    parts["elementwise"] += times * once.elementwise
    parts["tensor"] += times * once.tensor
    parts["expert"] += times * once.expert
    parts["context"] += times * once.context
    parts["waiting"] += times * once.waiting
