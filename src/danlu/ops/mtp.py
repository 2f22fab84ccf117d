"""Multi-token prediction: what a module adds to its layer and to another pass through the head.

Its projection joins two streams. Tensor parallelism shards its positions, not its matrix.
"""

from danlu.ops.embedding_head import logit_elements
from danlu.ops.layer_shard import LayerShard, Matmul
from danlu.ops.model_shape import ModelShape


def project_parameters(shape: ModelShape) -> int:
    """Of the projection of one module; norms are counted by `norm.parameters`."""
    return 2 * shape.width**2


def project_matmul(shard: LayerShard) -> Matmul:
    """The projection of a rank's positions, forward."""
    return Matmul(shard.tokens // shard.tp, shard.model.width, 2 * shard.model.width)


def saved_bytes(shard: LayerShard, element_bytes: float) -> float:
    """Bytes that one module saves beside its layer and its logits.

    Inputs of its three norms, the joined streams, and the input of the head, gathered.
    """
    return element_bytes * (5.0 * shard.stream + shard.tokens * shard.model.width)


def kept_loss_bytes(shard: LayerShard, element_bytes: float) -> float:
    """Bytes of one module's loss that wait for the backward pass: its logits."""
    return element_bytes * logit_elements(shard)


def table_gathers(modules: int) -> int:
    """Gathers of a token table more in a microbatch, where tables are resharded after use.

    The embedding for every lookup, and the head, which the backward pass of every module frees.
    """
    return 2 * modules
