"""Norms before attention and feed-forward network, and the residual additions after them."""

from danlu.ops.layer_shard import LayerShard
from danlu.ops.recompute import Saving


def parameters(width: int, *, bias: bool) -> int:
    """Of one norm: a scale, and a shift with `bias` (LayerNorm)."""
    return 2 * width if bias else width


def moved_bytes(shard: LayerShard) -> tuple[float, float]:
    """Bytes through memory, forward and backward, in half precision.

    Two norms (a read and a write each) and two residual additions (two reads, a write); backward about one and a half
    times as many.
    """
    stream = 2.0 * shard.stream
    return 10.0 * stream, 14.0 * stream


def eager_moved_bytes(shard: LayerShard, element_bytes: int, summed_inputs: int) -> tuple[float, float]:
    """The same where every operator is a kernel of its own.

    A norm is one kernel forward and one backward (a read more than forward), as accelerators have it in torch.
    Backward, two gradients are added per residual connection, and those of `summed_inputs` matmuls that share an input,
    before tensor parallelism scatters them.
    """
    read_read_write = 3.0 * element_bytes
    forward = 2 * (2.0 * element_bytes + read_read_write) * shard.stream
    return forward, read_read_write * (4 * shard.stream + summed_inputs * shard.tokens * shard.model.width)


def saved_bytes(shard: LayerShard, saving: Saving) -> float:
    """Inputs of both norms and of the matmuls after them."""
    kept = 2 * saving.element_bytes * shard.stream
    if saving.mode == "elementwise":
        return kept
    inputs = shard.tokens * shard.model.width if saving.gathered_inputs else shard.stream
    return kept + 2 * saving.matmul_bytes * inputs
