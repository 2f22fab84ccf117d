"""Router and routed experts: their matmuls, the permutation of tokens, and what crosses the network."""

from danlu.ops import mlp
from danlu.ops.layer_shard import LayerShard, Matmul
from danlu.ops.model_shape import ModelShape
from danlu.ops.recompute import Saving


def router_parameters(shape: ModelShape) -> int:
    """Of one layer."""
    return shape.width * shape.experts


def expert_parameters(shape: ModelShape) -> int:
    """Of one routed expert."""
    return mlp.parameters(shape, shape.expert_width)


def router_matmul(shard: LayerShard) -> Matmul:
    """Scores of every expert."""
    return Matmul(shard.tokens // shard.tp or 1, shard.model.experts, shard.model.width)


def matmuls(shard: LayerShard) -> tuple[Matmul, ...]:
    """Of a rank's routed experts, forward, at the load of the fullest rank."""
    shape = shard.model
    rows = shape.top_k * shard.tokens * shard.expert_tp / shard.tp * shard.expert_imbalance
    each, hidden = max(1, round(rows / shard.local_experts)), shape.expert_width // shard.expert_tp
    return (
        Matmul(each, shape.num_up_projections * hidden, shape.width, shard.local_experts),
        Matmul(each, shape.width, hidden, shard.local_experts),
    )


def exchanged_elements(shard: LayerShard) -> float:
    """Elements that a rank sends to experts in one direction, once per chosen expert."""
    return shard.routed_rows * shard.model.width


def saved_bytes(shard: LayerShard, saving: Saving) -> float:
    """A routed token's input, its combined copy, the experts' hidden features; router scores in fp32."""
    shape = shard.model
    features = (saving.element_bytes + saving.matmul_bytes) * shape.width
    features += mlp.copies_saved(shape, saving) * shape.expert_width
    return shard.routed_rows * features + 4.0 * 2 * shard.tokens / shard.tp * shape.experts
