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
    bias: bool = False
    """Biases of the router and of every routed expert (gpt-oss)."""
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
    `factor`, one that rotates more than `high` times is unchanged, and in between the two are blended. Of kind
    "linear": all pairs are slowed by `factor`.
    """

    kind: Literal["llama3", "linear"] = "llama3"
    """How positions are scaled."""
    factor: float = Field(gt=0, le=10**6)
    """How many times slower the slowest pairs rotate."""
    low: float = Field(default=1.0, gt=0, le=10**9)
    """Rotations within `original` positions below which a pair is slowed by the full factor."""
    high: float = Field(default=4.0, gt=0, le=10**9)
    """Rotations above which a pair is unchanged."""
    original: SequenceLength = 1
    """Positions the model was first trained at; kind "linear" does not need them."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.kind == "linear" and (self.low, self.high, self.original) != (1.0, 4.0, 1):
            raise ValueError(
                '`low`, `high` and `original` have no effect with kind "linear"\nomit them, or kind = "llama3"'
            )
        if self.kind != "linear" and self.original == 1:
            raise ValueError(
                f'`original` must be given for kind "{self.kind}"\noriginal = the length of the first training'
            )
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
    local_rope_theta: float | None = Field(default=None, gt=0, le=1e15)
    """Base of the rotary frequencies of layers with a window, whose positions are then not scaled (Gemma 3)."""
    window: SequenceLength | None = None
    """Latest positions that attention sees, its own included (sliding window); all if omitted."""
    global_every: int | None = Field(default=None, ge=2, le=MAX_LAYERS)
    """The last of every so many layers sees all positions: 6 in Gemma 3, 2 in gpt-oss; if omitted, none does."""
    global_first: int = Field(default=0, ge=0, le=MAX_LAYERS)
    """The first layers that see all positions."""
    sinks: bool = False
    """A learned logit per head that takes part in the softmax of attention, and has no value (gpt-oss)."""
    score_softcap: float | None = Field(default=None, gt=0, le=10**6)
    """Attention scores are bounded by it, smoothly: cap · tanh(score / cap) (Gemma 2)."""
    logit_softcap: float | None = Field(default=None, gt=0, le=10**6)
    """The same for the logits over the vocabulary."""
    query_scalar: float | None = Field(default=None, gt=0, le=10**9)
    """Attention scores are divided by its square root; `head_width` if omitted."""
    zero_centered_norm: bool = False
    """RMS norms multiply by 1 + weight, and the weight starts at 0 (Gemma)."""
    post_norms: bool = False
    """Norms also after attention and after the feed-forward network, before they are added to the stream (Gemma)."""
    scaled_embedding: bool = False
    """Multiply token embeddings by √width (Gemma)."""
    activation: Literal["swiglu", "clamped_swiglu", "gelu", "geglu"] = "swiglu"
    """Of the feed-forward networks: gated (three matrices: "swiglu", "clamped_swiglu" of gpt-oss, "geglu" with GELU's
    tanh form) or not (two: "gelu")."""
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
        self._check_windows()
        if self.zero_centered_norm and self.norm != "rms":
            raise ValueError(
                f'`norm` must be "rms" for `zero_centered_norm`, but is "{self.norm}" instead\n'
                'norm = "rms", or omit `zero_centered_norm`'
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

    def _check_windows(self) -> None:
        """What says which layers have a window needs one, and has an effect."""
        given = {
            "global_every": self.global_every is not None,
            "global_first": self.global_first > 0,
            "local_rope_theta": self.local_rope_theta is not None,
        }
        if self.window is None and any(given.values()):
            name = next(name for name, has in given.items() if has)
            raise ValueError(f"`{name}` has no effect without `window`\nwindow = 1024, or omit `{name}`")
        if self.window is not None and all(self.layer_window(layer) is None for layer in range(self.layers)):
            raise ValueError(
                f"`global_first` ({self.global_first}) and `global_every` leave no layer with a window\nomit `window`"
            )
        if self.local_rope_theta is not None and self.position != "rope":
            raise ValueError(
                f'`position` must be "rope" for `local_rope_theta`, but is "{self.position}" instead\n'
                'position = "rope", or omit `local_rope_theta`'
            )

    def layer_window(self, layer: int) -> int | None:
        """Positions that layer number `layer` sees; None if all."""
        every = self.global_every
        is_global = layer < self.global_first or (every is not None and layer % every == every - 1)
        return None if is_global else self.window

    @property
    def mixes_windows(self) -> bool:
        """Whether some layers have a window and others have none."""
        return self.window is not None and bool(self.global_every or self.global_first)

    @property
    def materializes_scores(self) -> bool:
        """Whether attention is computed score by score in memory, because no fused kernel has sinks or a softcap."""
        return self.sinks or self.score_softcap is not None

    @property
    def gated(self) -> bool:
        """Whether feed-forward networks have a gate."""
        return self.activation != "gelu"

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
