"""Time of one layer for one microbatch on one rank: compute by part, and the traffic of the axes inside a layer.

Tensor parallelism: with sequence parallelism two all-gathers and two reduce-scatters per pass, without it two
all-reduces (Korthikanti et al., 2022). Experts: tokens to their experts and back, twice per pass with tensor
parallelism inside experts (Liu et al., "MoE Parallel Folding", 2025). Context parallelism: keys and values around the
ring, overlapped with attention (Liu et al., "Ring attention", 2023), or all-to-all between heads and positions (Jacobs
et al., "DeepSpeed Ulysses", 2023).
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from danlu.cost.calibration import Overheads
from danlu.cost.collectives import (
    GroupShape,
    Network,
    all_gather_time,
    all_reduce_time,
    all_to_all_time,
    dedup_dispatch_time,
    outermost_level,
    p2p_time,
    reduce_scatter_time,
)
from danlu.cost.model_shape import ModelShape
from danlu.cost.operator_time import (
    DeviceModel,
    elementwise_time,
    flash_attention_time,
    matmul_time,
    unfused_attention_time,
)
from danlu.cost.overlap import exposed_time
from danlu.cost.software import Software
from danlu.spec.cluster import TP_PROBE_TOKENS, TP_PROBE_WIDTH


class LocalShape(NamedTuple):
    """Shape of one layer and one microbatch on one rank, and of its groups."""

    sequences: int
    """Of a microbatch."""
    length: int
    tp: int
    cp: int
    ep: int
    tp_group: GroupShape
    ep_group: GroupShape
    etp_group: GroupShape
    cp_group: GroupShape


class PassTime(NamedTuple):
    """Seconds of one pass through one layer, by part."""

    attention: float = 0.0
    linear: float = 0.0
    elementwise: float = 0.0
    tensor: float = 0.0
    """Exposed traffic of tensor parallelism."""
    expert: float = 0.0
    context: float = 0.0
    host_wait: float = 0.0
    """Waiting for the host, which cannot launch kernels as fast as the chip runs them."""

    @property
    def compute(self) -> float:
        """Without traffic."""
        return self.attention + self.linear + self.elementwise

    @property
    def total(self) -> float:
        """With exposed traffic and host wait."""
        return self.compute + self.tensor + self.expert + self.context + self.host_wait

    def with_launch_time(self, host: float, blocking: bool) -> "PassTime":
        """The same pass with `host` seconds of kernel launches, ahead of the chip or after each kernel."""
        return self._replace(host_wait=host if blocking else max(0.0, host - self.total))


class LayerTime(NamedTuple):
    """Seconds of one layer for one microbatch."""

    forward: PassTime
    backward: PassTime
    weight_grad: float
    """Of the backward pass, for gradients of weights."""
    recompute: PassTime
    """Recompute in the backward pass, in addition to `backward`."""


def layer_time(
    shape: ModelShape,
    local: LocalShape,
    device: DeviceModel,
    network: Network,
    software: Software,
    overheads: Overheads,
    *,
    moe: bool,
) -> LayerTime:
    """Time one layer, with experts or without."""
    tokens = local.sequences * local.length // local.cp
    matmuls = [*attention_matmuls(shape, tokens, local.tp), *mlp_matmuls(shape, tokens, local.tp, moe)]
    linear = sum(matmul_time(device, m, n, k) for m, n, k in matmuls)
    inputs = sum(matmul_time(device, m, k, n) for m, n, k in matmuls)
    weights = sum(matmul_time(device, k, n, m, weight_gradient=True) for m, n, k in matmuls)
    if moe:
        routed = expert_matmuls(shape, tokens, local, software)
        fused = software.fused_grouped_gemm
        linear += sum(matmul_time(device, m, n, k, groups=groups, fused=fused) for groups, m, n, k in routed)
        inputs += sum(matmul_time(device, m, k, n, groups=groups, fused=fused) for groups, m, n, k in routed)
        weights += sum(
            matmul_time(device, k, n, m, groups=groups, weight_gradient=True, fused=fused) for groups, m, n, k in routed
        )
    core, core_backward = _core_attention_time(shape, local, device, software, overheads)
    moved, moved_backward, kernels = _elementwise_bytes(shape, tokens, local, software, overheads, moe)
    moved, moved_backward = moved * device.element_bytes / 2, moved_backward * device.element_bytes / 2
    if device.uses_fp8:
        # Every input of a linear layer is scaled and cast: read in half, written in fp8, both passes twice.
        casts = 3.0 * tokens * (shape.width * 2 + (shape.mlp_dim + shape.heads * shape.head_dim) / local.tp)
        moved, moved_backward = moved + casts, moved_backward + 2 * casts
    forward = PassTime(
        attention=core,
        linear=linear,
        elementwise=_elementwise(shape, tokens, local, device, software, moe, moved, kernels, backward=False),
        tensor=_tp_time(shape, tokens, local, device, network, software, overheads, moe),
        context=_cp_time(shape, tokens, local, device.element_bytes, network, software, core, 1),
    )
    backward = PassTime(
        attention=core_backward,
        linear=inputs + weights,
        elementwise=_elementwise(
            shape, tokens, local, device, software, moe, moved_backward, kernels * 3 // 2, backward=True
        ),
        tensor=_tp_time(shape, tokens, local, device, network, software, overheads, moe),
        context=_cp_time(shape, tokens, local, device.element_bytes, network, software, core_backward, 2),
    )
    if moe:
        forward, backward = (
            once._replace(
                expert=_ep_time(shape, tokens, local, device.element_bytes, network, software, overheads, once.compute)
            )
            for once in (forward, backward)
        )
    host = 0.0 if software.graph_capture else overheads.launch_overhead * (kernels + (4 if local.tp > 1 else 0))
    blocking = software.launch_blocking
    forward, backward = forward.with_launch_time(host, blocking), backward.with_launch_time(1.3 * host, blocking)
    return LayerTime(forward, backward, weights, _recompute_time(forward, shape, tokens, local, device, software))


def attention_matmuls(shape: ModelShape, tokens: int, tp: int) -> Iterable[tuple[int, int, int]]:
    """Rows, columns and inner length of the attention projections."""
    low = shape.mla
    if low is None:
        columns = (shape.heads + 2 * max(shape.kv_heads, tp)) * shape.head_dim // tp
        return (tokens, columns, shape.width), (tokens, shape.width, shape.heads * shape.head_dim // tp)
    return (
        (tokens, low.q_lora_rank, shape.width),
        (tokens, low.kv_lora_rank + low.qk_rope_head_dim, shape.width),
        (tokens, shape.heads * shape.head_dim // tp, low.q_lora_rank),
        (tokens, shape.heads * (low.qk_nope_head_dim + low.v_head_dim) // tp, low.kv_lora_rank),
        (tokens, shape.width, shape.heads * low.v_head_dim // tp),
    )


def mlp_matmuls(shape: ModelShape, tokens: int, tp: int, moe: bool) -> Iterable[tuple[int, int, int]]:
    """Of the dense feed-forward network, or of router and shared experts."""
    hidden = shape.shared_width if moe else shape.mlp_dim
    router = ((tokens // tp or 1, shape.experts, shape.width),) if moe else ()
    if not hidden:
        return router
    return *router, (tokens, shape.num_up_projections * hidden // tp, shape.width), (tokens, shape.width, hidden // tp)


def expert_matmuls(
    shape: ModelShape, tokens: int, local: LocalShape, software: Software
) -> Iterable[tuple[int, int, int, int]]:
    """Groups, rows, columns and inner length of a rank's routed experts, at the load of the fullest rank."""
    local_experts = max(1, shape.experts // local.ep)
    rows = shape.top_k * tokens * software.expert_tp / local.tp * software.expert_imbalance
    each, hidden = max(1, round(rows / local_experts)), shape.expert_width // software.expert_tp
    return (local_experts, each, shape.num_up_projections * hidden, shape.width), (
        local_experts,
        each,
        shape.width,
        hidden,
    )


def _core_attention_time(
    shape: ModelShape, local: LocalShape, device: DeviceModel, software: Software, overheads: Overheads
) -> tuple[float, float]:
    """Forward and backward of scores, softmax and weighted sum."""
    heads = max(1, shape.heads // local.tp)
    if software.attention == "fused":
        return (
            unfused_attention_time(
                device, local.sequences, heads, local.length, shape.head_dim, overheads.score_bytes_moved
            ),
            unfused_attention_time(
                device,
                local.sequences,
                heads,
                local.length,
                shape.head_dim,
                overheads.score_bytes_moved_backward,
                backward=True,
            ),
        )
    queries, head = local.length // local.cp, (shape.head_dim + shape.v_head_dim) / 2
    if software.fp8_attention and device.uses_fp8:
        device = replace(device, peak_16bit=device.peak * device.efficiency.fp8)

    def over(keys: float, backward: bool) -> float:
        return flash_attention_time(device, local.sequences, heads, queries, keys, head, backward=backward)

    forward, backward = over(local.length, False), over(local.length, True)
    if 0 < software.sliding_window < local.length:
        # Twice the mean number of tokens attended to, as `flash_attention_time` counts the causal half of it.
        keys = 2.0 * software.sliding_window - software.sliding_window**2 / local.length
        share = software.sliding_window_fraction
        forward = (1 - share) * forward + share * over(keys, False)
        backward = (1 - share) * backward + share * over(keys, True)
    return forward, backward


def _elementwise_bytes(
    shape: ModelShape, tokens: int, local: LocalShape, software: Software, overheads: Overheads, moe: bool
) -> tuple[float, float, int]:
    """Bytes through memory forward and backward outside matmuls and attention, and kernels forward.

    Two norms (a read and a write each) and two residual additions (two reads, a write) over the stream; rotation or
    bias over queries, keys and values; the activation. Backward about one and a half times as many.
    """
    stream = 2.0 * tokens * shape.width / (local.tp if software.sequence_parallel else 1)
    projected = 2.0 * tokens * (shape.heads * shape.head_dim + 2 * shape.kv_heads * shape.head_dim) / local.tp
    hidden = 2.0 * tokens * (shape.shared_width if moe else shape.mlp_dim) / local.tp
    routed = 0.0
    if moe:
        rows = tokens * shape.top_k / local.tp * software.expert_imbalance
        hidden += 0.0 if software.fused_grouped_gemm else 2.0 * rows * shape.expert_width
        routed = overheads.dispatch_bytes_moved * rows * shape.width
    activation = 3.0 if shape.gated else 2.0
    forward = overheads.elementwise_traffic * (10.0 * stream + 2.0 * projected + activation * hidden) + routed
    backward = (
        overheads.elementwise_traffic * (14.0 * stream + 3.0 * projected + (activation + 2.0) * hidden) + 1.5 * routed
    )
    return forward, backward, 60 if moe else 25


def _elementwise(
    shape: ModelShape,
    tokens: int,
    local: LocalShape,
    device: DeviceModel,
    software: Software,
    moe: bool,
    moved: float,
    kernels: int,
    backward: bool,
) -> float:
    """Seconds of everything but matmuls and attention: as measured, or by the bytes moved."""
    times = device.measured
    if times is None:
        return elementwise_time(device, moved, kernels)
    stream = tokens * shape.width / (local.tp if software.sequence_parallel else 1)
    queries, keys = (tokens * count * shape.head_dim / local.tp for count in (shape.heads, shape.kv_heads))
    hidden = tokens * (shape.shared_width if moe else shape.mlp_dim) / local.tp
    if backward:
        # Gradients of the residual stream are summed at the inputs of attention and MLP, of queries, keys and values,
        # and of the two up-projections.
        total = times.seconds("norm_backward", stream, 2) + times.seconds("add", stream, 2)
        total += times.seconds("add", tokens * shape.width, 3 if shape.gated and hidden else 2)
        total += times.seconds("rotation_backward", queries) + times.seconds("rotation_backward", keys)
        total += times.seconds("activation_backward", hidden)
    else:
        total = times.seconds("norm", stream, 2) + times.seconds("add", stream, 2)
        total += (
            times.seconds("rotation", queries) + times.seconds("rotation", keys) + times.seconds("activation", hidden)
        )
    if local.tp > 1 and software.sequence_parallel:
        # Positions are gathered and scattered rank by rank, and reordered by a copy: once each for attention and MLP.
        total += times.seconds("copy", tokens * shape.width, 2 * (1 + (not moe or shape.shared_width > 0)))
        total += times.seconds("split", 1, 2 / 3 if backward else 1 / 3)
    if moe:
        local_experts = max(1, shape.experts // local.ep)
        rows = tokens * shape.top_k / local.tp * software.expert_imbalance
        inner = rows * shape.expert_width / local_experts
        total += times.seconds("dispatch_backward" if backward else "dispatch", rows * shape.width)
        total += times.seconds("activation_backward" if backward else "activation", inner, local_experts)
        if backward:  # the gradients of single experts are copied into one tensor
            matrices = shape.num_up_projections + 1
            total += times.seconds("copy", local_experts * shape.expert_parameters / matrices, matrices)
    return total


def _tp_time(
    shape: ModelShape,
    tokens: int,
    local: LocalShape,
    device: DeviceModel,
    network: Network,
    software: Software,
    overheads: Overheads,
    moe: bool,
) -> float:
    """Exposed traffic of tensor parallelism in one pass."""
    if local.tp == 1:
        return 0.0
    stream = device.element_bytes * tokens * shape.width
    blocks = 1 + (not moe or shape.shared_width > 0)
    if software.sequence_parallel:
        once = all_gather_time(network, local.tp_group, stream) + reduce_scatter_time(network, local.tp_group, stream)
        if device.measured:
            # The measured `split` of tensor-parallel layers includes collectives of a short stream already.
            short = min(stream, device.element_bytes * TP_PROBE_TOKENS * TP_PROBE_WIDTH)
            least = all_gather_time(network, local.tp_group, short) + reduce_scatter_time(
                network, local.tp_group, short
            )
            once = max(0.0, once - least)
    else:
        once = all_reduce_time(network, local.tp_group, stream)
    return blocks * once * ((1 - overheads.tp_overlap) if software.overlap_tp_comm else 1.0)


def _ep_time(
    shape: ModelShape,
    tokens: int,
    local: LocalShape,
    width: int,
    network: Network,
    software: Software,
    overheads: Overheads,
    compute: float,
) -> float:
    """Exposed traffic of experts in one pass: dispatch and combine, less what another microbatch's pass hides."""
    held = width * shape.top_k * tokens / local.tp * shape.width * software.expert_imbalance
    if software.dedup_dispatch:
        routed = tokens / local.tp * software.expert_imbalance
        once = dedup_dispatch_time(network, local.ep_group, width * shape.width, routed, shape.top_k)
    else:
        once = all_to_all_time(network, local.ep_group, held)
    if software.expert_tp > 1:
        once += all_gather_time(network, local.etp_group, held * software.expert_tp)
    return exposed_time(2 * once, compute, overheads.contention) if software.overlap_ep_comm else 2 * once


def _cp_time(
    shape: ModelShape,
    tokens: int,
    local: LocalShape,
    width: int,
    network: Network,
    software: Software,
    core: float,
    times: int,
) -> float:
    """Ring traffic of keys and values that attention does not hide; or Ulysses' all-to-alls."""
    if local.cp == 1:
        return 0.0
    if software.ulysses:
        heads, groups = shape.heads // local.tp, max(shape.kv_heads // local.tp, local.cp)
        inwards = width * tokens * (heads * shape.head_dim + groups * (shape.head_dim + shape.v_head_dim))
        return all_to_all_time(network, local.cp_group, inwards) + all_to_all_time(
            network, local.cp_group, width * tokens * heads * shape.v_head_dim
        )
    block = 2.0 * width * tokens * max(1, shape.kv_heads // local.tp) * shape.head_dim
    return max(0.0, times * (local.cp - 1) * p2p_time(network, outermost_level(local.cp_group), block) - core)


def _recompute_time(
    forward: PassTime, shape: ModelShape, tokens: int, local: LocalShape, device: DeviceModel, software: Software
) -> PassTime:
    """Time of recompute in the backward pass."""
    if software.recompute == "full":
        return forward
    if software.recompute == "selective":
        return PassTime(attention=forward.attention)
    if software.recompute == "elementwise":
        return PassTime(elementwise=forward.elementwise)
    if software.recompute == "alternate":
        return PassTime(elementwise=forward.elementwise, linear=forward.linear / 2)
    if software.recompute == "latent" and shape.mla:
        up = list(attention_matmuls(shape, tokens, local.tp))[2:4]
        return PassTime(linear=sum(matmul_time(device, m, n, k) for m, n, k in up))
    return PassTime()
