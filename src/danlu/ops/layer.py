"""One layer of a transformer, with experts or without: the sum over its families of operators."""

from danlu.ops import attention, experts, mlp, norm
from danlu.ops.layer_shard import LayerShard, Matmul
from danlu.ops.recompute import Saving


def matmuls(shard: LayerShard, moe: bool) -> tuple[Matmul, ...]:
    """Of the forward pass, without those inside attention and those of routed experts."""
    router = (experts.router_matmul(shard),) if moe else ()
    return *attention.matmuls(shard), *router, *mlp.matmuls(shard, moe)


def expert_matmuls(shard: LayerShard, moe: bool) -> tuple[Matmul, ...]:
    """Of the routed experts, if there are any."""
    return experts.matmuls(shard) if moe else ()


def last_matmul(shard: LayerShard, moe: bool) -> Matmul | None:
    """The matmul that ends a dense layer, whose result no gradient needs; experts' results are weighted, so needed."""
    return None if moe else mlp.matmuls(shard, moe)[-1]


def moved_bytes(
    shard: LayerShard, moe: bool, traffic: float, dispatch: float, fused_activation: bool
) -> tuple[float, float]:
    """Bytes through memory outside matmuls and attention, forward and backward, in half precision.

    `traffic` is how often software moves what kernels fused at best would move once, `dispatch` the bytes moved per
    routed token and feature; both are fitted. `fused_activation` runs in the kernels of the experts.
    """
    hidden, routed = 2.0 * mlp.hidden_elements(shard, moe), 0.0
    if moe:
        hidden += 0.0 if fused_activation else 2.0 * shard.routed_rows * shard.model.expert_width
        routed = dispatch * shard.routed_rows * shard.model.width
    norms, rotation = norm.moved_bytes(shard), attention.moved_bytes(shard)
    activation = mlp.activation_bytes_moved(shard.model, hidden)
    forward, backward = (norms[i] + rotation[i] + activation[i] for i in (0, 1))
    return traffic * forward + routed, traffic * backward + 1.5 * routed


def eager_moved_bytes(shard: LayerShard, moe: bool, element_bytes: int, dispatch: float) -> tuple[float, float]:
    """Bytes through memory outside matmuls and attention, forward and backward, where every operator is its own kernel.

    Counted over the operators that PyTorch runs for the decoder without a compiler: each reads its inputs and writes
    its result. `dispatch` is what routed tokens move in half precision, as in `moved_bytes`.
    """
    shape = shard.model
    hidden, routed = mlp.hidden_elements(shard, moe), 0.0
    # Queries, keys and values, or the two latents; gate and up.
    summed = (1 if shape.mla else 2) + (shape.num_up_projections - 1) * (hidden > 0)
    if moe:
        hidden += shard.routed_rows * shape.expert_width
        routed = dispatch * shard.routed_rows * shape.width * element_bytes / 2
    norms = norm.eager_moved_bytes(shard, element_bytes, summed)
    rotation = attention.eager_moved_bytes(shard, element_bytes)
    activation = mlp.eager_activation_bytes_moved(shape, element_bytes * hidden)
    forward, backward = (norms[i] + rotation[i] + activation[i] for i in (0, 1))
    return forward + routed, backward + 1.5 * routed


def saved_bytes(shard: LayerShard, saving: Saving, moe: bool) -> float:
    """Bytes that a layer saves per microbatch for its backward pass.

    Korthikanti et al. (2022), equations 1 to 6, extended to gated and grouped-query layers and to experts.
    """
    if saving.mode == "full":
        return saving.element_bytes * shard.stream
    if saving.mode == "alternate":
        return _saved_by_alternate(shard, saving, moe)
    if saving.mode == "elementwise" and saving.by_operator:
        return _saved_by_operator(shard, saving, moe)
    kept = norm.saved_bytes(shard, saving)
    kept += attention.saved_bytes(shard, saving)
    kept += mlp.hidden_elements(shard, moe) * mlp.copies_saved(shard.model, saving)
    return kept + (experts.saved_bytes(shard, saving) if moe else 0.0)


def _saved_by_alternate(shard: LayerShard, saving: Saving, moe: bool) -> float:
    """Input and output of attention, and the first, third, fifth and seventh of seven matmuls (torchtitan)."""
    shape = shard.model
    hidden = mlp.hidden_elements(shard, moe)
    if moe:
        hidden += shard.routed_rows * (shape.expert_width + 2 * shape.width)
    return saving.element_bytes * (attention.alternate_saved_elements(shard) + hidden + 2.0 * shard.stream)


def _saved_by_operator(shard: LayerShard, saving: Saving, moe: bool) -> float:
    """What a plan's "selective" saves: a block's input, outputs of matmuls, attention and MLP.

    The output of a row-parallel matmul is saved before and after its reduction; experts are a separate region, so that
    the norm before them and the copies of routed tokens, dispatched and combined, are saved too.
    """
    shape, each = shard.model, float(saving.element_bytes)
    summed = each * (shard.tokens * shape.width + (shard.stream if shard.tp > 1 else 0.0))
    exchanged = 2 if shard.cp > 1 and not shard.ring else 1
    results = saving._replace(matmul_bytes=each)  # as operators return them, before any cast to fp8
    kept = each * shard.stream + summed + exchanged * attention.saved_bytes(shard, results)
    hidden = mlp.hidden_elements(shard, moe)
    kept += each * shape.num_up_projections * hidden + (summed if hidden else 0.0)
    if not moe:
        return kept
    features = 4.0 * shape.width + shape.num_up_projections * shape.expert_width
    return kept + each * (3.0 * shard.stream + shard.routed_rows * features)


def gradient_elements(shard: LayerShard, moe: bool) -> float:
    """Elements of activation gradients while the backward pass is in the feed-forward network.

    Of the hidden features before and after the activation, and of its input and output.
    """
    hidden = mlp.hidden_elements(shard, moe)
    if moe:
        hidden += shard.routed_rows * shard.model.expert_width
    return (shard.model.num_up_projections + 1) * hidden + 2.0 * shard.stream


def score_gradient_bytes(shard: LayerShard) -> float:
    """Bytes of fp32 scores while they are computed, or of their gradients, where they are in memory: two at once."""
    return 8.0 * attention.score_count(shard) if shard.model.by_scores else 0.0


def deferred_gradient_elements(shard: LayerShard, moe: bool) -> float:
    """Elements of gradients of matmul outputs, kept if the gradients of weights are computed later."""
    shape, tokens = shard.model, shard.tokens
    hidden = mlp.hidden_width(shape, moe)
    rows = tokens * shape.top_k * shard.expert_imbalance if moe else 0.0
    split: float = tokens * ((shape.heads + 2 * shape.kv_heads) * shape.head_dim + shape.num_up_projections * hidden)
    split += rows * (shape.num_up_projections * shape.expert_width + shape.width) + 4.0 * tokens * shape.width
    return split / shard.tp + 2.0 * tokens * shape.width
