"""Time of the two ends of a model for one microbatch on one rank: embedding, head and loss."""

from dataclasses import replace

from danlu.cost.calibration import Overheads
from danlu.cost.collectives import Network, all_gather_time, all_reduce_time, reduce_scatter_time
from danlu.cost.layer_time import LocalShape
from danlu.cost.measured_times import OperatorTimes
from danlu.cost.model_shape import ModelShape
from danlu.cost.operator_time import DeviceModel, elementwise_time, matmul_time


def embedding_head_time(
    shape: ModelShape,
    local: LocalShape,
    device: DeviceModel,
    network: Network,
    overheads: Overheads,
    *,
    embedding: bool,
    head: bool,
    predicted_ahead: int = 0,
) -> tuple[float, float]:
    """Seconds forward and backward of a rank's embedding and head; the head runs once more per MTP token."""
    tokens = local.sequences * local.length // local.cp
    columns = -(-shape.vocabulary // local.tp)
    columns += -columns % 128  # vocabularies are padded, as all software does
    stream = device.element_bytes * tokens * shape.width
    if device.measured:
        return _measured(shape, local, device, network, device.measured, tokens, columns, embedding, head)
    forward = backward = 0.0
    if embedding:
        forward += elementwise_time(device, 2 * stream, 2) + all_reduce_time(network, local.tp_group, stream)
        backward += elementwise_time(device, 3 * stream, 2)
    if head:
        half = replace(device, peak=device.peak_16bit) if device.uses_fp8 else device
        logits = overheads.logit_bytes_moved * tokens * columns
        once = matmul_time(half, tokens, columns, shape.width) + elementwise_time(device, logits / 2, 8)
        again = matmul_time(half, tokens, shape.width, columns) + elementwise_time(device, logits / 2, 4)
        again += matmul_time(half, shape.width, columns, tokens, weight_gradient=True)
        again += all_reduce_time(network, local.tp_group, stream)
        forward, backward = forward + (1 + predicted_ahead) * once, backward + (1 + predicted_ahead) * again
    return forward, backward


def _measured(
    shape: ModelShape,
    local: LocalShape,
    device: DeviceModel,
    network: Network,
    times: OperatorTimes,
    tokens: int,
    columns: int,
    embedding: bool,
    head: bool,
) -> tuple[float, float]:
    """The same from measured operators; under `tp` activations are sharded by position around both ends."""
    stream = device.element_bytes * tokens * shape.width
    gathered, scattered = (
        all_gather_time(network, local.tp_group, stream),
        reduce_scatter_time(network, local.tp_group, stream),
    )
    forward = backward = 0.0
    if embedding:
        forward += times.seconds("copy", tokens * shape.width) + scattered
        backward += times.seconds("copy", columns * shape.width) + gathered
    if head:
        normed, scores = tokens * shape.width / local.tp, float(tokens * columns)
        forward += matmul_time(device, tokens, columns, shape.width) + times.seconds("norm", normed) + gathered
        forward += times.seconds("loss", scores)
        backward += (
            matmul_time(device, tokens, shape.width, columns) + times.seconds("norm_backward", normed) + scattered
        )
        backward += matmul_time(device, shape.width, columns, tokens, weight_gradient=True)
        backward += times.seconds("loss_backward", scores)
    return forward, backward
