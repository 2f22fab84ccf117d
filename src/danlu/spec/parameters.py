"""Names and shapes of the parameters of a described model, without building it; how an optimizer moves each."""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import NamedTuple

from danlu.spec.model import MLAConfig, Model
from danlu.spec.recipe import OptimizerConfig, OptimizerGroup, OptimizerKind


class ParameterShape(NamedTuple):
    """One parameter."""

    name: str
    shape: tuple[int, ...]


class ParameterSettings(NamedTuple):
    """How one parameter is moved."""

    kind: OptimizerKind
    learning_rate_factor: float
    weight_decay: float


def parameter_settings(name: str, dims: int, matrix: bool, config: OptimizerConfig) -> ParameterSettings:
    """How a parameter is moved; `matrix` says that it is one of those that Muon is for."""
    kind: OptimizerKind = "muon" if config.kind == "muon" and matrix else "adamw"
    one_row_each = ".experts." in name and name.endswith("_bias")
    decay = config.weight_decay if dims > 1 and not one_row_each else 0.0
    group = group_of(name, config)
    if group is None:
        return ParameterSettings(kind, 1.0, decay)
    own = decay if group.weight_decay is None else group.weight_decay
    return ParameterSettings(group.kind or kind, group.learning_rate_factor, own)


def group_of(name: str, config: OptimizerConfig) -> OptimizerGroup | None:
    """The group of a parameter: the last one that matches its name."""
    return next((group for group in reversed(config.groups) if fnmatchcase(name, group.match)), None)


def decoder_parameters(model: Model) -> Iterator[ParameterShape]:
    """Every parameter of the decoder, in the order of its modules; a tied head is its embedding."""
    width = model.width
    yield ParameterShape("embed.token.weight", (model.vocabulary, width))
    if model.position == "learned":
        yield ParameterShape("embed.position.weight", (model.sequence, width))
    for layer in range(model.layers):
        for name, shape in layer_parameters(model, model.is_moe_layer(layer)):
            yield ParameterShape(f"blocks.{layer}.{name}", shape)
    yield from _norm("head.norm", model)
    if not model.tied:
        yield ParameterShape("head.score.weight", (model.vocabulary, width))


def layer_parameters(model: Model, moe: bool) -> Iterator[ParameterShape]:
    """The parameters of one layer, with experts or without, named from the layer on."""
    width = model.width
    yield from _norm("attention_norm", model)
    yield from _attention(model) if model.mla is None else _latent_attention(model, model.mla)
    yield from _norm("mlp_norm", model)
    if model.post_norms:
        yield from _norm("attention_post_norm", model)
        yield from _norm("mlp_post_norm", model)
    if not moe:
        yield from _mlp("mlp", model, model.mlp_dim, model.bias)
        return
    assert model.moe is not None
    experts, hidden = model.moe.experts, model.moe.width
    yield from _linear("mlp.router.gate", experts, width, model.moe.bias)
    ups = ("gate", "up") if model.gated else ("up",)
    for name in ups:
        yield ParameterShape(f"mlp.experts.{name}", (experts, width, hidden))
    yield ParameterShape("mlp.experts.down", (experts, hidden, width))
    if model.moe.bias:
        for name in ups:
            yield ParameterShape(f"mlp.experts.{name}_bias", (experts, hidden))
        yield ParameterShape("mlp.experts.down_bias", (experts, width))
    if model.moe.shared:
        yield from _mlp("mlp.shared", model, model.moe.shared * hidden, bias=False)


def _attention(model: Model) -> Iterator[ParameterShape]:
    head = model.head_dim
    for name, heads in (("q", model.heads), ("k", model.num_kv_heads), ("v", model.num_kv_heads)):
        yield from _linear(f"attention.{name}", heads * head, model.width, model.bias or model.qkv_bias)
    if model.qk_norm:
        yield ParameterShape("attention.q_norm.weight", (head,))
        yield ParameterShape("attention.k_norm.weight", (head,))
    yield from _linear("attention.o", model.width, model.heads * head, model.bias)
    if model.sinks:
        yield ParameterShape("attention.sinks.weight", (model.heads,))


def _latent_attention(model: Model, mla: MLAConfig) -> Iterator[ParameterShape]:
    width, heads = model.width, model.heads
    if mla.q_lora_rank:
        yield from _linear("attention.q_a", mla.q_lora_rank, width, bias=False)
        yield ParameterShape("attention.q_a_norm.weight", (mla.q_lora_rank,))
        yield from _linear("attention.q_b", heads * mla.qk_head_dim, mla.q_lora_rank, bias=False)
    else:
        yield from _linear("attention.q", heads * mla.qk_head_dim, width, bias=False)
    yield from _linear("attention.kv_a", mla.kv_lora_rank + mla.qk_rope_head_dim, width, bias=False)
    yield ParameterShape("attention.kv_a_norm.weight", (mla.kv_lora_rank,))
    yield from _linear("attention.kv_b", heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank, bias=False)
    yield from _linear("attention.o", width, heads * mla.v_head_dim, bias=False)


def is_hidden_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a parameter of the decoder is one of those that Muon is for: a layer's matrices, but not a router's."""
    kept = ".router." in name or name.endswith("_bias")  # a row of biases per expert
    return name.startswith("blocks.") and len(shape) > 1 and not kept


def _norm(name: str, model: Model) -> Iterator[ParameterShape]:
    yield ParameterShape(f"{name}.weight", (model.width,))
    if model.norm != "rms":
        yield ParameterShape(f"{name}.bias", (model.width,))


def _linear(name: str, outputs: int, inputs: int, bias: bool) -> Iterator[ParameterShape]:
    yield ParameterShape(f"{name}.weight", (outputs, inputs))
    if bias:
        yield ParameterShape(f"{name}.bias", (outputs,))


def _mlp(name: str, model: Model, hidden: int, bias: bool) -> Iterator[ParameterShape]:
    for up in ("gate", "up") if model.gated else ("up",):
        yield from _linear(f"{name}.{up}", hidden, model.width, bias)
    yield from _linear(f"{name}.down", model.width, hidden, bias)
