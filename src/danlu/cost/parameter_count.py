"""Parameters and FLOPs of a model, counted from its shape.

The transformer that is counted, and that `framework` builds: q, k, v and o projections; a SwiGLU (three matrices)
or GELU (two) feed-forward network; a norm before each of the two and one before the head; a token table, a learned
position table of `sequence` rows if positions are learned, and a head that is the token table if `tied`. With `bias`
every projection of attention and of the dense feed-forward network has one, with `qkv_bias` those of queries, keys and
values, with `moe.bias` router and experts; shared experts and head never have. With `qk_norm` queries and keys have a
norm of one head's width each; the latents of MLA have one each. With `post_norms` attention and feed-forward network
have a norm after them too; with `sinks` every head has a number. The shared experts of a layer are one network of their
joint width.
"""

from dataclasses import dataclass

from danlu.ops import attention, embedding_head, experts, mlp, norm
from danlu.ops.model_shape import model_shape
from danlu.spec.model import Model


@dataclass(frozen=True)
class LayerParameters:
    """Parameters of one layer by module."""

    attention: int
    norms: int
    mlp: int
    """The dense feed-forward network, or the shared experts of an expert layer: used by every token."""
    router: int
    expert: int
    """Of one routed expert; 0 in a dense layer."""
    experts: int
    """Routed experts of the layer."""
    top_k: int
    """Routed experts per token."""

    @property
    def dense(self) -> int:
        """All but the routed experts."""
        return self.attention + self.norms + self.mlp + self.router

    @property
    def total(self) -> int:
        """All parameters of the layer."""
        return self.dense + self.experts * self.expert

    @property
    def active(self) -> int:
        """Parameters that one token uses."""
        return self.dense + self.top_k * self.expert


def count_parameters(model: Model) -> int:
    """Count all parameters of a model."""
    return _outside_layers(model) + sum(count * layer.total for count, layer in _layers(model))


def count_active_parameters(model: Model) -> int:
    """Count the parameters that one token uses: of the routed experts the chosen ones, and both token tables."""
    return _outside_layers(model) + sum(count * layer.active for count, layer in _layers(model))


def count_embedding_parameters(model: Model) -> int:
    """Count the parameters of the lookup tables: tokens, and learned positions."""
    shape = model_shape(model)
    return embedding_head.table_parameters(shape) + embedding_head.position_parameters(shape)


def flops_per_token(model: Model, length: int) -> float:
    """Training FLOPs per token in a sequence of `length` tokens, forward and backward.

    Model FLOPs: those of the mathematics, without recompute or masked scores. A multiply-add is two, the backward
    pass twice the forward one, so every active parameter outside the lookup tables counts 6; the head counts even if
    it is the token table. Scores and weighted sums of attention take 12 · layers · heads · head · length over
    full sequences; a causal model needs half of that, and a layer with a window only the pairs in it. `head` is the
    mean width of a head's key and value.
    """
    multiplied = count_active_parameters(model) - count_embedding_parameters(model)
    if model.tied:
        multiplied += embedding_head.table_parameters(model_shape(model))
    head = (model.head_dim + model.v_head_dim) / 2
    return 6.0 * multiplied + 6.0 * model.heads * head * _seen_positions(model, length)


def _seen_positions(model: Model, length: int) -> float:
    """Positions that a token sees over all layers, twice the mean: half of the sequence, or less with a window."""
    if model.window is None:
        return float(model.layers * length)
    windows = (min(model.layer_window(layer) or length, length) for layer in range(model.layers))
    return sum(2.0 * window - window**2 / length for window in windows)


def count_layer_parameters(model: Model, layer: int) -> LayerParameters:
    """Count the parameters of layer number `layer`."""
    shape, moe = model_shape(model), model.moe
    held = attention.parameters(shape, qkv_bias=model.bias or model.qkv_bias, out_bias=model.bias)
    held += model.heads if model.sinks else 0
    norms = (4 if model.post_norms else 2) * _norm(model) + (2 * model.head_dim if model.qk_norm else 0)
    if model.mla:
        norms += (model.mla.q_lora_rank or 0) + model.mla.kv_lora_rank
    if moe is None or not model.is_moe_layer(layer):
        dense = mlp.parameters(shape, model.mlp_dim, bias=model.bias)
        return LayerParameters(held, norms, dense, router=0, expert=0, experts=0, top_k=0)
    shared = mlp.parameters(shape, shape.shared_width)
    router, expert = experts.router_parameters(shape), experts.expert_parameters(shape)
    if moe.bias:
        router += moe.experts
        expert += shape.num_up_projections * moe.width + model.width
    return LayerParameters(held, norms, shared, router, expert, moe.experts, moe.top_k)


def _layers(model: Model) -> list[tuple[int, LayerParameters]]:
    """The kinds of layers a model has, each with how many there are."""
    dense = model.moe.dense_layers if model.moe else model.layers
    kinds = [(dense, 0), (model.layers - dense, model.layers - 1)]
    return [(count, count_layer_parameters(model, layer)) for count, layer in kinds if count]


def _outside_layers(model: Model) -> int:
    head = 0 if model.tied else embedding_head.table_parameters(model_shape(model))
    return count_embedding_parameters(model) + _norm(model) + head


def _norm(model: Model) -> int:
    return norm.parameters(model.width, bias=model.norm != "rms")
