"""Time of one layer for one microbatch on one rank: compute by part, and the traffic of the axes inside a layer.

Tensor parallelism: with sequence parallelism two all-gathers and two reduce-scatters per pass, without it two
all-reduces (Korthikanti et al., 2022). Experts: tokens to their experts and back, twice per pass with tensor
parallelism inside experts (Liu et al., "MoE Parallel Folding", 2025). Context parallelism: keys and values around the
ring, overlapped with attention (Liu et al., "Ring attention", 2023), or all-to-all between heads and positions (Jacobs
et al., "DeepSpeed Ulysses", 2023).
"""

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from danlu.cost.collectives import (
    GroupShape,
    all_gather_time,
    all_reduce_time,
    all_to_all_time,
    dedup_dispatch_time,
    dispatch_rows,
    level_dispatch_times,
    reduce_scatter_time,
    ring_turn_time,
)
from danlu.cost.context import CostContext
from danlu.cost.measured_times import OperatorTimes
from danlu.cost.operator_time import (
    DeviceModel,
    elementwise_time,
    flash_attention_time,
    matmul_time,
    unfused_attention_time,
)
from danlu.cost.overlap import exposed_time
from danlu.cost.software import TokenDispatch
from danlu.cost.stage_contents import LayerKind
from danlu.ops import attention, experts, layer, mlp
from danlu.ops.layer_shard import LayerShard
from danlu.ops.recompute import RERUN, Recompute, Rerun
from danlu.spec.cluster import TP_PROBE_TOKENS, TP_PROBE_WIDTH

_KERNELS, _MOE_KERNELS = 25, 60
"""Kernels of a forward pass outside matmuls and attention; a backward pass has half as many again."""


class LocalShape(NamedTuple):
    """The share of one layer and one microbatch on one rank, and the shape of its groups."""

    shard: LayerShard
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

    def rerun(self, again: Rerun) -> "PassTime":
        """What of this pass runs again."""
        return PassTime(
            attention=again.attention * self.attention,
            linear=again.linear * self.linear,
            elementwise=again.elementwise * self.elementwise,
            tensor=again.collectives * self.tensor,
            expert=again.collectives * self.expert,
            context=again.collectives * self.context,
            host_wait=again.collectives * self.host_wait,
        )

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


def layer_time(context: CostContext, local: LocalShape, kind: LayerKind) -> LayerTime:
    """Time one layer."""
    return _LayerTimer(context, local, kind).time(kind.recompute)


