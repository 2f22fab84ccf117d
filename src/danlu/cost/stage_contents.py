"""Which layers every pp rank holds, and how many parameters that is."""

from functools import cached_property, lru_cache
from itertools import groupby
from typing import NamedTuple

from danlu.ops import attention, embedding_head, experts, mlp, mtp
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
    mtp: int = 0
    """How many of its layers belong to multi-token prediction: the last of the last stage."""

    @property
    def layers(self) -> int:
        """All layers."""
        return sum(count for _, count in self.runs)

    @property
    def moe(self) -> int:
        """Layers with experts."""
        return sum(count for kind, count in self.runs if kind.moe)

    @property
    def has_embedding_copy(self) -> bool:
        """Whether multi-token prediction keeps a copy of the first stage's token table here, without its states."""
        return self.mtp > 0 and not self.has_embedding


class Stages(tuple[StageContents, ...]):
    """What every pp rank holds."""

    @cached_property
    def kinds(self) -> tuple[tuple[int, int], ...]:
        """For all ranks that hold the same, the first and the last of them."""
        first: dict[StageContents, int] = {}
        last: dict[StageContents, int] = {}
        for rank, contents in enumerate(self):
            first.setdefault(contents, rank)
            last[contents] = rank
        return tuple((rank, last[contents]) for contents, rank in first.items())


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
) -> Stages:
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
    if shape.mtp:
        held[-1] += [held[-1][-1]] * shape.mtp
    ranks = []
    for rank in range(pp):
        mine = stages_of_rank(rank, pp, stages_per_rank, zigzag=zigzag)
        runs = groupby(kind for stage in mine for kind in held[stage])
        ranks.append(
            StageContents(
                tuple((kind, len([*same])) for kind, same in runs),
                has_embedding=0 in mine,
                has_head=stages - 1 in mine,
                mtp=shape.mtp if stages - 1 in mine else 0,
            )
        )
    return Stages(ranks)


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
    dense += contents.mtp * mtp.project_parameters(shape)
    if contents.has_embedding_copy:
        dense += table
    routed = shape.experts * experts.expert_parameters(shape)
    return RankParameters(dense, contents.moe * (routed // (ep * expert_tp)))
