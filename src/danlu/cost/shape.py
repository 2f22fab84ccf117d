"""A model's layers as the operators see them: small, hashable, and made once a model."""

from functools import lru_cache
from typing import NamedTuple

from danlu.cost.software import Latent
from danlu.spec.model import Model


class Shape(NamedTuple):
    """Sizes of one model; widths in features."""

    layers: int
    dense_layers: int
    """The first layers, which have no experts; all of them in a dense model."""
    width: int
    heads: int
    kv_heads: int
    head: int
    """Width of queries and keys of one head."""
    value: int
    mlp: int
    gated: bool
    vocabulary: int
    tied: bool
    positions: int
    """Rows of a learned position table."""
    experts: int
    top_k: int
    expert_width: int
    shared_width: int
    latent: Latent | None

    @property
    def into(self) -> int:
        """Matrices before the activation of a feed-forward network."""
        return 2 if self.gated else 1

    @property
    def attention_parameters(self) -> int:
        """Of one layer, without norms and biases."""
        if self.latent is None:
            return self.width * self.head * (2 * self.heads + 2 * self.kv_heads)
        low = self.latent
        down = self.width * (low.query_rank + low.key_value_rank + low.rotary)
        up = self.heads * (low.query_rank * self.head + low.key_value_rank * (low.key + low.value))
        return down + up + self.heads * low.value * self.width

    @property
    def dense_parameters(self) -> int:
        """Of the feed-forward network of a layer without experts."""
        return (self.into + 1) * self.width * self.mlp

    @property
    def shared_parameters(self) -> int:
        """Of shared experts and router of one layer."""
        return (self.into + 1) * self.width * self.shared_width + self.width * self.experts

    @property
    def expert_parameters(self) -> int:
        """Of one expert."""
        return (self.into + 1) * self.width * self.expert_width


@lru_cache(maxsize=256)
def shape_of(model: Model, latent: Latent | None = None) -> Shape:
    """The sizes of a model that cost needs."""
    moe = model.moe
    return Shape(
        layers=model.layers,
        dense_layers=moe.dense_layers if moe else model.layers,
        width=model.width,
        heads=model.heads,
        kv_heads=model.key_value_heads,
        head=latent.key + latent.rotary if latent else model.head,
        value=latent.value if latent else model.head,
        mlp=model.mlp,
        gated=model.activation == "swiglu",
        vocabulary=model.vocabulary,
        tied=model.tied,
        positions=model.sequence if model.position == "learned" else 0,
        experts=moe.experts if moe else 0,
        top_k=moe.top_k if moe else 0,
        expert_width=moe.width if moe else 0,
        shared_width=moe.shared * moe.width if moe else 0,
        latent=latent,
    )
