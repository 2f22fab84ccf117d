"""Bytes of a rank at the moments of a step that can be its fullest."""

from danlu.cost.cutting import Cutting
from danlu.cost.memory import (
    Gathered,
    Memory,
    gathered,
    in_flight,
    logit_bytes,
    pipe_buffers,
    state_bytes,
)
from danlu.cost.schedule import ACTIVE_STAGES, HALVING
from danlu.cost.stages import Held, Holding


class RankMemory(Cutting):
    """The working of one layout's bytes."""

    def fullest(self) -> Memory:
        """Of the fullest rank: the first of the pipeline, the one behind it, or the last."""
        ranks, whole = sorted({0, min(1, self.layout.pp - 1), self.layout.pp - 1}), self.software.builds_whole
        moments = [self.of_rank(rank) for rank in ranks] + [self._built(rank) for rank in ranks if whole]
        return max(moments, key=lambda memory: memory.allocated)

    def of_rank(self, rank: int) -> Memory:
        """Of the rank at one place on the pipeline, when it is fullest."""
        layout, software, holding = self.layout, self.software, self.holdings[rank]
        mine = self.held(holding)
        states = state_bytes(mine, self.places.dense, self.places.experts, self.sharding, software, whole=self.deferred)
        flight = in_flight(rank, layout.pp, layout.stages_per_rank, layout.microbatches, layout.schedule)
        kept = holding.dense * self.of.kept(self.cut, False)[0] if holding.dense else 0.0
        kept += holding.moe * self.of.kept(self.cut, True)[0] if holding.moe else 0.0
        whole = gathered(self.shape, mine, holding, layout.tp, self.sharding, software, layout.reshards)
        if software.preallocates:
            return self._preallocated(holding, states, kept * flight, flight, whole)
        kept_for_weights = self._for_weights(rank, holding) if layout.schedule in HALVING else 0.0
        return self._as_needed(holding, mine, states, kept, flight, whole, kept_for_weights)

    def _built(self, rank: int) -> Memory:
        """Before training: the parameters of a rank, not split yet."""
        whole = sum(self.held(self.holdings[rank])) * float(self.software.parameter_bytes)
        return Memory(parameters=whole, gradients=0, optimizer=0, activations=0, logits=0, buffers=0, groups=1)

    def _preallocated(
        self, holding: Holding, states: tuple[float, float, float], kept: float, flight: float, whole: Gathered
    ) -> Memory:
        """With room for every gradient from the start."""
        software = self.software
        again = self.of.kept(self.cut, holding.moe > 0)[1]
        logits = logit_bytes(self.shape, self.cut, software) if holding.head else 0.0
        pipe = pipe_buffers(holding, self.cut, self.shape, flight, software) if self.layout.pp > 1 else 0.0
        # The loss is done before the first layer is gathered or computed again: never both.
        at_loss = logits + whole.head >= again + whole.layers
        return self._memory(
            states,
            activations=kept + pipe + (0.0 if at_loss else again),
            logits=logits if at_loss else 0.0,
            buffers=whole.always + (whole.head if at_loss else whole.layers) + software.bucket_bytes,
        )

    def _as_needed(
        self,
        holding: Holding,
        mine: Held,
        states: tuple[float, float, float],
        kept: float,
        flight: float,
        whole: Gathered,
        for_weights: float,
    ) -> Memory:
        """With gradients when they come: at the loss, in a layer's backward, behind the first layer, and at the end."""
        layout, cut, shape = self.layout, self.cut, self.shape
        parameters, gradients, optimizer = states
        stages = layout.stages_per_rank
        table = shape.vocabulary * shape.width / layout.tp
        ends = table if holding.embedding or holding.head else 0.0
        always = whole.always * min(1.0, ACTIVE_STAGES / stages)
        layer = max(0.0, mine.dense + mine.experts - ends) / max(1, holding.layers)
        # A gradient, too, is made by a product in the precision of activations, before it is added to those of others.
        each = self.software.activation_bytes
        stream = each * cut.sequences * cut.length / cut.cp * shape.width / layout.tp
        # Of every microbatch in flight a stage holds what it sent on; two more are on their way in, and two out.
        piped = (flight * stages + 4) * stream + for_weights if layout.pp > 1 else 0.0
        # Gradients of earlier microbatches are there unless all of them are still in flight.
        later = gradients if layout.microbatches > flight else 0.0
        again = self.of.kept(cut, holding.moe > 0)[1]
        before = max(0.0, flight - 1 / stages)
        product = shape.width * max(shape.mlp / layout.tp, shape.expert_width) * each

        def at(activations: float, logits: float, grads: float, buffers: float) -> Memory:
            return self._memory((parameters, grads, optimizer), activations + piped, logits, always + buffers)

        # Experts are gathered by themselves: the layer behind them is not there yet.
        around = layer * self.software.parameter_bytes if holding.moe else whole.layers
        moments = [at(kept * flight + again, 0.0, later + product, around if layout.reshards else 0.0)]
        if layout.microbatches > 1:
            # One microbatch less in flight, and all gradients: where none were there before.
            moments.append(at(kept * before, 0.0, gradients + max(layer, ends) * each, 0.0))
        if holding.head:
            together = layout.microbatches if layout.schedule == "gpipe" and layout.pp > 1 else 1
            logits = self._logits(together)
            moments.append(at(kept * flight + 4 * stream, logits, later, whole.head))
            if together > 1:
                moments.append(at(kept * before + 4 * stream, self._logits(together - 1), gradients, whole.head))
        # At the end the largest unit's gradients are on their way; in a pipeline all are long added up.
        unit = max(ends, layer)
        new = 0.0 if self.deferred else unit * each
        moments.append(at(0.0, 0.0, gradients + new, unit * self.software.gradient_bytes))
        return max(moments, key=lambda memory: memory.allocated)

    def _for_weights(self, rank: int, holding: Holding) -> float:
        """Gradients of every product's result, kept from the half for inputs to that for weights.

        A place is as many halves for weights behind as its number, and one more is in the making.
        """
        shape, cut = self.shape, self.cut
        tokens = cut.sequences * cut.length / cut.cp
        hidden = shape.shared_width if holding.moe else shape.mlp
        rows = tokens * shape.top_k * self.software.imbalance if holding.moe else 0.0
        split = tokens * ((shape.heads + 2 * shape.kv_heads) * shape.head + shape.into * hidden)
        split += rows * (shape.into * shape.expert_width + shape.width) + 4.0 * tokens * shape.width
        size = self.software.activation_bytes
        each = size * (split / cut.tp + 2.0 * tokens * shape.width)
        behind = min(rank, self.layout.microbatches * self.layout.stages_per_rank)
        scores = size * tokens * shape.vocabulary / cut.tp if holding.head else 0.0
        return (behind + 1) * each * holding.layers / self.layout.stages_per_rank + behind * scores

    def _logits(self, together: int) -> float:
        """Bytes at the loss of one microbatch, and of those whose loss was taken before.

        Whole scores: fp32 shares, their gradient and that of the scores; split over ranks, a rank's own in half
        precision, fp32 and the gradient. A pipeline also keeps the scores as its output.
        """
        scores = logit_bytes(self.shape, self.cut, self.software) / self.software.logit_bytes
        piped = float(self.software.activation_bytes) if self.layout.pp > 1 else 0.0
        at_loss = (12.0 if self.layout.tp == 1 else 10.0) + piped
        return scores * (at_loss + (together - 1) * (4.0 + piped))

    def _memory(self, states: tuple[float, float, float], activations: float, logits: float, buffers: float) -> Memory:
        layout = self.layout
        degrees = (layout.tp, layout.cp, layout.data, layout.pp, layout.ep)
        return Memory(
            parameters=states[0],
            gradients=states[1],
            optimizer=states[2],
            activations=activations,
            logits=logits,
            buffers=buffers,
            groups=1 + self.software.extra_groups + sum(degree > 1 for degree in degrees),
        )
