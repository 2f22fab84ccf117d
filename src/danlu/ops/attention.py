"""Attention: projections, rotary positions, scores and weighted sums; grouped-query or latent."""

from danlu.ops.layer_shard import LayerShard, Matmul
from danlu.ops.model_shape import ModelShape
from danlu.ops.recompute import Saving

FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5
"""Matrix products inside attention: scores and weighted sum; in the backward pass scores again, and four."""
BACKWARD_TO_FORWARD = BACKWARD_PRODUCTS / FORWARD_PRODUCTS


def parameters(shape: ModelShape, *, qkv_bias: bool = False, out_bias: bool = False) -> int:
    """Of one layer's projections, without norms."""
    low = shape.mla
    if low is None:
        into = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        weights = shape.width * into + shape.heads * shape.head_dim * shape.width
        return weights + (into if qkv_bias else 0) + (shape.width if out_bias else 0)
    query_width = low.q_lora_rank or shape.width
    up = shape.heads * (query_width * shape.head_dim + low.kv_lora_rank * (low.qk_nope_head_dim + low.v_head_dim))
    return replicated_parameters(shape) + up + shape.heads * low.v_head_dim * shape.width


def replicated_parameters(shape: ModelShape) -> int:
    """Of these, what tensor parallelism does not shard: the down-projections to MLA's latents."""
    low = shape.mla
    return shape.width * ((low.q_lora_rank or 0) + low.kv_lora_rank + low.qk_rope_head_dim) if low else 0


def input_width(shape: ModelShape) -> int:
    """Features per position of what tensor parallelism gathers: hidden states, or MLA's latents and shared key."""
    low = shape.mla
    return (low.q_lora_rank or shape.width) + low.kv_lora_rank + low.qk_rope_head_dim if low else shape.width


