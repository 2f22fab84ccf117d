"""A decoder transformer described by its shape: GPT, Llama and mixture-of-experts models."""

from typing import Literal, Self

from pydantic import Field, model_validator

from danlu.spec.description import Count, Description
from danlu.spec.numbers import closest_divisor, closest_multiple


class Moe(Description):
    """The expert layers of a model. Routing is dropless: every token reaches its `top_k` experts."""

    experts: Count
    top_k: Count
    width: Count
    """Hidden width of one expert's feed-forward network."""
    shared: int = Field(default=0, ge=0)
    """Experts every token passes through, beside the routed ones."""
    dense_layers: int = Field(default=0, ge=0)
    """The first layers that keep an ordinary feed-forward network."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True
    """Divide the chosen experts' scores by their sum."""
    balance: Literal["loss", "bias", "none"] = "loss"
    """How load is evened: an auxiliary loss over each sequence, a bias per expert moved by its load, or not at all."""
    balance_rate: float = Field(default=0.01, ge=0)
    """Weight of the auxiliary loss, or how far a bias moves in one step."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.top_k > self.experts:
            raise ValueError(
                f"`top_k` must be at most `experts` ({self.experts}), but is {self.top_k} instead\n"
                f"top_k = {self.experts}, or more experts"
            )
        return self


class RopeScaling(Description):
    """Rotary positions stretched beyond the length a model was first trained at.

    Of kind "llama3": a pair of features that turns fewer than `low` times within `original` positions turns slower by
    `factor`, one that turns more than `high` times stays as it is, and in between the two are blended.
    """

    kind: Literal["llama3"] = "llama3"
    factor: float = Field(gt=0)
    low: float = Field(default=1.0, gt=0)
    high: float = Field(default=4.0, gt=0)
    original: Count
    """Positions the model was first trained at."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.high <= self.low:
            raise ValueError(
                f"`high` must be above `low` ({self.low}), but is {self.high} instead\nhigh = {4 * self.low}"
            )
        return self


class Model(Description):
    """The shape of a decoder transformer; everything that `framework` needs to build it and `cost` to weigh it."""

    name: str = "model"
    vocabulary: Count
    layers: Count
    width: Count
    """Width of the residual stream."""
    heads: Count
    kv_heads: Count | None = None
    """Key and value heads (grouped-query attention); as many as `heads` when left out."""
    head_width: Count | None = None
    """Width of one head; `width / heads` when left out."""
    mlp_width: Count | None = None
    """Hidden width of the dense feed-forward network; `4 × width` when left out."""
    sequence: Count = 2048
    """Longest sequence the model is meant for; sets the size of a learned position table."""
    norm: Literal["rms", "layer"] = "rms"
    norm_epsilon: float = Field(default=1e-5, gt=0)
    position: Literal["rope", "learned"] = "rope"
    rope_theta: float = Field(default=10_000.0, gt=0)
    rope_scaling: RopeScaling | None = None
    activation: Literal["swiglu", "gelu"] = "swiglu"
    bias: bool = False
    """Biases on all projections of attention and of the dense feed-forward network."""
    qkv_bias: bool = False
    """Biases on the query, key and value projections alone."""
    qk_norm: bool = False
    """An RMS norm over every head of the queries and of the keys, before positions are put in."""
    tied: bool = False
    """Use the token embedding as the output layer too."""
    moe: Moe | None = None
    source: str = ""
    """Where the figures come from."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.heads % self.key_value_heads:
            valid = closest_divisor(self.key_value_heads, self.heads)
            raise ValueError(
                f"`kv_heads` must divide `heads` ({self.heads}), but is {self.kv_heads} instead\nkv_heads = {valid}"
            )
        if self.head_width is None and self.width % self.heads:
            valid = closest_multiple(self.width, self.heads)
            raise ValueError(
                f"`width` must be a multiple of `heads` ({self.heads}), but is {self.width} instead\n"
                f"width = {valid}, or set `head_width`"
            )
        if self.position == "rope" and self.head % 2:
            raise ValueError(
                f"`head_width` must be even for rotary positions, but is {self.head} instead\n"
                f"head_width = {self.head + 1}"
            )
        if self.rope_scaling and self.position != "rope":
            raise ValueError(
                f'`position` must be "rope" for `rope_scaling` to mean something, but is "{self.position}" instead\n'
                'position = "rope", or leave out [model.rope_scaling]'
            )
        if self.bias and self.qkv_bias:
            raise ValueError(
                "`qkv_bias` must be false where `bias` gives every projection one, but is true instead\n"
                "leave out `qkv_bias`"
            )
        if self.moe and self.moe.dense_layers > self.layers:
            raise ValueError(
                f"`moe.dense_layers` must be at most `layers` ({self.layers}), but is {self.moe.dense_layers} instead\n"
                f"dense_layers = {self.layers - 1}, or leave out [model.moe]"
            )
        return self

    @property
    def key_value_heads(self) -> int:
        """Key and value heads, with the default filled in."""
        return self.kv_heads or self.heads

    @property
    def head(self) -> int:
        """Width of one attention head, with the default filled in."""
        return self.head_width or self.width // self.heads

    @property
    def mlp(self) -> int:
        """Hidden width of the dense feed-forward network, with the default filled in."""
        return self.mlp_width or 4 * self.width

    def is_moe_layer(self, layer: int) -> bool:
        """Whether layer number `layer` routes to experts."""
        return self.moe is not None and layer >= self.moe.dense_layers
