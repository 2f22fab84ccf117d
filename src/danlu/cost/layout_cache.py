"""What layouts of one context have in common, computed once: groups on the network, time and bytes of a layer."""

from danlu.cost.collectives import Link
from danlu.cost.context import CostContext
from danlu.cost.layer_time import LayerTime, LocalShape, layer_time
from danlu.cost.parallel_layout import LayoutGroups, ParallelLayout
from danlu.cost.stage_contents import LayerKind
from danlu.ops import layer
from danlu.ops.layer_shard import LayerShard


class LayoutCache:
    """Of contexts that differ in nothing but their network: keys hold what of it a value depends on."""

    def __init__(self) -> None:
        self._groups: dict[object, LayoutGroups] = {}
        self._times: dict[object, LayerTime] = {}
        self._bytes: dict[tuple[LayerShard, LayerKind], tuple[float, float]] = {}

    def groups(self, context: CostContext, layout: ParallelLayout) -> LayoutGroups:
        """The groups of a layout on the network."""
        degrees = (layout.pp, layout.replicate, layout.shard, layout.cp, layout.tp, layout.ep, layout.group_shapes)
        key = (degrees, context.network.capacities)
        found = self._groups.get(key)
        if found is None:
            found = self._groups[key] = LayoutGroups(layout, context.network, context.software.expert_tp)
        return found

    def layer_time(self, context: CostContext, local: LocalShape, kind: LayerKind) -> LayerTime:
        """Time of one layer."""
        key = (local, kind, context.network.collective_latency, _links(context, local))
        found = self._times.get(key)
        if found is None:
            found = self._times[key] = layer_time(context, local, kind)
        return found

    def layer_bytes(self, context: CostContext, shard: LayerShard, kind: LayerKind) -> tuple[float, float]:
        """Bytes that one layer saves, and those that its backward pass needs in addition: recomputed, and gradients."""
        found = self._bytes.get((shard, kind))
        if found is None:
            software, fp8, (moe, recompute, _) = context.software, context.device.uses_fp8, kind
            saving = software.saving(recompute, fp8)
            kept = layer.saved_bytes(shard, saving, moe)
            again = 0.0
            if recompute in ("full", "elementwise", "alternate", "latent"):
                again = layer.saved_bytes(shard, software.saving("none", fp8), moe)
            if recompute == "elementwise" and saving.by_operator:
                again = max(0.0, again - kept)  # what was saved is not computed again but taken over
            again += software.activation_bytes * layer.gradient_elements(shard, moe)
            again += layer.score_gradient_bytes(shard)
            found = self._bytes[shard, kind] = kept, again
        return found


def _links(context: CostContext, local: LocalShape) -> tuple[Link, ...]:
    """The links that a layer's groups cross; all of them if tokens are deduplicated, as the slowest counts then."""
    links = context.network.links
    if context.software.dedup_dispatch:
        return links
    crossed = zip(links, local.tp_group, local.ep_group, local.etp_group, local.cp_group, strict=True)
    return tuple(link for link, *ranks in crossed if max(ranks) > 1)
