"""The feed-forward network of a dense layer, or of a layer's shared experts, gated (SwiGLU) or not (GELU)."""

from danlu.ops.layer_shard import LayerShard, Matmul
from danlu.ops.model_shape import ModelShape
from danlu.ops.recompute import Saving


def hidden_width(shape: ModelShape, moe: bool) -> int:
    """Hidden features: of the dense network, or of the shared experts of an expert layer."""
    return shape.shared_width if moe else shape.mlp_dim


def parameters(shape: ModelShape, hidden: int, *, bias: bool = False) -> int:
    """Of one network with this many hidden features."""
    ups = shape.num_up_projections
    return (ups + 1) * shape.width * hidden + (ups * hidden + shape.width if bias else 0)


def matmuls(shard: LayerShard, moe: bool) -> tuple[Matmul, ...]:
    """Up and down, forward; none without shared experts."""
    shape, hidden = shard.model, hidden_width(shard.model, moe)
    if not hidden:
        return ()
    return (
        Matmul(shard.tokens, shape.num_up_projections * hidden // shard.tp, shape.width),
        Matmul(shard.tokens, shape.width, hidden // shard.tp),
    )


def hidden_elements(shard: LayerShard, moe: bool) -> float:
    """Elements of the hidden features."""
    return shard.tokens * hidden_width(shard.model, moe) / shard.tp


def activation_bytes_moved(shape: ModelShape, hidden: float) -> tuple[float, float]:
    """Bytes through memory, forward and backward, of the activation over `hidden` bytes of features."""
    passes = 3.0 if shape.gated else 2.0
    return passes * hidden, (passes + 2.0) * hidden


def eager_activation_bytes_moved(shape: ModelShape, hidden: float) -> tuple[float, float]:
    """The same where every operator is a kernel of its own.

    Gated: gate and up read and the product written, backward the gradients of both written; otherwise the activation
    alone.
    """
    return (3.0 * hidden, 5.0 * hidden) if shape.gated else (2.0 * hidden, 3.0 * hidden)


def copies_saved(shape: ModelShape, saving: Saving) -> float:
    """Bytes saved per hidden feature: before the activation and after it."""
    copies = float(saving.element_bytes * shape.num_up_projections)
    if saving.mode == "elementwise":
        return copies
    return copies + saving.matmul_bytes
