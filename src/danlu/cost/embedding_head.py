"""Time of the two ends of a model for one microbatch on one rank: embedding, head and loss."""

from dataclasses import replace

from danlu.cost.collectives import all_gather_time, all_reduce_time, reduce_scatter_time
from danlu.cost.context import CostContext
from danlu.cost.layer_time import LocalShape
from danlu.cost.measured_times import OperatorTimes
from danlu.cost.operator_time import elementwise_time, matmul_time
from danlu.ops import embedding_head as ends
from danlu.ops import mtp


def embedding_head_time(
    context: CostContext, local: LocalShape, *, embedding: bool, head: bool, logits_again: bool = False
) -> tuple[float, float]:
    """Seconds forward and backward of a rank's embedding and head; the head runs once more per MTP token.

    With `logits_again` the backward pass computes logits that were not kept.
    """
    forward, backward = _ends(context, local, embedding=embedding, head=head)
    if head and logits_again:
        device = replace(context.device, peak=context.device.peak_16bit) if context.device.uses_fp8 else context.device
        backward += matmul_time(device, *ends.head_matmul(local.shard)[:3])
    if head and context.shape.mtp:
        rows, columns, inner = mtp.project_matmul(local.shard)[:3]
        forward += context.shape.mtp * matmul_time(context.device, rows, columns, inner)
        again = matmul_time(context.device, rows, inner, columns)
        again += matmul_time(context.device, columns, inner, rows, weight_gradient=True)
        unsharded = context.device.element_bytes * mtp.project_parameters(context.shape)
        again += all_reduce_time(context.network, local.tp_group, unsharded)
        backward += context.shape.mtp * again
    return forward, backward


def _ends(context: CostContext, local: LocalShape, *, embedding: bool, head: bool) -> tuple[float, float]:
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
        times = 1 + context.software.mtp_layers + context.shape.mtp
        forward, backward = forward + times * once, backward + times * again
        looked_up, accumulated = ends.embedding_bytes_moved(stream)
        copied = elementwise_time(device, looked_up, 2) + all_reduce_time(network, local.tp_group, stream)
        forward += context.shape.mtp * copied
        backward += context.shape.mtp * elementwise_time(device, accumulated, 2)
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
    ahead = context.shape.mtp if head else 0  # multi-token prediction looks up and scores once more for every module
    if lookups := embedding + ahead:
        forward += lookups * (times.seconds("copy", tokens * width) + scattered)
        backward += lookups * (times.seconds("copy", columns * width) + gathered)
    if head:
        normed, scores = tokens * width / local.shard.tp, float(tokens * columns)
        once = matmul_time(device, tokens, columns, width) + times.seconds("norm", normed) + gathered
        once += times.seconds("loss", scores)
        again = matmul_time(device, tokens, width, columns) + times.seconds("norm_backward", normed) + scattered
        again += matmul_time(device, width, columns, tokens, weight_gradient=True)
        again += times.seconds("loss_backward", scores)
        forward, backward = forward + (1 + ahead) * once, backward + (1 + ahead) * again
    return forward, backward
