"""The two ends of a model: token and position tables, the head and its loss."""

from danlu.ops.layer_shard import LayerShard, Matmul
from danlu.ops.model_shape import ModelShape

_PADDED_TO = 128
"""Columns that vocabularies are padded to on every rank, as all software does."""


def table_parameters(shape: ModelShape) -> int:
    """Of the token table, or of the head."""
    return shape.vocabulary * shape.width


def position_parameters(shape: ModelShape) -> int:
    """Of the table of learned positions."""
    return shape.positions * shape.width


def head_matmul(shard: LayerShard) -> Matmul:
    """Logits of a rank's part of the padded vocabulary."""
    columns = -(-shard.model.vocabulary // shard.tp)
    return Matmul(shard.tokens, columns + -columns % _PADDED_TO, shard.model.width)


def head_flops(shard: LayerShard) -> float:
    """Of the logits, forward, without padding."""
    return 2.0 * shard.tokens * shard.model.width * shard.model.vocabulary / shard.tp


def logit_elements(shard: LayerShard) -> float:
    """Logits of a rank, without padding."""
    return shard.tokens * shard.model.vocabulary / shard.tp


def loss_bytes(shard: LayerShard, element_bytes: float, together: int) -> float:
    """Bytes at the loss of one microbatch: its logits and their gradient; of those whose loss was computed before, the
    logits.
    """
    return logit_elements(shard) * element_bytes * (1 + together)


def embedding_bytes_moved(stream: float) -> tuple[float, float]:
    """Bytes through memory of the lookup of a stream of `stream` bytes, forward and backward."""
    return 2 * stream, 3 * stream
