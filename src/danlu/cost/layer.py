"""Time of one layer for one microbatch on one rank: compute by part, and the traffic of the axes that cut a layer.

Traffic of tensor parallelism: with sequence parallelism two gathers and two scatters a pass, without it two reductions
(Korthikanti et al., 2022). Of experts: tokens to their experts and back, twice a pass with tensor parallelism inside
experts (Liu et al., "MoE Parallel Folding", 2025). Of context parallelism: keys and values round the ring, hidden by
attention as far as it lasts (Liu et al., "Ring attention", 2023), or heads against positions and back (Jacobs et al.,
"DeepSpeed Ulysses", 2023).
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from danlu.cost.calibration import Habits
from danlu.cost.collectives import (
    Network,
    Span,
    all_gather,
    all_reduce,
    all_to_all,
    dispatch_once,
    outermost,
    reduce_scatter,
    transfer,
)
from danlu.cost.operators import Device, elementwise, flash_attention, fused_attention, matmul
from danlu.cost.overlap import exposed
from danlu.cost.shape import Shape
from danlu.cost.software import Software
from danlu.spec.cluster import SHARED_TOKENS, SHARED_WIDTH


class Cut(NamedTuple):
    """How one layer and one microbatch are cut: what a rank computes with."""

    sequences: int
    """Of a microbatch."""
    length: int
    tp: int
    cp: int
    ep: int
    tp_span: Span
    ep_span: Span
    etp_span: Span
    cp_span: Span


class Pass(NamedTuple):
    """Seconds of one pass through one layer, by part."""

    attention: float = 0.0
    linear: float = 0.0
    elementwise: float = 0.0
    tensor: float = 0.0
    """Exposed traffic of tensor parallelism."""
    expert: float = 0.0
    context: float = 0.0
    waiting: float = 0.0
    """For the host, which cannot launch kernels as fast as the chip runs them."""

    @property
    def compute(self) -> float:
        """Without traffic."""
        return self.attention + self.linear + self.elementwise

    @property
    def total(self) -> float:
        """With exposed traffic, and at least as long as the host takes."""
        return self.compute + self.tensor + self.expert + self.context + self.waiting

    def launched(self, host: float, blocking: bool) -> "Pass":
        """The same pass when its kernels take the host so long to launch, ahead of the chip or after each kernel."""
        return self._replace(waiting=host if blocking else max(0.0, host - self.total))


class LayerTime(NamedTuple):
    """Seconds of one layer for one microbatch."""

    forward: Pass
    backward: Pass
    weights: float
    """Of the backward pass, for gradients of weights."""
    again: Pass
    """Computed again in the backward pass, beside `backward`."""


def layer_time(
    shape: Shape, cut: Cut, device: Device, network: Network, software: Software, habits: Habits, *, moe: bool
) -> LayerTime:
    """Time one layer, with experts or without."""
    tokens = cut.sequences * cut.length // cut.cp
    products = [*attention_products(shape, tokens, cut.tp), *network_products(shape, tokens, cut.tp, moe)]
    linear = sum(matmul(device, m, n, k) for m, n, k in products)
    inputs = sum(matmul(device, m, k, n) for m, n, k in products)
    weights = sum(matmul(device, k, n, m, weight_gradient=True) for m, n, k in products)
    if moe:
        routed = expert_products(shape, tokens, cut, software)
        fused = software.fuses_experts
        linear += sum(matmul(device, m, n, k, groups=groups, fused=fused) for groups, m, n, k in routed)
        inputs += sum(matmul(device, m, k, n, groups=groups, fused=fused) for groups, m, n, k in routed)
        weights += sum(
            matmul(device, k, n, m, groups=groups, weight_gradient=True, fused=fused) for groups, m, n, k in routed
        )
    core, core_backward = _core_attention(shape, cut, device, software, habits)
    moved, moved_backward, kernels = _moved(shape, tokens, cut, software, habits, moe)
    moved, moved_backward = moved * device.width / 2, moved_backward * device.width / 2
    if device.fp8:
        # Every input of a linear layer is scaled and cast on its way: read in half, written in fp8, both passes twice.
        casts = 3.0 * tokens * (shape.width * 2 + (shape.mlp + shape.heads * shape.head) / cut.tp)
        moved, moved_backward = moved + casts, moved_backward + 2 * casts
    forward = Pass(
        attention=core,
        linear=linear,
        elementwise=_elementwise(shape, tokens, cut, device, software, moe, moved, kernels, backward=False),
        tensor=_tensor(shape, tokens, cut, device, network, software, habits, moe),
        context=_context(shape, tokens, cut, device.width, network, software, core, 1),
    )
    backward = Pass(
        attention=core_backward,
        linear=inputs + weights,
        elementwise=_elementwise(
            shape, tokens, cut, device, software, moe, moved_backward, kernels * 3 // 2, backward=True
        ),
        tensor=_tensor(shape, tokens, cut, device, network, software, habits, moe),
        context=_context(shape, tokens, cut, device.width, network, software, core_backward, 2),
    )
    if moe:
        forward, backward = (
            once._replace(expert=_expert(shape, tokens, cut, device.width, network, software, habits, once.compute))
            for once in (forward, backward)
        )
    host = 0.0 if software.graphed else habits.host * (kernels + (4 if cut.tp > 1 else 0))
    blocking = software.blocking_launches
    forward, backward = forward.launched(host, blocking), backward.launched(1.3 * host, blocking)
    return LayerTime(forward, backward, weights, _again(forward, shape, tokens, cut, device, software))


def attention_products(shape: Shape, tokens: int, tp: int) -> Iterable[tuple[int, int, int]]:
    """Rows, columns and inner length of the projections of attention."""
    low = shape.latent
    if low is None:
        columns = (shape.heads + 2 * max(shape.kv_heads, tp)) * shape.head // tp
        return (tokens, columns, shape.width), (tokens, shape.width, shape.heads * shape.head // tp)
    return (
        (tokens, low.query_rank, shape.width),
        (tokens, low.key_value_rank + low.rotary, shape.width),
        (tokens, shape.heads * shape.head // tp, low.query_rank),
        (tokens, shape.heads * (low.key + low.value) // tp, low.key_value_rank),
        (tokens, shape.width, shape.heads * low.value // tp),
    )


def network_products(shape: Shape, tokens: int, tp: int, moe: bool) -> Iterable[tuple[int, int, int]]:
    """Of the dense feed-forward network, or of router and shared experts."""
    hidden = shape.shared_width if moe else shape.mlp
    router = ((tokens // tp or 1, shape.experts, shape.width),) if moe else ()
    if not hidden:
        return router
    return *router, (tokens, shape.into * hidden // tp, shape.width), (tokens, shape.width, hidden // tp)


def expert_products(shape: Shape, tokens: int, cut: Cut, software: Software) -> Iterable[tuple[int, int, int, int]]:
    """Groups, rows, columns and inner length of the routed experts of a rank, at the fullest rank's load."""
    local = max(1, shape.experts // cut.ep)
    rows = shape.top_k * tokens * software.expert_tp / cut.tp * software.imbalance
    each, hidden = max(1, round(rows / local)), shape.expert_width // software.expert_tp
    return (local, each, shape.into * hidden, shape.width), (local, each, shape.width, hidden)


def _core_attention(shape: Shape, cut: Cut, device: Device, software: Software, habits: Habits) -> tuple[float, float]:
    """Forward and backward of scores, softmax and weighted sum."""
    heads = max(1, shape.heads // cut.tp)
    if software.attention == "fused":
        return (
            fused_attention(device, cut.sequences, heads, cut.length, shape.head, habits.scores),
            fused_attention(
                device, cut.sequences, heads, cut.length, shape.head, habits.scores_backward, backward=True
            ),
        )
    queries, head = cut.length // cut.cp, (shape.head + shape.value) / 2
    if software.fp8_attention and device.fp8:
        device = replace(device, half_peak=device.peak * device.efficiency.fp8)

    def over(keys: float, backward: bool) -> float:
        return flash_attention(device, cut.sequences, heads, queries, keys, head, backward=backward)

    forward, backward = over(cut.length, False), over(cut.length, True)
    if 0 < software.window < cut.length:
        # Twice the mean number of tokens attended to, as `flash_attention` counts the causal half of what it is given.
        keys = 2.0 * software.window - software.window**2 / cut.length
        share = software.windowed
        forward = (1 - share) * forward + share * over(keys, False)
        backward = (1 - share) * backward + share * over(keys, True)
    return forward, backward


def _moved(
    shape: Shape, tokens: int, cut: Cut, software: Software, habits: Habits, moe: bool
) -> tuple[float, float, int]:
    """Bytes through memory forward and backward outside products and attention, and kernels forward.

    Two norms (a read and a write each) and two residual additions (two reads, a write) over the stream; rotation or
    bias over queries, keys and values; the activation. Backward about one and a half times as many.
    """
    stream = 2.0 * tokens * shape.width / (cut.tp if software.sequence_parallel else 1)
    projected = 2.0 * tokens * (shape.heads * shape.head + 2 * shape.kv_heads * shape.head) / cut.tp
    hidden = 2.0 * tokens * (shape.shared_width if moe else shape.mlp) / cut.tp
    routed = 0.0
    if moe:
        rows = tokens * shape.top_k / cut.tp * software.imbalance
        hidden += 0.0 if software.fuses_experts else 2.0 * rows * shape.expert_width
        routed = habits.dispatch * rows * shape.width
    activation = 3.0 if shape.gated else 2.0
    forward = habits.elementwise * (10.0 * stream + 2.0 * projected + activation * hidden) + routed
    backward = habits.elementwise * (14.0 * stream + 3.0 * projected + (activation + 2.0) * hidden) + 1.5 * routed
    return forward, backward, 60 if moe else 25


def _elementwise(
    shape: Shape,
    tokens: int,
    cut: Cut,
    device: Device,
    software: Software,
    moe: bool,
    moved: float,
    kernels: int,
    backward: bool,
) -> float:
    """Seconds of everything that is neither a product nor attention: as it was measured, or by the bytes it moves."""
    times = device.measured
    if times is None:
        return elementwise(device, moved, kernels)
    stream = tokens * shape.width / (cut.tp if software.sequence_parallel else 1)
    queries, keys = (tokens * count * shape.head / cut.tp for count in (shape.heads, shape.kv_heads))
    hidden = tokens * (shape.shared_width if moe else shape.mlp) / cut.tp
    if backward:
        # Gradients of the stream meet at the inputs of both halves, of queries, keys and values, and of the two inner
        # matrices of the network.
        total = times.of("norm_backward", stream, 2) + times.of("add", stream, 2)
        total += times.of("add", tokens * shape.width, 3 if shape.gated and hidden else 2)
        total += times.of("rotation_backward", queries) + times.of("rotation_backward", keys)
        total += times.of("activation_backward", hidden)
    else:
        total = times.of("norm", stream, 2) + times.of("add", stream, 2)
        total += times.of("rotation", queries) + times.of("rotation", keys) + times.of("activation", hidden)
    if cut.tp > 1 and software.sequence_parallel:
        # Positions are gathered and scattered rank by rank, and put in order by a copy: once each for both halves.
        total += times.of("copy", tokens * shape.width, 2 * (1 + (not moe or shape.shared_width > 0)))
        total += times.of("split", 1, 2 / 3 if backward else 1 / 3)
    if moe:
        local = max(1, shape.experts // cut.ep)
        rows = tokens * shape.top_k / cut.tp * software.imbalance
        inner = rows * shape.expert_width / local
        total += times.of("dispatch_backward" if backward else "dispatch", rows * shape.width)
        total += times.of("activation_backward" if backward else "activation", inner, local)
        if backward:  # the gradients of single experts become one tensor again
            matrices = shape.into + 1
            total += times.of("copy", local * shape.expert_parameters / matrices, matrices)
    return total


def _tensor(
    shape: Shape,
    tokens: int,
    cut: Cut,
    device: Device,
    network: Network,
    software: Software,
    habits: Habits,
    moe: bool,
) -> float:
    """Exposed traffic of tensor parallelism in one pass."""
    if cut.tp == 1:
        return 0.0
    stream = device.width * tokens * shape.width
    blocks = 1 + (not moe or shape.shared_width > 0)
    if software.sequence_parallel:
        once = all_gather(network, cut.tp_span, stream) + reduce_scatter(network, cut.tp_span, stream)
        if device.measured:
            # What was measured of shared layers holds collectives already, of a short stream.
            short = min(stream, device.width * SHARED_TOKENS * SHARED_WIDTH)
            least = all_gather(network, cut.tp_span, short) + reduce_scatter(network, cut.tp_span, short)
            once = max(0.0, once - least)
    else:
        once = all_reduce(network, cut.tp_span, stream)
    return blocks * once * ((1 - habits.tensor_hidden) if software.hides_tensor else 1.0)


def _expert(
    shape: Shape,
    tokens: int,
    cut: Cut,
    width: int,
    network: Network,
    software: Software,
    habits: Habits,
    compute: float,
) -> float:
    """Exposed traffic of experts in one pass: to them and back, or what another microbatch's pass leaves of it."""
    held = width * shape.top_k * tokens / cut.tp * shape.width * software.imbalance
    if software.sends_once:
        routed = tokens / cut.tp * software.imbalance
        once = dispatch_once(network, cut.ep_span, width * shape.width, routed, shape.top_k)
    else:
        once = all_to_all(network, cut.ep_span, held)
    if software.expert_tp > 1:
        once += all_gather(network, cut.etp_span, held * software.expert_tp)
    return exposed(2 * once, compute, habits.contention) if software.hides_experts else 2 * once


def _context(
    shape: Shape, tokens: int, cut: Cut, width: int, network: Network, software: Software, core: float, times: int
) -> float:
    """What attention does not hide of keys and values going round; or heads exchanged against positions and back."""
    if cut.cp == 1:
        return 0.0
    if software.exchanges_heads:
        heads, groups = shape.heads // cut.tp, max(shape.kv_heads // cut.tp, cut.cp)
        inwards = width * tokens * (heads * shape.head + groups * (shape.head + shape.value))
        return all_to_all(network, cut.cp_span, inwards) + all_to_all(
            network, cut.cp_span, width * tokens * heads * shape.value
        )
    block = 2.0 * width * tokens * max(1, shape.kv_heads // cut.tp) * shape.head
    return max(0.0, times * (cut.cp - 1) * transfer(network, outermost(cut.cp_span), block) - core)


def _again(forward: Pass, shape: Shape, tokens: int, cut: Cut, device: Device, software: Software) -> Pass:
    """What the backward pass computes again."""
    if software.recompute == "full":
        return forward
    if software.recompute == "selective":
        return Pass(attention=forward.attention)
    if software.recompute == "elementwise":
        return Pass(elementwise=forward.elementwise)
    if software.recompute == "alternate":
        return Pass(elementwise=forward.elementwise, linear=forward.linear / 2)
    if software.recompute == "latent" and shape.latent:
        up = list(attention_products(shape, tokens, cut.tp))[2:4]
        return Pass(linear=sum(matmul(device, m, n, k) for m, n, k in up))
    return Pass()
