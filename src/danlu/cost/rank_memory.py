"""Memory of a rank at the moments of a step that can be its peak."""

from collections.abc import Callable, Iterator

from danlu.cost.layout_shapes import LayoutShapes
from danlu.cost.memory import (
    GatheredBytes,
    MemoryEstimate,
    gathered_bytes,
    microbatches_in_flight,
    p2p_buffer_bytes,
    state_bytes,
)
from danlu.cost.muon import muon_work
from danlu.cost.pipeline_schedules import MAX_ACTIVE_STAGES, SPLIT_BACKWARD_SCHEDULES
from danlu.cost.stage_contents import RankParameters, StageContents
from danlu.ops.attention import mask_bytes
from danlu.ops.embedding_head import logit_elements, loss_bytes, table_parameters
from danlu.ops.layer import deferred_gradient_elements
from danlu.ops.mtp import kept_loss_bytes, saved_bytes

_Moment = tuple[float, float, float, float, float, float]
"""Bytes by kind: parameters, gradients, optimizer states, activations, logits, buffers."""

MOMENT_BYTES = 4
"""Bytes of a moment of a parameter, in fp32: Muon has one less than AdamW."""


class RankMemoryEstimator(LayoutShapes):
    """Computes the memory of one layout."""

    def peak(self) -> MemoryEstimate:
        """Of the fullest rank."""
        return max(self._moments(), key=lambda memory: memory.allocated)

    def fits(self, device_bytes: float) -> bool:
        """Whether all ranks fit into so many bytes of a device; the rest are not looked at if one does not."""
        return all(moment.device_bytes <= device_bytes for moment in self._moments())

    def _moments(self) -> Iterator[MemoryEstimate]:
        """Every moment that can be the peak.

        Of pp ranks that hold the same, the first has the most microbatches in flight, and the last is furthest behind
        with the gradients of weights, if these are deferred.
        """
        deferred = self.layout.schedule in SPLIT_BACKWARD_SCHEDULES
        kinds = self.stages.kinds
        for rank in sorted({rank for kind in kinds for rank in (kind if deferred else kind[:1])}):
            yield self.estimate(rank)
            if self.software.init_unsharded:
                yield self._at_init(rank)

    def estimate(self, rank: int) -> MemoryEstimate:
        """Peak memory of one pp rank."""
        layout, software, contents = self.layout, self.software, self.stages[rank]
        mine = self.rank_parameters(contents)
        states = state_bytes(
            mine, self.groups.dense, self.groups.experts, self.sharding, software, unsharded=self.defers_reduce
        )
        at_update = 0.0
        if muon := software.muon:
            work = muon_work(muon, contents, layout, self.groups)
            over = self.sharding.optimizer
            spared = work.dense_elements / self.groups.dense.shards(over)
            spared += work.expert_elements / self.groups.experts.shards(over)
            states = states[0], states[1], states[2] - MOMENT_BYTES * spared
            at_update = work.memory(muon.element_bytes)
        flight = microbatches_in_flight(rank, layout.pp, layout.stages_per_rank, layout.microbatches, layout.schedule)
        kept = 0.0
        for kind, count in contents.runs:
            kept += count * self.layer_bytes(kind)[0]
        kept += contents.mtp * saved_bytes(self.shard, software.activation_bytes)
        if contents.has_embedding_copy:  # it has no moments: the first stage owns the table
            table = table_parameters(self.shape) / layout.tp / self.groups.dense.shards(self.sharding.optimizer)
            states = states[0], states[1], states[2] - 2 * MOMENT_BYTES * table
        masks = mask_bytes(self.shard, software.activation_bytes, documents=software.document_mask)
        kept += layout.stages_per_rank * masks
        gathered = gathered_bytes(
            self.shape, mine, contents, layout.tp, self.sharding, software, layout.reshard_after_forward
        )
        if software.preallocate_gradients:
            return self._with_gradient_buffer(contents, states, kept * flight, flight, gathered)
        kept_for_weights = (
            self._deferred_weight_grad_bytes(rank, contents) if layout.schedule in SPLIT_BACKWARD_SCHEDULES else 0.0
        )
        return self._with_lazy_gradients(contents, mine, states, kept, flight, gathered, kept_for_weights, at_update)

    def _backward_bytes(self, contents: StageContents) -> float:
        """Most bytes of a layer's backward pass beyond what all layers of its microbatch saved.

        Layers after it have been freed by then, so among several modes an early one counts less. Of layers with and
        without experts, those with experts are looked at.
        """
        most, freed = 0.0, 0.0
        for kind, count in reversed(contents.runs):
            kept, again = self.layer_bytes(kind)
            if kind.moe == (contents.moe > 0):
                most = max(most, again - freed)
            freed += count * kept
        return most

    def _at_init(self, rank: int) -> MemoryEstimate:
        """Before training: the unsharded parameters of a rank."""
        unsharded = sum(self.rank_parameters(self.stages[rank])) * float(self.software.parameter_bytes)
        return MemoryEstimate(
            parameters=unsharded, gradients=0, optimizer=0, activations=0, logits=0, buffers=0, process_groups=1
        )

    def _with_gradient_buffer(
        self,
        contents: StageContents,
        states: tuple[float, float, float],
        kept: float,
        flight: float,
        gathered: GatheredBytes,
    ) -> MemoryEstimate:
        """With a buffer for every gradient from the start."""
        software = self.software
        again = self._backward_bytes(contents)
        logits = logit_elements(self.shard) * software.logit_bytes if contents.has_head else 0.0
        pipe = p2p_buffer_bytes(contents, self.shard, flight, software) if self.layout.pp > 1 else 0.0
        # The loss is done before the first layer is gathered or recomputed: never both.
        at_loss = logits + gathered.head >= again + gathered.layers
        activations = kept + pipe + (0.0 if at_loss else again)
        buffers = gathered.persistent + (gathered.head if at_loss else gathered.layers) + software.bucket_bytes
        return self._memory((*states, activations, logits if at_loss else 0.0, buffers))

    def _with_lazy_gradients(
        self,
        contents: StageContents,
        mine: RankParameters,
        states: tuple[float, float, float],
        kept: float,
        flight: float,
        gathered: GatheredBytes,
        for_weights: float,
        at_update: float,
    ) -> MemoryEstimate:
        """With gradients allocated lazily: at the loss, in a layer's backward, after the first layer, at the end."""
        layout, shape = self.layout, self.shape
        parameters, gradients, optimizer = states
        stages = layout.stages_per_rank
        table = table_parameters(shape) / layout.tp
        ends = table if contents.has_embedding or contents.has_head else 0.0
        always = gathered.persistent * min(1.0, MAX_ACTIVE_STAGES / stages)
        layer = max(0.0, mine.dense + mine.experts - ends) / max(1, contents.layers)
        # A gradient is computed by a matmul in the precision of activations before it is accumulated.
        each = self.software.activation_bytes
        stream = each * self.shard.tokens * shape.width / layout.tp
        # A stage holds what it sent of every microbatch in flight; two more are being received, and two sent.
        piped = (flight * stages + 4) * stream + for_weights if layout.pp > 1 else 0.0
        # Gradients of earlier microbatches exist unless all of them are still in flight.
        later = gradients if layout.microbatches > flight else 0.0
        again = self._backward_bytes(contents)
        before = max(0.0, flight - 1 / stages)
        weight_grad = shape.width * max(shape.mlp_dim / layout.tp, shape.expert_width) * each

        def at(activations: float, logits: float, grads: float, buffers: float) -> _Moment:
            return parameters, grads, optimizer, activations + piped, logits, always + buffers

        # Experts are gathered by themselves: the next layer is not gathered yet.
        around = layer * self.software.parameter_bytes if contents.moe else gathered.layers
        moments = [at(kept * flight + again, 0.0, later + weight_grad, around if layout.reshard_after_forward else 0.0)]
        if layout.microbatches > 1:
            # One microbatch less in flight, and all gradients, if there were none before.
            moments.append(at(kept * before, 0.0, gradients + max(layer, ends) * each, 0.0))
        if contents.has_head:
            together = layout.microbatches if layout.schedule == "gpipe" and layout.pp > 1 else 1
            ahead = contents.mtp * kept_loss_bytes(self.shard, each)
            logits = self._loss_bytes(together) + ahead
            moments.append(at(kept * flight + 4 * stream, logits, later, gathered.head))
            if layout.pp == 1:
                moments += self._at_head_backward(at, contents, kept, stream, later, weight_grad, gathered)
            elif layout.schedule not in SPLIT_BACKWARD_SCHEDULES:
                # A pipeline keeps logits until the backward pass of their microbatch is done.
                moments.append(at(kept * flight + 2 * stream, logits, later + table * each, gathered.head))
            if together > 1:
                earlier = self._loss_bytes(together - 1) + (together - 1) * ahead
                moments.append(at(kept * before + 4 * stream, earlier, gradients, gathered.head))
        # At the end the largest unit's gradients are being reduced; in a pipeline all are accumulated by then.
        unit = max(ends, layer)
        new = 0.0 if self.defers_reduce else unit * each
        moments.append(at(0.0, 0.0, gradients + new, unit * self.software.gradient_bytes))
        if at_update:
            moments.append((*states, 0.0, 0.0, at_update))
        return self._memory(max(moments, key=sum))

    def _at_head_backward(
        self,
        at: Callable[[float, float, float, float], _Moment],
        contents: StageContents,
        kept: float,
        stream: float,
        later: float,
        weight_grad: float,
        gathered: GatheredBytes,
    ) -> list[_Moment]:
        """Without a pipeline: in the head's matmul, while its gradient is reduced, and in the layer before it.

        Logits are freed once their gradient is there. The layer before the head is gathered ahead of time, and what is
        being reduced is held until the next unit's gradients are.
        """
        software, layout = self.software, self.layout
        each, logit = software.activation_bytes, self._loss_bytes(0)
        mine, table = self.rank_parameters(contents), table_parameters(self.shape) / layout.tp
        ends = table * (2 if contents.has_embedding and not self.shape.tied else 1)
        layer = max(0.0, mine.dense + mine.experts - ends) / max(1, contents.layers)
        is_sharded = self.sharding.parameters != "none"
        ahead = layer * software.parameter_bytes if is_sharded and layout.reshard_after_forward else 0.0
        uses = 1 + contents.mtp
        found = [at(kept + 2 * stream, uses * logit, later + table * each, gathered.head + ahead)]
        if not is_sharded or self.defers_reduce:
            return found
        shards = self.groups.dense.shards(self.sharding.gradients)
        reduced = later or table * software.gradient_bytes / shards
        reducing = table * software.gradient_bytes
        found.append(at(kept + stream, (uses - 1) * logit, reduced + table * each, reducing + ahead))
        if contents.mtp:
            # Gradients of the two tables wait for those of their other uses, and one is new; both tables are gathered.
            waiting = 3 * table * each
            tables, reducing = 2 * gathered.head, layer * software.gradient_bytes
            freed = kept / max(1, contents.layers)
            found.append(at(kept - freed, (uses - 1) * logit + waiting, later, tables + ahead + reducing))
        else:
            again = self._backward_bytes(contents)
            # Experts are gathered by themselves: the next layer is not gathered yet.
            around = ahead if contents.moe else 2 * ahead
            found.append(at(kept + again, 0.0, reduced + weight_grad, reducing + around))
        return found

    def _deferred_weight_grad_bytes(self, rank: int, contents: StageContents) -> float:
        """Gradients of matmul outputs, kept from the backward for inputs to that for weights.

        A pp rank is as many weight halves behind as its index, and one more is being computed.
        """
        size = self.software.activation_bytes
        each = size * deferred_gradient_elements(self.shard, contents.moe > 0)
        behind = min(rank, self.layout.microbatches * self.layout.stages_per_rank)
        scores = size * logit_elements(self.shard) if contents.has_head else 0.0
        return (behind + 1) * each * contents.layers / self.layout.stages_per_rank + behind * scores

    def _loss_bytes(self, together: int) -> float:
        """Bytes at the loss of one microbatch, and of those whose loss was computed before."""
        each, chunks = self.software.activation_bytes, self.layout.loss_chunks
        if chunks == 1:
            return loss_bytes(self.shard, each, together)
        # One part of the logits and their gradient, and of hidden states the gradient, a sum in fp32, and a summand.
        return loss_bytes(self.shard, each, 1) / chunks + (4 + each) * self.shard.tokens * self.shape.width

    def _memory(self, moment: _Moment) -> MemoryEstimate:
        layout = self.layout
        degrees = (layout.tp, layout.cp, layout.dp, layout.pp, layout.ep)
        parameters, gradients, optimizer, activations, logits, buffers = moment
        return MemoryEstimate(
            parameters=parameters,
            gradients=gradients,
            optimizer=optimizer,
            activations=activations,
            logits=logits,
            buffers=buffers,
            process_groups=1 + self.software.extra_process_groups + sum(degree > 1 for degree in degrees),
        )
