"""Parameters and FLOPs of a model, counted from its shape.

The transformer that is counted, and that `framework` builds: q, k, v and o projections; a SwiGLU (three matrices)
or GELU (two) feed-forward network; a norm before each of the two and one before the head; a token table, a learned
position table of `sequence` rows if positions are learned, and a head that is the token table if `tied`. With `bias`
every projection of attention and of the dense feed-forward network has one, with `qkv_bias` those of queries, keys and
values; router, experts, shared experts and head never have. With `qk_norm` queries and keys have a norm of one head's
width each. The shared experts of a layer are one network of their joint width.
"""

from dataclasses import dataclass

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
    positions = model.sequence if model.position == "learned" else 0
    return (model.vocabulary + positions) * model.width


def flops_per_token(model: Model, length: int) -> float:
    """Training FLOPs per token in a sequence of `length` tokens, forward and backward.

    Model FLOPs: those of the mathematics, without recompute or masked scores. A multiply-add is two, the backward
    pass twice the forward one, so every active parameter outside the lookup tables counts 6; the head counts even if
    it is the token table. Scores and weighted sums of attention take 12 · layers · heads · head · length over
    full sequences; a causal model needs half of that.
    """
    multiplied = count_active_parameters(model) - count_embedding_parameters(model)
    if model.tied:
        multiplied += model.vocabulary * model.width
    return 6.0 * multiplied + 6.0 * model.layers * model.heads * model.head_dim * length


def count_layer_parameters(model: Model, layer: int) -> LayerParameters:
    """Count the parameters of layer number `layer`."""
    bias = model.bias or model.qkv_bias
    attention = _matrix(model.width, model.heads * model.head_dim, bias)  # q
    attention += 2 * _matrix(model.width, model.num_kv_heads * model.head_dim, bias)  # k, v
    attention += _matrix(model.heads * model.head_dim, model.width, model.bias)  # o
    norms = 2 * _norm(model) + (2 * model.head_dim if model.qk_norm else 0)
    moe = model.moe
    if moe is None or not model.is_moe_layer(layer):
        mlp = _mlp(model, model.mlp_dim, model.bias)
        return LayerParameters(attention, norms, mlp, router=0, expert=0, experts=0, top_k=0)
    shared = _mlp(model, moe.shared * moe.width, bias=False) if moe.shared else 0
    router, expert = moe.experts * model.width, _mlp(model, moe.width, bias=False)
    return LayerParameters(attention, norms, shared, router, expert, moe.experts, moe.top_k)


def _layers(model: Model) -> list[tuple[int, LayerParameters]]:
    """The kinds of layers a model has, each with how many there are."""
    dense = model.moe.dense_layers if model.moe else model.layers
    kinds = [(dense, 0), (model.layers - dense, model.layers - 1)]
    return [(count, count_layer_parameters(model, layer)) for count, layer in kinds if count]


def _outside_layers(model: Model) -> int:
    head = 0 if model.tied else model.vocabulary * model.width
    return count_embedding_parameters(model) + _norm(model) + head


def _matrix(inputs: int, outputs: int, bias: bool) -> int:
    return inputs * outputs + (outputs if bias else 0)


def _mlp(model: Model, hidden: int, bias: bool) -> int:
    into = 2 if model.activation == "swiglu" else 1
    return into * _matrix(model.width, hidden, bias) + _matrix(hidden, model.width, bias)


def _norm(model: Model) -> int:
    return model.width if model.norm == "rms" else 2 * model.width
