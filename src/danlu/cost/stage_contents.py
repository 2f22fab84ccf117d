"""Which layers every pp rank holds, and how many parameters that is."""

from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from danlu.ops import attention, embedding_head, experts, mlp
from danlu.ops.model_shape import ModelShape
from danlu.ops.recompute import Recompute
from danlu.spec.plan import split_layers_evenly, stages_of_rank


class LayerKind(NamedTuple):
    """What distinguishes layers."""

    moe: bool
    recompute: Recompute
    local: bool = False
    """Attention has a window."""


class StageContents(NamedTuple):
    """What one pp rank holds."""

    runs: tuple[tuple[LayerKind, int], ...]
    """Its layers in order, as runs of one kind and their lengths."""
    has_embedding: bool
    has_head: bool

    @property
    def layers(self) -> int:
        """All layers."""
        return sum(count for _, count in self.runs)

    @property
    def moe(self) -> int:
        """Layers with experts."""
        return sum(count for kind, count in self.runs if kind.moe)


class RankParameters(NamedTuple):
    """Parameters of one rank before they are sharded over data-parallel ranks."""

    dense: int
    """All but routed experts."""
    experts: int


@lru_cache(maxsize=8192)
def stage_contents(
    shape: ModelShape,
    pp: int,
    stages_per_rank: int,
    counts: tuple[int, ...] = (),
    *,
    count_embedding_and_head: bool = False,
    zigzag: bool = False,
    recompute: Recompute | tuple[Recompute, ...] = "none",
) -> tuple[StageContents, ...]:
    """What every pp rank holds.

    `counts` gives the layers of every stage; if empty, they are as even as possible, and the middle stages take the
    remainder. `count_embedding_and_head` counts each of the two as a layer. `zigzag` is the V shape of `zbv`.
    `recompute` is that of all layers, or of each.
    """
    stages = pp * stages_per_rank
    counts = counts or _even_layer_counts(shape.layers, stages, count_embedding_and_head)
    held, first = [], 0
    for count in counts:
        modes = [recompute] * count if isinstance(recompute, str) else recompute[first : first + count]
        held.append(
            [
                LayerKind(layer >= shape.dense_layers, mode, shape.is_local_layer(layer))
                for layer, mode in enumerate(modes, start=first)
            ]
        )
        first += count
    ranks = []
    for rank in range(pp):
        mine = stages_of_rank(rank, pp, stages_per_rank, zigzag=zigzag)
        runs = groupby(kind for stage in mine for kind in held[stage])
        ranks.append(
            StageContents(
                tuple((kind, len([*same])) for kind, same in runs),
                has_embedding=0 in mine,
                has_head=stages - 1 in mine,
            )
        )
    return tuple(ranks)


def _even_layer_counts(layers: int, stages: int, count_embedding_and_head: bool) -> tuple[int, ...]:
    if count_embedding_and_head and stages > 1:
        counts = list(split_layers_evenly(layers + 2, stages))
        counts[0] -= 1
        counts[-1] -= 1
        return tuple(counts)
    return split_layers_evenly(layers, stages)


@lru_cache(maxsize=8192)
def rank_parameters(shape: ModelShape, contents: StageContents, tp: int, ep: int, expert_tp: int) -> RankParameters:
    """Parameters of a rank; norms and biases, a ten-thousandth of them, are ignored."""
    copied = attention.replicated_parameters(shape)
    layer = copied + (attention.parameters(shape) - copied) // tp
    shared = mlp.parameters(shape, shape.shared_width) + experts.router_parameters(shape)
    dense = (contents.layers - contents.moe) * (layer + mlp.parameters(shape, shape.mlp_dim) // tp)
    dense += contents.moe * (layer + shared // tp)
    table = embedding_head.table_parameters(shape) // tp
    if contents.has_embedding:
        dense += table + embedding_head.position_parameters(shape)
    if contents.has_head and not (shape.tied and contents.has_embedding):
        dense += table
    routed = shape.experts * experts.expert_parameters(shape)
    return RankParameters(dense, contents.moe * (routed // (ep * expert_tp)))
