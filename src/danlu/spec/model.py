"""A decoder transformer described by its shape: GPT, Llama, mixture-of-experts and latent-attention models."""

import math
from typing import Annotated, Any, Literal, Self

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


class MLAConfig(SpecModel):
    """Multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", 2024): LoRA ranks and head dimensions.

    Keys and values of all heads are projections of one latent vector per position, and queries of another; positions
    rotate `qk_rope_head_dim` features of every query, and as many of one key that all heads share.
    """

    q_lora_rank: Width | None = None
    """Width of the latent vector of the queries; if omitted, queries are projected directly (DeepSeek-V2-Lite)."""
    kv_lora_rank: Width
    """Width of the latent vector of keys and values: with the shared rotated key, all that a cache keeps."""
    qk_rope_head_dim: Width
    """Features of a query and of the shared key that are rotated."""
    qk_nope_head_dim: Width
    """Features of one head's query and key without positions."""
    v_head_dim: Width
    """Features of one head's value."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.qk_rope_head_dim % 2:
            raise ValueError(
                f"`qk_rope_head_dim` must be even for rotary positions, but is {self.qk_rope_head_dim} instead\n"
                f"qk_rope_head_dim = {self.qk_rope_head_dim + 1}"
            )
        return self

    @property
    def qk_head_dim(self) -> int:
        """Width of one head's query and key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


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
    routed_scaling_factor: float = Field(default=1.0, gt=0, le=10**6)
    """What the chosen experts' weights are multiplied by in the end (DeepSeek-V3: 2.5)."""
    n_group: int = Field(default=1, ge=1, le=MAX_EXPERTS)
    """Groups of consecutive experts, of which a token chooses some before it chooses experts in them."""
    topk_group: int = Field(default=1, ge=1, le=MAX_EXPERTS)
    """Groups that a token chooses: those whose two best experts have the highest sum."""
    bias: bool = False
    """Biases of the router and of every routed expert (gpt-oss)."""
    balance: Literal["loss", "bias", "exact", "none"] = "loss"
    """Load balancing: an auxiliary loss over each sequence; a bias per expert, updated by its load; or none.

    `exact`: in training every expert gets the same number of tokens of each sequence, with as little score given up as
    possible; in evaluation and generation a token chooses freely.
    """
    balance_rate: float = Field(default=0.01, ge=0, le=1000)
    """Weight of the auxiliary loss, or the update rate of a bias in one step."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.top_k > self.experts:
            raise ValueError(
                f"`top_k` must be at most `experts` ({self.experts}), but is {self.top_k} instead\n"
                f"top_k = {self.experts}, or more experts"
            )
        if self.experts % self.n_group:
            valid = closest_divisor(self.n_group, self.experts)
            raise ValueError(
                f"`n_group` must divide `experts` ({self.experts}), but is {self.n_group} instead\nn_group = {valid}"
            )
        if self.balance == "exact" and self.topk_group < self.n_group:
            raise ValueError(
                "`balance` must not be exact if a token may choose among some groups of experts alone, but "
                f'`topk_group` is {self.topk_group} of {self.n_group}\nn_group = 1, or balance = "bias"'
            )
        if self.topk_group > self.n_group:
            raise ValueError(
                f"`topk_group` must be at most `n_group` ({self.n_group}), but is {self.topk_group} instead\n"
                f"topk_group = {self.n_group}"
            )
        reachable = self.topk_group * (self.experts // self.n_group)
        if self.top_k > reachable:
            raise ValueError(
                f"`top_k` must be at most the {reachable} experts in `topk_group` ({self.topk_group}) of `n_group` "
                f"({self.n_group}) groups, but is {self.top_k} instead\ntop_k = {reachable}, or more groups"
            )
        if self.n_group > 1 and self.experts // self.n_group < 2:
            raise ValueError(
                f"`n_group` must leave two experts to a group, whose scores choose it, but is {self.n_group} of "
                f"{self.experts} experts instead\nn_group = {closest_divisor(max(1, self.experts // 2), self.experts)}"
            )
        return self


class Mtp(SpecModel):
    """Multi-token prediction: modules after the last layer that predict tokens further ahead (DeepSeek-V3, 2.2).

    They train with the model and share its embedding and its output matrix; evaluation and sampling do not run them.
    """

    depth: int = Field(default=1, ge=1, le=64)
    """Tokens predicted beyond the next one, each by a module with one layer: `num_nextn_predict_layers` of a Hugging
    Face folder, `mtp_num_layers` of Megatron."""
    weight: float = Field(default=0.1, gt=0, le=1000)
    """Weight of their mean loss beside the loss of the next token: `mtp_loss_scaling_factor` of Megatron."""


class RopeScaling(SpecModel):
    """Rotary positions scaled beyond the length a model was first trained at.

    A pair of features that rotates fewer than `low` times within `original` positions is slowed by `factor`, one that
    rotates more than `high` times is unchanged, and in between the two are blended: linearly in the number of
    rotations with kind "llama3", in the number of the pair with kind "yarn" (Peng et al., "YaRN", 2023), which also
    sharpens attention by a factor that grows with the logarithm of `factor`. Of kind "linear": all pairs are slowed by
    `factor`.
    """

    kind: Literal["llama3", "linear", "yarn"] = "llama3"
    """How positions are scaled."""
    factor: float = Field(gt=0, le=10**6)
    """How many times slower the slowest pairs rotate."""
    low: float = Field(default=1.0, gt=0, le=10**9)
    """Rotations within `original` positions below which a pair is slowed by the full factor (YaRN's `beta_slow`)."""
    high: float = Field(default=4.0, gt=0, le=10**9)
    """Rotations above which a pair is unchanged (YaRN's `beta_fast`); if omitted, 4 for "llama3" and 32 for "yarn"."""
    original: SequenceLength = 1
    """Positions the model was first trained at; kind "linear" does not need them."""
    attention_factor: float | None = Field(default=None, gt=0, le=10**6)
    """Of "yarn": multiplies rotated queries and keys; if omitted, it follows from `factor` and the two `mscale`."""
    mscale: float | None = Field(default=None, gt=0, le=10**6)
    """Of "yarn": weight of the logarithm of `factor` in the factor of rotated queries and keys."""
    mscale_all_dim: float | None = Field(default=None, gt=0, le=10**6)
    """Of "yarn": the same in what that factor is divided by; latent attention multiplies its scores by its square."""
    truncate: bool = True
    """Of "yarn": blend from a whole pair to a whole pair."""

    @model_validator(mode="before")
    @classmethod
    def _fill_high(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("kind") == "yarn":
            return {"high": 32.0} | values
        return values

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
        if self.kind != "yarn":
            yarn = {"attention_factor": None, "mscale": None, "mscale_all_dim": None, "truncate": True}
            for field, default in yarn.items():
                if getattr(self, field) is not default:
                    raise ValueError(
                        f'`{field}` has an effect for kind "yarn" only, but the kind is "{self.kind}" instead\n'
                        f'omit `{field}`, or kind = "yarn"'
                    )
        elif (self.mscale is None) != (self.mscale_all_dim is None):
            raise ValueError("`mscale` and `mscale_all_dim` must be given together or not at all\ngive both, or none")
        return self

    @property
    def rotary_factor(self) -> float:
        """What rotated queries and keys are multiplied by."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._sharpness(self.mscale) / self._sharpness(self.mscale_all_dim)
        return self._sharpness(1.0)

    @property
    def score_factor(self) -> float:
        """What latent attention multiplies its scores by, beside `rotary_factor`: features without positions too."""
        return self._sharpness(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _sharpness(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


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
    mla: MLAConfig | None = None
    """Multi-head latent attention; without it, attention is grouped-query."""
    tied: bool = False
    """Use the token embedding as the output layer too."""
    moe: Moe | None = None
    """Expert layers instead of dense feed-forward networks; without it, the model is dense."""
    mtp: Mtp | None = None
    """Multi-token prediction; without it, only the next token is predicted."""
    source: str = ""
    """Source of the figures."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        self._check_mla()
        if self.heads % self.num_kv_heads:
            valid = closest_divisor(self.num_kv_heads, self.heads)
            raise ValueError(
                f"`kv_heads` must divide `heads` ({self.heads}), but is {self.kv_heads} instead\nkv_heads = {valid}"
            )
        if self.head_width is None and self.mla is None and self.width % self.heads:
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
        if self.rope_scaling and self.rope_scaling.kind == "yarn" and self.rope_theta <= 1:
            raise ValueError(
                f'`rope_theta` must be above 1 for positions of kind "yarn", but is {self.rope_theta} instead\n'
                "rope_theta = 10000.0"
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

    def _check_mla(self) -> None:
        """Settings of grouped-query attention have no effect on latent attention."""
        if self.mla is None:
            return
        for field in ("kv_heads", "head_width", "window", "score_softcap", "query_scalar"):
            if (value := getattr(self, field)) is not None:
                why = "which has its own" if field in ("kv_heads", "head_width") else "which has none"
                raise ValueError(
                    f"`{field}` must be omitted for latent attention, {why}, but is {value} instead\n"
                    f"omit `{field}`, or [model.mla]"
                )
        for field in ("bias", "qkv_bias", "qk_norm", "sinks", "zero_centered_norm"):
            if getattr(self, field):
                raise ValueError(
                    f"`{field}` must be false for latent attention, but is true instead\nomit `{field}`, or [model.mla]"
                )
        if self.position != "rope":
            raise ValueError(
                f'`position` must be "rope" for latent attention, but is "{self.position}" instead\n'
                'position = "rope", or omit [model.mla]'
            )

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads, with the default filled in."""
        return self.kv_heads or self.heads

    @property
    def head_dim(self) -> int:
        """Width of one head's query and key, with the default filled in."""
        if self.mla is not None:
            return self.mla.qk_head_dim
        return self.head_width or self.width // self.heads

    @property
    def v_head_dim(self) -> int:
        """Width of one head's value."""
        return self.head_dim if self.mla is None else self.mla.v_head_dim

    @property
    def mlp_dim(self) -> int:
        """Hidden width of the dense feed-forward network, with the default filled in."""
        return self.mlp_width or 4 * self.width

    @property
    def mtp_depth(self) -> int:
        """Modules of multi-token prediction; 0 without it."""
        return self.mtp.depth if self.mtp else 0

    def is_moe_layer(self, layer: int) -> bool:
        """Whether layer number `layer` routes to experts."""
        return self.moe is not None and layer >= self.moe.dense_layers
