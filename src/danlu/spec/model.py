"""A decoder transformer described by its shape: GPT, Llama and mixture-of-experts models."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from danlu.spec.description import SpecModel
from danlu.spec.divisors import closest_divisor, closest_multiple
from danlu.spec.names import Label

Width = Annotated[int, Field(ge=1, le=10**8)]
"""Features of a matrix or of the residual stream; the widest published model has 10^5."""
HeadCount = Annotated[int, Field(ge=1, le=10**6)]
MAX_LAYERS = 100_000
MAX_EXPERTS = 10**7
SequenceLength = Annotated[int, Field(ge=1, le=10**9)]
"""Tokens of a sequence."""


class Moe(SpecModel):
    """The expert layers of a model. Routing is dropless: every token reaches its `top_k` experts."""

    experts: int = Field(ge=1, le=MAX_EXPERTS)
    """Routed experts of one layer."""
    top_k: int = Field(ge=1, le=10_000)
    """Experts that every token is sent to."""
    width: Width
    """Hidden width of one expert's feed-forward network."""
    shared: int = Field(default=0, ge=0, le=MAX_EXPERTS)
    """Experts every token passes through, beside the routed ones."""
    dense_layers: int = Field(default=0, ge=0, le=MAX_LAYERS)
    """The first layers that keep an ordinary feed-forward network."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """How the router's outputs become the weights of the experts."""
    normalize: bool = True
    """Divide the chosen experts' scores by their sum."""
    balance: Literal["loss", "bias", "none"] = "loss"
    """Load balancing: an auxiliary loss over each sequence, a bias per expert updated by its load, or none."""
    balance_rate: float = Field(default=0.01, ge=0, le=1000)
    """Weight of the auxiliary loss, or the update rate of a bias in one step."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.top_k > self.experts:
            raise ValueError(
                f"`top_k` must be at most `experts` ({self.experts}), but is {self.top_k} instead\n"
                f"top_k = {self.experts}, or more experts"
            )
        return self


class RopeScaling(SpecModel):
    """Rotary positions scaled beyond the length a model was first trained at.

    Of kind "llama3": a pair of features that rotates fewer than `low` times within `original` positions is slowed by
    `factor`, one that rotates more than `high` times is unchanged, and in between the two are blended.
    """

    kind: Literal["llama3"] = "llama3"
    """How positions are scaled; there is one way so far."""
    factor: float = Field(gt=0, le=10**6)
    """How many times slower the slowest pairs rotate."""
    low: float = Field(default=1.0, gt=0, le=10**9)
    """Rotations within `original` positions below which a pair is slowed by the full factor."""
    high: float = Field(default=4.0, gt=0, le=10**9)
    """Rotations above which a pair is unchanged."""
    original: SequenceLength
    """Positions the model was first trained at."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.high <= self.low:
            raise ValueError(
                f"`high` must be above `low` ({self.low}), but is {self.high} instead\nhigh = {4 * self.low}"
            )
        return self


class Model(SpecModel):
    """The shape of a decoder transformer: all that `framework` needs to build it and `cost` to price it."""

    name: Label = "model"
    """Name of the model."""
    vocabulary: int = Field(ge=1, le=10**9)
    """Rows of the token embedding; token ids stay below it."""
    layers: int = Field(ge=1, le=MAX_LAYERS)
    """Transformer blocks."""
    width: Width
    """Width of the residual stream."""
    heads: HeadCount
    """Attention heads."""
    kv_heads: HeadCount | None = None
    """Key and value heads (grouped-query attention); `heads` if omitted."""
    head_width: Width | None = None
    """Width of one head; `width / heads` if omitted."""
    mlp_width: Width | None = None
    """Hidden width of the dense feed-forward network; `4 × width` if omitted."""
    sequence: SequenceLength = 2048
    """Longest supported sequence; sets the size of a learned position table."""
    norm: Literal["rms", "layer"] = "rms"
    """RMS norm, or layer norm with mean and bias."""
    norm_epsilon: float = Field(default=1e-5, gt=0, le=1)
    """Added to the variance before the square root."""
    position: Literal["rope", "learned"] = "rope"
    """Rotary positions, or a table of learned ones."""
    rope_theta: float = Field(default=10_000.0, gt=0, le=1e15)
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Rotary positions scaled beyond the length of the first training."""
    activation: Literal["swiglu", "gelu"] = "swiglu"
    """Of the feed-forward networks: gated (three matrices) or not (two)."""
    bias: bool = False
    """Biases on all projections of attention and of the dense feed-forward network."""
    qkv_bias: bool = False
    """Biases on the query, key and value projections alone."""
    qk_norm: bool = False
    """An RMS norm over every head of the queries and of the keys, before positions are applied."""
    tied: bool = False
    """Use the token embedding as the output layer too."""
    moe: Moe | None = None
    """Expert layers instead of dense feed-forward networks; without it, the model is dense."""
    source: str = ""
    """Source of the figures."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.heads % self.num_kv_heads:
            valid = closest_divisor(self.num_kv_heads, self.heads)
            raise ValueError(
                f"`kv_heads` must divide `heads` ({self.heads}), but is {self.kv_heads} instead\nkv_heads = {valid}"
            )
        if self.head_width is None and self.width % self.heads:
            valid = closest_multiple(self.width, self.heads)
            raise ValueError(
                f"`width` must be a multiple of `heads` ({self.heads}), but is {self.width} instead\n"
                f"width = {valid}, or set `head_width`"
            )
        if self.position == "rope" and self.head_dim % 2:
            raise ValueError(
                f"`head_width` must be even for rotary positions, but is {self.head_dim} instead\n"
                f"head_width = {self.head_dim + 1}"
            )
        if self.rope_scaling and self.position != "rope":
            raise ValueError(
                f'`position` must be "rope" for `rope_scaling` to have an effect, but is "{self.position}" instead\n'
                'position = "rope", or omit [model.rope_scaling]'
            )
        if self.bias and self.qkv_bias:
            raise ValueError(
                "`qkv_bias` must be false where `bias` gives every projection one, but is true instead\nomit `qkv_bias`"
            )
        if self.moe and self.moe.dense_layers > self.layers:
            raise ValueError(
                f"`moe.dense_layers` must be at most `layers` ({self.layers}), but is {self.moe.dense_layers} instead\n"
                f"dense_layers = {self.layers - 1}, or omit [model.moe]"
            )
        return self

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads, with the default filled in."""
        return self.kv_heads or self.heads

    @property
    def head_dim(self) -> int:
        """Width of one attention head, with the default filled in."""
        return self.head_width or self.width // self.heads

    @property
    def mlp_dim(self) -> int:
        """Hidden width of the dense feed-forward network, with the default filled in."""
        return self.mlp_width or 4 * self.width

    def is_moe_layer(self, layer: int) -> bool:
        """Whether layer number `layer` routes to experts."""
        return self.moe is not None and layer >= self.moe.dense_layers
