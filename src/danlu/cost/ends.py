"""Time of the two ends of a model for one microbatch on one rank: embedding, head and loss."""

from dataclasses import replace

from danlu.cost.calibration import Habits
from danlu.cost.collectives import Network, all_gather, all_reduce, reduce_scatter
from danlu.cost.curves import OperatorTimes
from danlu.cost.layer import Cut
from danlu.cost.operators import Device, elementwise, matmul
from danlu.cost.shape import Shape


def ends_time(
    shape: Shape,
    cut: Cut,
    device: Device,
    network: Network,
    habits: Habits,
    *,
    embedding: bool,
    head: bool,
    predicted_ahead: int = 0,
) -> tuple[float, float]:
    """Seconds forward and backward of the ends that a rank holds; the head works again for tokens predicted ahead."""
    tokens = cut.sequences * cut.length // cut.cp
    columns = -(-shape.vocabulary // cut.tp)
    columns += -columns % 128  # tables are padded, as every program does
    stream = device.width * tokens * shape.width
    if device.measured:
        return _measured(shape, cut, device, network, device.measured, tokens, columns, embedding, head)
    forward = backward = 0.0
    if embedding:
        forward += elementwise(device, 2 * stream, 2) + all_reduce(network, cut.tp_span, stream)
        backward += elementwise(device, 3 * stream, 2)
    if head:
        half = replace(device, peak=device.half_peak) if device.fp8 else device
        logits = habits.logits * tokens * columns
        once = matmul(half, tokens, columns, shape.width) + elementwise(device, logits / 2, 8)
        again = matmul(half, tokens, shape.width, columns) + elementwise(device, logits / 2, 4)
        again += matmul(half, shape.width, columns, tokens, weight_gradient=True)
        again += all_reduce(network, cut.tp_span, stream)
        forward, backward = forward + (1 + predicted_ahead) * once, backward + (1 + predicted_ahead) * again
    return forward, backward


def _measured(
    shape: Shape,
    cut: Cut,
    device: Device,
    network: Network,
    times: OperatorTimes,
    tokens: int,
    columns: int,
    embedding: bool,
    head: bool,
) -> tuple[float, float]:
    """The same from operators that were measured; under `tp` the stream is split by position around both ends."""
    stream = device.width * tokens * shape.width
    gathered, scattered = all_gather(network, cut.tp_span, stream), reduce_scatter(network, cut.tp_span, stream)
    forward = backward = 0.0
    if embedding:
        forward += times.of("copy", tokens * shape.width) + scattered
        backward += times.of("copy", columns * shape.width) + gathered
    if head:
        normed, scores = tokens * shape.width / cut.tp, float(tokens * columns)
        forward += matmul(device, tokens, columns, shape.width) + times.of("norm", normed) + gathered
        forward += times.of("loss", scores)
        backward += matmul(device, tokens, shape.width, columns) + times.of("norm_backward", normed) + scattered
        backward += matmul(device, shape.width, columns, tokens, weight_gradient=True)
        backward += times.of("loss_backward", scores)
    return forward, backward