@lru_cache(maxsize=65536)
def _matmul_times(
    device: DeviceModel, fused: bool, shard: LayerShard, moe: bool, chunks: int
) -> tuple[float, float, float]:
    """Seconds forward, for gradients of inputs, and for those of weights.

    Of experts, to which tokens go in so many `chunks`; with 0, of all other matmuls. The same for all
    software that differs by what it recomputes, gathers again or compiles.
    """
    forward = inputs = weights = 0.0
    for m, n, k, groups in layer.expert_matmuls(shard, moe) if chunks else layer.matmuls(shard, moe):
        m = -(-m // chunks) if chunks > 1 else m
        forward += matmul_time(device, m, n, k, groups=groups, fused=fused)
        inputs += matmul_time(device, m, k, n, groups=groups, fused=fused)
        weights += matmul_time(device, k, n, m, groups=groups, weight_gradient=True, fused=fused)
    times = chunks or 1
    return times * forward, times * inputs, times * weights


class _LayerTimer:
    """Times one kind of layer."""

    def __init__(self, context: CostContext, local: LocalShape, kind: LayerKind) -> None:
        self.local, self.shard, self.shape, self.moe = local, local.shard, local.shard.model, kind.moe
        self.windowed = kind.local
        self.device, self.network = context.device, context.network
        self.software, self.overheads = context.software, context.overheads

    def time(self, recompute: Recompute) -> LayerTime:
        """Both passes, and recompute."""
        linear, inputs, weights = self._matmul_times(0)
        moved, kernels = self._moved_bytes(), _MOE_KERNELS if self.moe else _KERNELS
        core = self._core_attention()
        forward = PassTime(
            attention=core[0],
            linear=linear,
            elementwise=self._elementwise(moved[0], kernels, backward=False),
            tensor=self._tensor(),
            context=self._context(core[0], backward=False),
        )
        backward = PassTime(
            attention=core[1],
            linear=inputs + weights,
            elementwise=self._elementwise(moved[1], kernels * 3 // 2, backward=True),
            tensor=forward.tensor + self._regathered(recompute),
            context=self._context(core[1], backward=True),
        )
        host, blocking = self._launch_times(kernels), self.software.launch_blocking
        if not self.moe:
            forward, backward = (
                each.with_launch_time(held, blocking) for each, held in zip((forward, backward), host, strict=True)
            )
            return LayerTime(forward, backward, weights, self._again(recompute, forward, host[0]))
        ways = []
        for dispatch in self.software.dispatch_choices or (self.software.dispatch,):
            there, back, routed = self._with_experts(forward, backward, dispatch)
            there, back = there.with_launch_time(host[0], blocking), back.with_launch_time(host[1], blocking)
            ways.append((there, back, weights + routed))
        return self._least(ways, recompute, host[0])

    def _with_experts(
        self, forward: PassTime, backward: PassTime, dispatch: TokenDispatch
    ) -> tuple[PassTime, PassTime, float]:
        """The passes with experts that tokens reach in one way; and seconds for gradients of weights."""
        there, inputs, weights = self._matmul_times(dispatch.chunks)
        back = inputs + weights
        if dispatch.deduplicated:
            copied = self._copied_times()
            forward = forward._replace(elementwise=forward.elementwise + copied[0])
            backward = backward._replace(elementwise=backward.elementwise + copied[1])
        sent = self._expert(dispatch, forward.compute + there, there)
        returned = self._expert(dispatch, backward.compute + back, back)
        return (
            forward._replace(linear=forward.linear + there, expert=sent),
            backward._replace(linear=backward.linear + back, expert=returned),
            weights,
        )

    def _least(self, ways: "list[tuple[PassTime, PassTime, float]]", recompute: Recompute, host: float) -> LayerTime:
        """The passes of the best way; of several, of each pass the best, and of a split one of each of its halves."""
        forward = min((there for there, _, _ in ways), key=lambda there: (there.total, -there.host_wait))
        _, backward, held = min(ways, key=lambda way: way[1].total - way[2])
        weights = min(least for _, _, least in ways)
        backward = backward._replace(linear=backward.linear - (held - weights))
        return LayerTime(forward, backward, weights, self._again(recompute, forward, host))

    def _matmul_times(self, chunks: int) -> tuple[float, float, float]:
        return _matmul_times(self.device, self.software.fused_grouped_gemm, self.shard, self.moe, chunks)

    def _launch_times(self, kernels: int) -> tuple[float, float]:
        """Seconds that the host launches kernels, forward and backward."""
        if self.software.graph_capture:
            return 0.0, 0.0
        each = self.overheads.launch_overhead
        host = each * (kernels + (4 if self.shard.tp > 1 else 0))
        if not self.moe or self.software.fused_grouped_gemm:
            return host, 1.3 * host
        # One call a matmul and expert, and in fp8 one cast; backward for inputs and for weights.
        calls = each * 2 * self.shard.local_experts * (2 if self.device.uses_fp8 else 1)
        return host + calls, 1.3 * host + 2 * calls

    def _again(self, recompute: Recompute, forward: PassTime, host: float) -> PassTime:
        """What the backward pass runs again; the host takes `host` seconds to launch all of a forward pass."""
        if recompute == "latent":
            up = attention.latent_matmuls(self.shard)
            return PassTime(linear=sum(matmul_time(self.device, each.rows, each.columns, each.inner) for each in up))
        again = forward.rerun(RERUN[recompute])
        last = layer.last_matmul(self.shard, self.moe)
        if recompute == "full" and last and self.software.recompute_stops_early:
            spared = matmul_time(self.device, last.rows, last.columns, last.inner)
            # with the reduction of its result, half of the traffic around one block
            tensor = again.tensor * (1 - 0.5 / self._tp_blocks)
            again = again._replace(linear=again.linear - spared, tensor=tensor, host_wait=0.0)
            return again.with_launch_time(host, self.software.launch_blocking)
        return again

    def _core_attention(self) -> tuple[float, float]:
        """Forward and backward of scores, softmax and weighted sum."""
        shape, shard, device, software = self.shape, self.shard, self.device, self.software
        heads = max(1, shape.heads // shard.tp)
        if software.attention == "fused":
            sizes = (device, shard.sequences, heads, shard.length, shape.head_dim)
            return (
                unfused_attention_time(*sizes, self.overheads.score_bytes_moved),
                unfused_attention_time(*sizes, self.overheads.score_bytes_moved_backward, backward=True),
            )
        if shape.by_scores:
            sizes = (device, shard.sequences, max(1, heads // shard.cp), shard.length, shape.head_dim)
            moved = attention.score_bytes_moved(shard, device.element_bytes)
            return unfused_attention_time(*sizes, moved[0]), unfused_attention_time(*sizes, moved[1], backward=True)
        queries, head = shard.length // shard.cp, sum(shard.core_widths) / 2
        if software.fp8_attention and device.uses_fp8:
            device = replace(device, peak_16bit=device.peak * device.efficiency.fp8)

        def over(keys: float, backward: bool) -> float:
            return flash_attention_time(device, shard.sequences, heads, queries, keys, head, backward=backward)

        forward, backward = over(shard.length, False), over(shard.length, True)
        if self.windowed or software.document_mask:
            pairs = attention.computed_pairs(shard, local=self.windowed, documents=software.document_mask)
            keys = 2.0 * pairs / queries  # of which `flash_attention_time` counts the causal half
            return over(keys, False), over(keys, True)
        if 0 < software.sliding_window < shard.length:
            # Twice the mean number of tokens attended to, as `flash_attention_time` counts the causal half of it.
            keys = 2.0 * software.sliding_window - software.sliding_window**2 / shard.length
            share = software.sliding_window_fraction
            forward = (1 - share) * forward + share * over(keys, False)
            backward = (1 - share) * backward + share * over(keys, True)
        return forward, backward

    def _moved_bytes(self) -> tuple[float, float]:
        """Bytes through memory outside matmuls and attention, forward and backward."""
        overheads, shape, shard = self.overheads, self.shape, self.shard
        dispatch, size = overheads.dispatch_bytes_moved, self.device.element_bytes
        fused, traffic = self.software.fused_grouped_gemm, overheads.elementwise_traffic
        moved = layer.moved_bytes(shard, self.moe, traffic, dispatch, fused)
        forward, backward = (each * size / 2 for each in moved)
        if self.software.eager:
            # Never less than fused kernels, whose count has what biases move too.
            apart = layer.eager_moved_bytes(shard, self.moe, size, dispatch)
            forward, backward = max(forward, apart[0]), max(backward, apart[1])
        if self.device.uses_fp8:
            # Every input of a linear layer is scaled and cast: read in half, written in fp8, both passes twice.
            casts = 3.0 * shard.tokens * (shape.width * 2 + (shape.mlp_dim + shape.heads * shape.head_dim) / shard.tp)
            forward, backward = forward + casts, backward + 2 * casts
        return forward, backward

    def _elementwise(self, moved: float, kernels: int, backward: bool) -> float:
        """Seconds of everything but matmuls and attention: as measured, or by the bytes moved."""
        if self.device.measured is None:
            return elementwise_time(self.device, moved, kernels)
        return self._measured_elementwise(self.device.measured, backward)

    def _measured_elementwise(self, times: OperatorTimes, backward: bool) -> float:
        shape, shard, moe = self.shape, self.shard, self.moe
        tokens, stream, hidden = shard.tokens, shard.stream, mlp.hidden_elements(shard, moe)
        queries, keys = (tokens * count * shape.rotated_dim / shard.tp for count in (shape.heads, shape.kv_heads))
        if backward:
            # Gradients of the residual stream are summed at the inputs of attention and MLP, of queries, keys and
            # values, and of the two up-projections.
            total = times.seconds("norm_backward", stream, 2) + times.seconds("add", stream, 2)
            total += times.seconds("add", tokens * shape.width, 3 if shape.gated and hidden else 2)
            total += times.seconds("rotation_backward", queries) + times.seconds("rotation_backward", keys)
            total += times.seconds("activation_backward", hidden)
        else:
            total = times.seconds("norm", stream, 2) + times.seconds("add", stream, 2)
            rotation = times.seconds("rotation", queries) + times.seconds("rotation", keys)
            total += rotation + times.seconds("activation", hidden)
        if shard.tp > 1 and shard.sequence_parallel:
            # Positions are gathered and scattered rank by rank, and reordered by a copy: once each for attention and
            # MLP.
            total += times.seconds("copy", tokens * shape.width, 2 * self._tp_blocks)
            total += times.seconds("split", 1, 2 / 3 if backward else 1 / 3)
        if moe:
            inner = shard.routed_rows * shape.expert_width / shard.local_experts
            total += times.seconds("dispatch_backward" if backward else "dispatch", shard.routed_rows * shape.width)
            total += times.seconds("activation_backward" if backward else "activation", inner, shard.local_experts)
            if backward:  # the gradients of single experts are copied into one tensor
                matrices = shape.num_up_projections + 1
                weights = shard.local_experts * experts.expert_parameters(shape)
                total += times.seconds("copy", weights / matrices, matrices)
        return total

    @property
    def _tp_blocks(self) -> int:
        """Blocks that tensor parallelism gathers before and scatters after: attention, and the MLP if there is one."""
        return 1 + (mlp.hidden_width(self.shape, self.moe) > 0)

    def _tensor(self) -> float:
        """Exposed traffic of tensor parallelism in one pass."""
        if self.shard.tp == 1:
            return 0.0
        # Attention gathers its inputs and scatters its result, and backward the other way around.
        mean_width = (self.shape.width + attention.input_width(self.shape)) / 2
        once = self._around_block(mean_width) + (self._tp_blocks - 1) * self._around_block(self.shape.width)
        return once * ((1 - self.overheads.tp_overlap) if self.software.overlap_tp_comm else 1.0)

    def _around_block(self, width: float) -> float:
        """Traffic before and after a block, one of which is as wide as the other, in one pass."""
        network, group = self.network, self.local.tp_group
        stream = self.device.element_bytes * self.shard.tokens * width
        if not self.software.sequence_parallel:
            return all_reduce_time(network, group, stream)
        once = all_gather_time(network, group, stream) + reduce_scatter_time(network, group, stream)
        if self.device.measured:
            # The measured `split` of tensor-parallel layers includes collectives of a short stream already.
            short = min(stream, self.device.element_bytes * TP_PROBE_TOKENS * TP_PROBE_WIDTH)
            least = all_gather_time(network, group, short) + reduce_scatter_time(network, group, short)
            once = max(0.0, once - least)
        return once

    def _regathered(self, recompute: Recompute) -> float:
        """Exposed traffic of the inputs that the backward pass gathers again."""
        exposed = self.software.expose_regather and self.software.sequence_parallel
        if self.shard.tp == 1 or not exposed or not self.software.regathers(recompute):
            return 0.0
        widths = [self.shape.width] * (self._tp_blocks - 1)
        if recompute == "elementwise" or not self.shape.mla:  # a plan keeps MLA's latents gathered
            widths.append(attention.input_width(self.shape))
        total = 0.0
        for elements in (self.shard.tokens * width for width in widths):
            total += all_gather_time(self.network, self.local.tp_group, self.device.element_bytes * elements)
            if self.device.measured:
                total += self.device.measured.seconds("copy", elements)
        return total

    def _dispatch_times(self, dispatch: TokenDispatch) -> tuple[float, float]:
        """Seconds in which the tokens, or one part of them, are sent one way.

        On what another part may be under way meanwhile, and over levels inside it, which a part passes when it is next.
        """
        shape, shard, software, width = self.shape, self.shard, self.software, self.device.element_bytes
        network, group = self.network, self.local.ep_group
        tokens = shard.tokens / shard.tp * software.expert_imbalance / dispatch.chunks
        if dispatch.deduplicated:
            return level_dispatch_times(network, group, width * shape.width, tokens, shape.top_k)
        if software.dedup_dispatch:
            return dedup_dispatch_time(network, group, width * shape.width, tokens, shape.top_k), 0.0
        return all_to_all_time(network, group, width * experts.exchanged_elements(shard) / dispatch.chunks), 0.0

    def _copied_times(self) -> tuple[float, float]:
        """Seconds, forward and backward, for which tokens sent once are copied longer than a copy for every expert is.

        Such copies are made where they leave and put in order where they arrive; rows of tokens sent once are made for
        every level, and a copy for every expert where that is held.
        """
        top_k, shard, width = self.shape.top_k, self.shard, self.shape.width
        made = top_k + sum(rows for _, rows in dispatch_rows(self.local.ep_group, top_k))
        more = max(0.0, made / (2 * top_k) - 1)
        if times := self.device.measured:
            each = shard.routed_rows * width
            return more * times.seconds("dispatch", each), more * times.seconds("dispatch_backward", each)
        moved = self.overheads.dispatch_bytes_moved * shard.routed_rows * width * self.device.element_bytes / 2
        return elementwise_time(self.device, more * moved, 0), elementwise_time(self.device, 1.5 * more * moved, 0)

    def _expert(self, dispatch: TokenDispatch, compute: float, routed: float) -> float:
        """Exposed traffic of experts in one pass: dispatch and combine of every part, less what is hidden.

        By `compute`, another microbatch's pass; or by the experts' own matmuls, which take `routed` seconds, if parts
        of the tokens are sent one after another.
        """
        software, chunks = self.software, dispatch.chunks
        once, inside = self._dispatch_times(dispatch)
        if chunks > 1:  # one way of the first part and one of the last; others while parts compute
            meanwhile = 2 * (chunks - 1) * once
            return 2 * (once + chunks * inside) + exposed_time(meanwhile, routed, self.overheads.contention)
        once += inside
        if software.expert_tp > 1:
            held = self.device.element_bytes * experts.exchanged_elements(self.shard)
            once += all_gather_time(self.network, self.local.etp_group, held * software.expert_tp)
        return exposed_time(2 * once, compute, self.overheads.contention) if software.overlap_ep_comm else 2 * once

    def _context(self, core: float, *, backward: bool) -> float:
        """Ring traffic of keys and values that attention does not hide; or Ulysses' all-to-alls."""
        if self.shard.cp == 1:
            return 0.0
        network, group, width = self.network, self.local.cp_group, self.device.element_bytes
        if not self.shard.ring:
            inwards, outwards = attention.ulysses_elements(self.shard)
            return all_to_all_time(network, group, width * inwards) + all_to_all_time(network, group, width * outwards)
        elements, turns = attention.key_value_elements(self.shard), self.shard.cp - 1
        busy = turns * ring_turn_time(network, group, width * elements)
        if backward:  # keys and values once more, and their gradients
            busy += turns * ring_turn_time(network, group, self.software.ring_gradient_bytes * elements)
        return max(0.0, busy - core) if self.software.overlap_ring else busy