def matmuls(shard: LayerShard) -> tuple[Matmul, ...]:
    """The projections, forward."""
    shape, tokens, tp = shard.model, shard.tokens, shard.tp
    low = shape.mla
    if low is None:
        columns = (shape.heads + 2 * max(shape.kv_heads, tp)) * shape.head_dim // tp
        return Matmul(tokens, columns, shape.width), Matmul(tokens, shape.width, shape.heads * shape.head_dim // tp)
    held = tokens // tp if shard.sequence_parallel else tokens
    return (
        *((Matmul(held, low.q_lora_rank, shape.width),) if low.q_lora_rank else ()),
        Matmul(held, low.kv_lora_rank + low.qk_rope_head_dim, shape.width),
        Matmul(tokens, shape.heads * shape.head_dim // tp, low.q_lora_rank or shape.width),
        Matmul(tokens, shape.heads * (low.qk_nope_head_dim + low.v_head_dim) // tp, low.kv_lora_rank),
        Matmul(tokens, shape.width, shape.heads * low.v_head_dim // tp),
    )


def latent_matmuls(shard: LayerShard) -> tuple[Matmul, ...]:
    """MLA's up-projections, which `latent` recompute runs again."""
    return matmuls(shard)[-3:-1] if shard.model.mla else ()


def core_flops(
    batch: float, pairs: float, head_dim: float, v_head_dim: float, products: int = FORWARD_PRODUCTS
) -> float:
    """FLOPs inside attention, for `batch` sequences times heads and `pairs` of a query and a key it may see.

    Half the products have the width of a key, half that of a value; backward one more has that of a key.
    """
    widths = (products + 1) // 2 * head_dim + products // 2 * v_head_dim
    return 2.0 * batch * pairs * widths


def computed_pairs(shard: LayerShard, *, local: bool, documents: bool) -> float:
    """Pairs of positions of a sequence that a rank computes in a layer, `local` if it has a window.

    All of them where scores are in memory. Where documents end is not known beforehand: none ends, which no batch
    exceeds. A ring masks them block by block, of which it computes whole those of a rank's own positions.
    """
    length, window = shard.length, shard.model.window if local else 0
    if shard.model.by_scores:
        return length**2 / shard.cp
    if shard.ring and documents:
        return 0.5 * (1 + 1 / shard.cp) * length**2 / shard.cp
    return (causal_pairs(length, length, window) if 0 < window < length else length**2 / 2) / shard.cp


def mask_bytes(shard: LayerShard, element_bytes: int, *, documents: bool) -> float:
    """Bytes of the masks of scores in memory, over full sequences even with `cp`.

    One serves all layers with a window and one all others; without documents it also serves all sequences.
    """
    if not shard.model.by_scores:
        return 0.0
    windowed = 0 < shard.model.window < shard.length
    masks = windowed + (not (windowed and shard.model.all_local))
    return float(element_bytes) * masks * (shard.sequences if documents else 1) * shard.length**2


def causal_pairs(queries: int, keys: int, window: int = 0) -> int:
    """Pairs that a causal mask leaves, and a window if there is one: what the math needs."""
    if queries != keys:
        return queries * keys
    if 0 < window < keys:
        return window * (window + 1) // 2 + (queries - window) * window
    return queries * (queries + 1) // 2


def score_count(shard: LayerShard) -> float:
    """Scores of one layer that a rank computes, where they are in memory."""
    return shard.sequences * shard.model.heads / (shard.tp * shard.cp) * float(shard.length) ** 2


def score_bytes_saved(shard: LayerShard, saving: Saving) -> float:
    """Bytes of scores that a layer keeps: fp32 shares, their cast below fp32, and what a softcap returned."""
    each = saving.element_bytes
    if saving.mode == "elementwise":  # the results of matrix products alone
        return each * score_count(shard)
    return (4.0 + (each if each < 4 else 0) + (4.0 if shard.model.capped else 0.0)) * score_count(shard)


def score_bytes_moved(shard: LayerShard, element_bytes: int) -> tuple[float, float]:
    """Bytes through memory per score, forward and backward, each operator reading and writing fp32.

    Forward: scale, mask, sinks beside them and softmax; three more with a softcap; casts below fp32.
    """
    operators = 4 + (3 if shard.model.capped else 0)
    casts = 2.0 * (element_bytes + 4) if element_bytes < 4 else 0.0
    return 8.0 * operators + casts, 12.0 * operators + casts


def ulysses_elements(shard: LayerShard) -> tuple[int, int]:
    """Elements exchanged between heads and positions by context parallelism: queries, keys and values; the output.

    With fewer groups of keys than ranks, groups are repeated.
    """
    shape, tokens = shard.model, shard.tokens
    heads, groups = shape.heads // shard.tp, max(shape.kv_heads // shard.tp, shard.cp)
    inwards = tokens * (heads * shape.head_dim + groups * (shape.head_dim + shape.v_head_dim))
    return inwards, tokens * heads * shape.v_head_dim


def key_value_elements(shard: LayerShard) -> int:
    """Elements of the keys and values that a rank passes on around a ring, in every turn but the last."""
    shape = shard.model
    return shard.tokens * max(1, shape.kv_heads // shard.tp) * (shape.head_dim + shape.v_head_dim)


def moved_bytes(shard: LayerShard) -> tuple[float, float]:
    """Bytes through memory, forward and backward: rotation or bias over queries, keys and values in half precision."""
    shape = shard.model
    projected = 2.0 * shard.tokens * (shape.heads * shape.head_dim + 2 * shape.kv_heads * shape.head_dim) / shard.tp
    return 2.0 * projected, 3.0 * projected


def eager_moved_bytes(shard: LayerShard, element_bytes: int) -> tuple[float, float]:
    """The same where every operator is a kernel of its own: the rotation of queries and keys, a read and a write.

    Latent attention first brings the pairs of neighbors that it rotates into halves, joins and pads what its heads
    share or have two widths of, and has norms.
    """
    shape = shard.model
    if shape.positions:
        return 0.0, 0.0  # learned positions are added once, by the embedding
    elements = shard.tokens * (shape.heads + shape.kv_heads) * shape.rotated_dim / shard.tp
    forward = backward = 2.0 * element_bytes * elements
    if shape.mla:
        forward, backward = 2 * forward, 2 * backward
        low, width = shape.mla, shape.head_dim
        normed = element_bytes * shard.tokens * ((low.q_lora_rank or 0) + low.kv_lora_rank) / shard.tp
        each = element_bytes * shard.tokens * shape.heads / shard.tp
        forward += each * (7 * width + 3 * low.v_head_dim) + 2 * normed
        backward += each * (8 * width + 4 * low.v_head_dim + 3 * low.qk_rope_head_dim) + 3 * normed
    return forward, backward


def saved_bytes(shard: LayerShard, saving: Saving) -> float:
    """Queries, keys and values, the output, and scores if they are saved."""
    shape, tokens, each = shard.model, shard.tokens, saving.element_bytes
    heads, groups = shape.heads / shard.tp, max(1, shape.kv_heads // shard.tp)
    qk_width, v_width = shard.core_widths
    inputs = each * tokens * (heads * qk_width + groups * (qk_width + v_width))
    kept = inputs + saving.matmul_bytes * tokens * heads * v_width
    if v_width > shape.v_head_dim:
        kept += saving.matmul_bytes * tokens * heads * shape.v_head_dim  # what of it is no padding, by itself
    if shape.mla:
        low = shape.mla
        normed = (low.q_lora_rank or 0) + low.kv_lora_rank
        held = tokens / (shard.tp if shard.sequence_parallel else 1)
        kept += each * (held * (normed + low.qk_rope_head_dim) + tokens * normed)
        if saving.mode == "latent":
            kept -= inputs
    if shape.by_scores and saving.mode != "selective":
        kept += score_bytes_saved(shard, saving)
    if saving.scores and saving.mode != "selective":
        kept += 5.0 * shard.sequences * heads * shard.length**2
    return kept


def alternate_saved_elements(shard: LayerShard) -> float:
    """Of the projections that `alternate` recompute keeps, and the output."""
    shape = shard.model
    return shard.tokens * (2 * shape.heads * shape.head_dim + shape.kv_heads * shape.v_head_dim) / shard.tp
