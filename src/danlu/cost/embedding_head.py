"""Time of the two ends of a model for one microbatch on one rank: embedding, head and loss."""

from dataclasses import replace

from danlu.cost.collectives import all_gather_time, all_reduce_time, reduce_scatter_time
from danlu.cost.context import CostContext
from danlu.cost.layer_time import LocalShape
from danlu.cost.measured_times import OperatorTimes
from danlu.cost.operator_time import elementwise_time, matmul_time
from danlu.ops import embedding_head as ends


def embedding_head_time(context: CostContext, local: LocalShape, *, embedding: bool, head: bool) -> tuple[float, float]:
    """Seconds forward and backward of a rank's embedding and head; the head runs once more per MTP token."""
    device, network = context.device, context.network
    if device.measured:
        return _measured(context, local, device.measured, embedding, head)
    tokens, columns, width = ends.head_matmul(local.shard)[:3]
    stream = device.element_bytes * tokens * width
    forward = backward = 0.0
    if embedding:
        looked_up, accumulated = ends.embedding_bytes_moved(stream)
        forward += elementwise_time(device, looked_up, 2) + all_reduce_time(network, local.tp_group, stream)
        backward += elementwise_time(device, accumulated, 2)
    if head:
        half = replace(device, peak=device.peak_16bit) if device.uses_fp8 else device
        logits = context.overheads.logit_bytes_moved * tokens * columns
        once = matmul_time(half, tokens, columns, width) + elementwise_time(device, logits / 2, 8)
        again = matmul_time(half, tokens, width, columns) + elementwise_time(device, logits / 2, 4)
        again += matmul_time(half, width, columns, tokens, weight_gradient=True)
        again += all_reduce_time(network, local.tp_group, stream)
        times = 1 + context.software.mtp_layers
        forward, backward = forward + times * once, backward + times * again
    return forward, backward


def _measured(
    context: CostContext, local: LocalShape, times: OperatorTimes, embedding: bool, head: bool
) -> tuple[float, float]:
    """The same from measured operators; under `tp` activations are sharded by position around both ends."""
    device, network = context.device, context.network
    tokens, columns, width = ends.head_matmul(local.shard)[:3]
    stream = device.element_bytes * tokens * width
    gathered = all_gather_time(network, local.tp_group, stream)
    scattered = reduce_scatter_time(network, local.tp_group, stream)
    forward = backward = 0.0
    if embedding:
        forward += times.seconds("copy", tokens * width) + scattered
        backward += times.seconds("copy", columns * width) + gathered
    if head:
        normed, scores = tokens * width / local.shard.tp, float(tokens * columns)
        forward += matmul_time(device, tokens, columns, width) + times.seconds("norm", normed) + gathered
        forward += times.seconds("loss", scores)
        backward += matmul_time(device, tokens, width, columns) + times.seconds("norm_backward", normed) + scattered
        backward += matmul_time(device, width, columns, tokens, weight_gradient=True)
        backward += times.seconds("loss_backward", scores)
    return forward, backward
