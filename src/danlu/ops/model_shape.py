"""Sizes of a model's layers: small, hashable, cached per model."""

from functools import lru_cache
from typing import NamedTuple

from danlu.spec.model import MLAConfig, Model


class ModelShape(NamedTuple):
    """Sizes of one model; widths in features."""

    layers: int
    dense_layers: int
    """The first layers, which have no experts; all layers in a dense model."""
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    """Width of queries and keys of one head."""
    v_head_dim: int
    mlp_dim: int
    gated: bool
    vocabulary: int
    tied: bool
    positions: int
    """Rows of a learned position table."""
    experts: int
    top_k: int
    expert_width: int
    shared_width: int
    mla: MLAConfig | None
    window: int = 0
    """Positions seen by layers with a sliding window; 0 if none has one."""
    global_every: int = 0
    global_first: int = 0
    by_scores: bool = False
    """Attention has its scores in memory, as it needs for sinks or a softcap."""
    capped: bool = False
    """Scores are bounded by a softcap."""

    def is_local_layer(self, layer: int) -> bool:
        """Whether layer number `layer` has a window."""
        is_global = bool(self.global_every) and layer % self.global_every == self.global_every - 1
        return self.window > 0 and layer >= self.global_first and not is_global

    @property
    def all_local(self) -> bool:
        """Whether every layer has a window."""
        return self.window > 0 and not (self.global_every or self.global_first)

    @property
    def rotated_dim(self) -> int:
        """Features of one head's query and key that positions rotate."""
        return self.mla.qk_rope_head_dim if self.mla else self.head_dim

    @property
    def num_up_projections(self) -> int:
        """Up-projections of a feed-forward network: 2 if it is gated."""
        return 2 if self.gated else 1


@lru_cache(maxsize=256)
def model_shape(model: Model) -> ModelShape:
    """The sizes of a model."""
    moe = model.moe
    return ModelShape(
        layers=model.layers,
        dense_layers=moe.dense_layers if moe else model.layers,
        width=model.width,
        heads=model.heads,
        kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        v_head_dim=model.v_head_dim,
        mlp_dim=model.mlp_dim,
        gated=model.gated,
        vocabulary=model.vocabulary,
        tied=model.tied,
        positions=model.sequence if model.position == "learned" else 0,
        experts=moe.experts if moe else 0,
        top_k=moe.top_k if moe else 0,
        expert_width=moe.width if moe else 0,
        shared_width=moe.shared * moe.width if moe else 0,
        mla=model.mla,
        window=model.window or 0,
        global_every=model.global_every or 0,
        global_first=model.global_first,
        by_scores=model.materializes_scores,
        capped=model.score_softcap is not None,
    )
