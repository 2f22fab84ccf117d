"""What layouts of one context have in common, computed once: groups on the network, time and bytes of a layer."""

from dataclasses import replace

from danlu.cost.collectives import Link
from danlu.cost.context import CostContext
from danlu.cost.layer_time import LayerTime, LocalShape, layer_time
from danlu.cost.memory import activation_gradient_bytes, layer_activation_bytes
from danlu.cost.parallel_layout import LayoutGroups, ParallelLayout


class LayoutCache:
    """Of contexts that differ in nothing but their network: keys hold what of it a value depends on."""

    def __init__(self) -> None:
        self._groups: dict[object, LayoutGroups] = {}
        self._times: dict[object, LayerTime] = {}
        self._bytes: dict[tuple[LocalShape, bool], tuple[float, float]] = {}

    def groups(self, context: CostContext, layout: ParallelLayout) -> LayoutGroups:
        """The groups of a layout on the network."""
        degrees = (layout.pp, layout.replicate, layout.shard, layout.cp, layout.tp, layout.ep, layout.group_shapes)
        key = (degrees, context.network.capacities)
        found = self._groups.get(key)
        if found is None:
            found = self._groups[key] = LayoutGroups(layout, context.network, context.software.expert_tp)
        return found

    def layer_time(self, context: CostContext, local: LocalShape, moe: bool) -> LayerTime:
        """Time of one layer."""
        key = (local, moe, context.network.collective_latency, _links(context, local))
        found = self._times.get(key)
        if found is None:
            found = self._times[key] = layer_time(
                context.shape, local, context.device, context.network, context.software, context.overheads, moe=moe
            )
        return found

    def layer_bytes(self, context: CostContext, local: LocalShape, moe: bool) -> tuple[float, float]:
        """Bytes that one layer saves, and those that its backward pass needs in addition: recomputed, and gradients."""
        found = self._bytes.get((local, moe))
        if found is None:
            shape, software, fp8 = context.shape, context.software, context.device.uses_fp8
            again = 0.0
            if software.recompute in ("full", "elementwise", "alternate", "latent"):
                plain = replace(software, recompute="none")
                again = layer_activation_bytes(shape, local, plain, moe=moe, fp8=fp8)
            again += activation_gradient_bytes(shape, local, software, moe=moe)
            kept = layer_activation_bytes(shape, local, software, moe=moe, fp8=fp8)
            found = self._bytes[local, moe] = kept, again
        return found


def _links(context: CostContext, local: LocalShape) -> tuple[Link, ...]:
    """The links that a layer's groups cross; all of them if tokens are deduplicated, as the slowest counts then."""
    links = context.network.links
    if context.software.dedup_dispatch:
        return links
    crossed = zip(links, local.tp_group, local.ep_group, local.etp_group, local.cp_group, strict=True)
    return tuple(link for link, *ranks in crossed if max(ranks) > 1)
