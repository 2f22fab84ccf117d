"""Local shapes of a layout: layers per pp rank, shape of a microbatch, groups over which states are sharded."""

from danlu.cost.context import CostContext
from danlu.cost.layer_time import LayerTime, LocalShape
from danlu.cost.layout_cache import LayoutCache
from danlu.cost.parallel_layout import ParallelLayout
from danlu.cost.software import HSDP, HSDP_ZERO_1, ZERO_3
from danlu.cost.stage_contents import LayerKind, RankParameters, StageContents, rank_parameters, stage_contents
from danlu.ops import attention, mtp
from danlu.ops.layer_shard import LayerShard


class LayoutShapes:
    """The local shapes of one layout, from which every prediction of it starts."""

    def __init__(self, context: CostContext, layout: ParallelLayout, cache: LayoutCache) -> None:
        self.context, self.layout, self._cache = context, layout, cache
        self.shape, self.software = context.shape, context.software
        self.overheads, self.network, self.device = context.overheads, context.network, context.device
        groups = HSDP_ZERO_1 if layout.optimizer_over_replicas else HSDP
        self.sharding = self.software.sharding or (groups if layout.replicate > 1 else ZERO_3)
        self.groups = cache.groups(context, layout)
        splits = self.sharding.gradients != "none" and self.software.reduce_every_microbatch
        in_pipeline = self.software.defer_reduce_in_pipeline and layout.pp > 1
        self.defers_reduce = splits and (in_pipeline or layout.reduces_once_per_step)
        self.reduces_every_microbatch = splits and not self.defers_reduce
        self.shard = LayerShard(
            model=self.shape,
            sequences=max(1, context.batch.sequences // (layout.dp * layout.microbatches)),
            length=context.batch.length,
            tp=layout.tp,
            cp=layout.cp,
            ep=layout.ep,
            sequence_parallel=self.software.sequence_parallel,
            expert_tp=self.software.expert_tp,
            expert_imbalance=self.software.expert_imbalance if layout.ep > 1 else 1.0,
            pad_values=self.software.pad_values,
            ring=layout.cp > 1 and (layout.ring or not self.software.ulysses),
        )
        self.local = LocalShape(
            self.shard,
            self.groups.tp,
            ep_group=self.groups.ep,
            etp_group=self.groups.expert_tp,
            cp_group=self.groups.cp,
        )
        self.stages = stage_contents(
            self.shape,
            layout.pp,
            layout.stages_per_rank,
            layout.stage_layers,
            count_embedding_and_head=self.software.count_embedding_and_head,
            zigzag=layout.schedule == "zbv",
            recompute=self.software.recompute or "none",
        )

    def rank_parameters(self, contents: StageContents) -> RankParameters:
        """Parameters of a rank before they are sharded over data-parallel ranks."""
        return rank_parameters(self.shape, contents, self.layout.tp, self.layout.ep, self.software.expert_tp)

    def project_gradient_bytes(self, contents: StageContents) -> float:
        """Bytes of a step that `tp` ranks all-reduce: the gradient of what multi-token prediction does not shard.

        In the precision of activations after every microbatch, or once in that of gradients.
        """
        software, often = self.software, self.layout.microbatches
        each = software.gradient_bytes if self.defers_reduce else often * software.activation_bytes
        return float(contents.mtp * each * mtp.project_parameters(self.shape)) if self.layout.tp > 1 else 0.0

    def layer_time(self, kind: LayerKind) -> LayerTime:
        """Time of one layer for one microbatch."""
        return self._cache.layer_time(self.context, self.local, kind)

    def layer_bytes(self, kind: LayerKind) -> tuple[float, float]:
        """Bytes that one layer saves, and those that its backward pass needs in addition: recomputed, and gradients."""
        return self._cache.layer_bytes(self.context, self.shard, kind)

    @property
    def replicated_gradient_bytes(self) -> float:
        """Bytes that a layer sums over `tp` per microbatch: gradients of attention's parameters that it copies.

        In the precision of activations every time they are computed, or accumulated and once per step.
        """
        if self.layout.tp == 1:
            return 0.0
        copied = attention.replicated_parameters(self.shape)
        if self.reduces_every_microbatch:
            return float(self.software.activation_bytes * copied)
        return self.software.gradient_bytes * copied / self.layout.microbatches
