"""FLOPs and bytes sent by one rank in one step, counted from shapes, to compare with a dry run of the same layout.

Bytes are those that a rank puts into its collectives and sends, by axis, independent of the network. FLOPs are those of
matmuls and of the causal half of attention.
"""

from dataclasses import dataclass

from danlu.cost.collectives import dispatch_rows
from danlu.cost.layout_shapes import LayoutShapes
from danlu.cost.memory import MASTER_BYTES
from danlu.cost.muon import muon_work
from danlu.cost.pipeline_schedules import gathers_per_stage as gathers_of
from danlu.cost.stage_contents import LayerKind, StageContents
from danlu.ops import attention, embedding_head, layer, mlp, mtp
from danlu.ops.recompute import RERUN
from danlu.spec.plan import stages_of_rank


@dataclass(frozen=True)
class RankCounts:
    """Of one rank and one step."""

    flops: float
    sent: dict[str, float]
    """Bytes by axis; axes without traffic are missing."""


class RankCounter(LayoutShapes):
    """Computes the counts of one layout."""

    def count(self, rank: int) -> RankCounts:
        """Of one pp rank."""
        contents = self.stages[rank]
        sent = {
            "tp": self._tensor(contents),
            "cp": self._context(contents),
            "ep": self._expert(contents),
            "shard": self._shard(contents),
            "replicate": self._replicate(contents),
            "pp": self._pipeline(rank),
        }
        flops = self._flops(contents)
        if muon := self.software.muon:
            work = muon_work(muon, contents, self.layout, self.groups)
            flops += work.flops(muon.steps)
            for axis, elements in work.sent_elements.items():
                sent[axis] += muon.element_bytes * elements
        return RankCounts(flops, {axis: size for axis, size in sent.items() if size})

    def _flops(self, contents: StageContents) -> float:
        """Matmuls once forward and twice backward, and once more with full recompute.

        Recompute stops before a block's last matmul, whose result is not needed.
        """
        shape, shard = self.shape, self.shard
        batch = shard.sequences * (shape.heads // shard.tp)
        # With its scores in memory, attention does not compute them again in the backward pass.
        backward = 2.0 if shape.by_scores else attention.BACKWARD_TO_FORWARD
        total = 0.0
        for (moe, recompute, local), count in contents.runs:
            pairs = attention.computed_pairs(shard, local=local, documents=self.software.document_mask)
            core = attention.core_flops(batch, pairs, *shard.core_widths)
            linear = sum(matmul.flops for matmul in (*layer.matmuls(shard, moe), *layer.expert_matmuls(shard, moe)))
            last = layer.last_matmul(shard, moe)
            again = linear + core - (last.flops if last else 0.0) if recompute == "full" else 0.0
            total += count * (3 * linear + (1 + backward) * core + again)
        if contents.has_head:
            passes = 4 if self.layout.loss_chunks > 1 else 3  # logits that are not kept are computed again
            total += passes * (1 + contents.mtp) * embedding_head.head_flops(shard)
        total += 3 * contents.mtp * mtp.project_matmul(shard).flops
        return self.layout.microbatches * total

    def _tensor(self, contents: StageContents) -> float:
        """An all-gather and a reduce-scatter around attention and around the MLP, both passes; embedding and head.

        And the sum of the gradients of what is not sharded, MLA's down-projections.
        """
        tp, software = self.shard.tp, self.software
        if tp == 1:
            return 0.0
        each = float(software.activation_bytes)
        stream = each * self.shard.tokens * self.shape.width
        inputs = each * self.shard.tokens * attention.input_width(self.shape)
        both = stream / tp + stream
        total = 0.0
        for (moe, recompute, _), count in contents.runs:
            mlps = 1 if mlp.hidden_width(self.shape, moe) else 0
            block = both + inputs / tp + inputs + mlps * 2 * both
            if recompute == "full":
                # It ends before the last reduction over ranks.
                block += inputs / tp + stream + mlps * both - (0.0 if moe else stream)
            elif software.regathers(recompute):
                gathered = inputs if recompute == "elementwise" or not self.shape.mla else 0.0
                block += (gathered + mlps * stream) / tp
            total += count * block
        # Multi-token prediction looks up and scores once more for every module.
        total += (contents.has_embedding + contents.has_head + 2 * contents.mtp) * both
        copied = contents.layers * self.replicated_gradient_bytes
        return self.layout.microbatches * (total + copied) + self.project_gradient_bytes(contents)

    def _context(self, contents: StageContents) -> float:
        """All-to-all between heads and positions, both ways; or keys and values, and back again their gradients."""
        if self.shard.cp == 1:
            return 0.0
        each, gradients = float(self.software.activation_bytes), 0.0
        if self.shard.ring:
            elements = (self.shard.cp - 1) * attention.key_value_elements(self.shard)
            once, gradients = each * elements, float(self.software.ring_gradient_bytes * elements)
        else:
            once = each * sum(attention.ulysses_elements(self.shard))
        passes = sum(count * (once * _passes(kind) + gradients) for kind, count in contents.runs)
        return self.layout.microbatches * passes

    def _expert(self, contents: StageContents) -> float:
        """Tokens to their experts and back."""
        if self.shard.ep == 1:
            return 0.0
        rows = float(self.shard.routed_rows)
        if self.software.dispatch.deduplicated:
            per_token = sum(sent for _, sent in dispatch_rows(self.local.ep_group, self.shape.top_k))
            rows *= per_token / self.shape.top_k
        both_ways = 2 * self.software.activation_bytes * self.shape.width * rows
        return sum(self.layout.microbatches * n * both_ways * _passes(kind) for kind, n in contents.runs if kind.moe)

    def _shard(self, contents: StageContents) -> float:
        """Shards to gather, and full gradients to reduce-scatter."""
        mine, layout = self.rank_parameters(contents), self.layout
        gathers: float = layout.microbatches * (2 if layout.reshard_after_forward else 1)
        if self.defers_reduce and not layout.reshard_after_forward:
            gathers = gathers_of(layout.schedule, layout.pp, layout.microbatches, layout.stages_per_rank)
        scatters = layout.microbatches if self.reduces_every_microbatch else 1
        total = 0.0
        for count, dense in ((mine.dense, True), (mine.experts, False)):
            ranks = self.groups.replicas(dense).per_group
            if ranks == 1:
                continue
            total += count * (gathers * self.software.parameter_bytes / ranks + scatters * self.software.gradient_bytes)
            if dense and contents.has_head and layout.reshard_after_forward:
                # The backward pass begins with the head, so it is not freed in between.
                table = embedding_head.table_parameters(self.shape) / layout.tp
                more = mtp.table_gathers(contents.mtp) - 1
                total += more * table * layout.microbatches * self.software.parameter_bytes / ranks
        return total

    def _replicate(self, contents: StageContents) -> float:
        """Gradients of one group's shards, all-reduced once per step, and parameters that replicas updated in parts."""
        if self.layout.replicate == 1:
            return 0.0
        mine = self.rank_parameters(contents)
        each = float(self.software.gradient_bytes)
        if self.layout.optimizer_over_replicas:
            each += MASTER_BYTES / self.layout.replicate
        return each * (mine.dense / self.groups.dense.per_group + mine.experts / self.groups.experts.per_group)

    def _pipeline(self, rank: int) -> float:
        """Activations to the next stage and their gradients to the previous one."""
        layout = self.layout
        if layout.pp == 1:
            return 0.0
        stream = self.software.activation_bytes * self.shard.tokens * self.shape.width / layout.tp
        stages = layout.pp * layout.stages_per_rank
        mine = stages_of_rank(rank, layout.pp, layout.stages_per_rank, zigzag=layout.schedule == "zbv")
        ends = sum(stage in mine for stage in (0, stages - 1))
        same_rank = 2 if layout.schedule == "zbv" and rank == layout.pp - 1 else 0
        return layout.microbatches * stream * (2 * len(mine) - ends - same_rank) + self._embedding_copy(rank)

    def _embedding_copy(self, rank: int) -> float:
        """Bytes of a rank's shard of the token table to its copy, or of the copy's gradient back, in fp32."""
        if not self.shape.mtp or rank not in (0, self.layout.pp - 1):
            return 0.0
        shards = self.groups.dense.shards(self.sharding.optimizer)
        return 4.0 * embedding_head.table_parameters(self.shape) / self.layout.tp / shards


def _passes(kind: LayerKind) -> int:
    """Passes of a layer that communicate: forward, backward, and recompute if it is full."""
    return 3 if RERUN[kind.recompute].collectives else 2
