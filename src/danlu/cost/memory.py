"""Memory of one rank: states under any sharding, activations in flight, logits, buffers.

States: parameters, gradients and optimizer states divided by the ranks each is sharded over (Rajbhandari et al.,
"ZeRO", 2020; Wu et al., PaRO, 2023). Activations of a layer: Korthikanti et al. (2022), equations 1 to 6,
extended to gated and grouped-query layers and to experts. In flight: stage i of 1F1B holds p − i microbatches (SC
2021), interleaved schedules (p − 1)/(p·v) more.
"""

from dataclasses import dataclass

from danlu.cost.layer_time import LocalShape
from danlu.cost.model_shape import ModelShape
from danlu.cost.software import Sharding, ShardScope, Software
from danlu.cost.stage_contents import RankParameters, StageContents
from danlu.spec.plan import PipelineSchedule

CONTEXT_BYTES = 1.65e9
"""Bytes on an accelerator before any tensor: the driver's context and its kernels.

1,573 MiB on an A100 by nvidia-smi in BigScience's chronicle of BLOOM.
"""
COMMUNICATOR_BYTES = 0.4e9
"""Bytes of one communicator: 24 channels with 4 MiB per protocol and direction, NCCL's defaults on a node."""
FRAGMENTATION = 1.06
"""Reserved over allocated memory at the peak: blocks that no request fits into."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Memory of the fullest rank in bytes, by kind."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float
    """Gathered parameters of sharded layers, and the buckets that gradients and parameters are sent in."""
    process_groups: int
    """Process groups with open communicators."""

    @property
    def allocated(self) -> float:
        """Bytes of tensors at the peak."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.logits + self.buffers

    @property
    def reserved(self) -> float:
        """Bytes that the allocator holds."""
        return FRAGMENTATION * self.allocated

    @property
    def device_bytes(self) -> float:
        """Everything on the device, with context and communicators."""
        return self.device_bytes_for(self.allocated)

    def device_bytes_for(self, allocated: float) -> float:
        """Everything on the device if tensors took `allocated` bytes at the peak."""
        return FRAGMENTATION * allocated + CONTEXT_BYTES + self.process_groups * COMMUNICATOR_BYTES


@dataclass(frozen=True)
class ReplicaCounts:
    """Ranks that hold the same parameters, in all and per sharding group."""

    total: int
    per_group: int

    def shards(self, split: ShardScope) -> int:
        """Ranks over which a state is sharded."""
        return {"none": 1, "group": self.per_group, "all": self.total}[split]


def state_bytes(
    held: RankParameters,
    dense: ReplicaCounts,
    experts: ReplicaCounts,
    sharding: Sharding,
    software: Software,
    *,
    unsharded: bool = False,
) -> tuple[float, float, float]:
    """Bytes of parameters, gradients (`unsharded` until the last microbatch) and optimizer states of one rank."""

    def split(bytes_each: float, over: ShardScope) -> float:
        return bytes_each * (held.dense / dense.shards(over) + held.experts / experts.shards(over))

    parameters = split(software.parameter_bytes, sharding.parameters)
    if sharding.parameters != "none" and not software.keep_half_parameters:
        parameters = 0.0
    gradients = split(software.gradient_bytes, "none" if unsharded else sharding.gradients)
    optimizer = split(software.optimizer_bytes, sharding.optimizer)
    if software.gradient_bytes == 2:
        optimizer += split(4, sharding.optimizer)  # the update needs them in fp32
    elif software.unfused_grad_accumulation:
        gradients += split(2, "none")  # those of one microbatch, before they are accumulated
    return parameters, gradients, optimizer


def layer_activation_bytes(
    shape: ModelShape, local: LocalShape, software: Software, *, moe: bool, fp8: bool = False
) -> float:
    """Bytes that one layer saves per microbatch for its backward pass; with `fp8`, matmul inputs take one byte each."""
    tokens = local.sequences * local.length / local.cp
    stream = tokens * shape.width / (local.tp if software.sequence_parallel else 1)
    each = float(software.activation_bytes)
    if software.recompute == "full":
        return each * stream
    if software.recompute == "alternate":
        return _alternate_mm_bytes(shape, local, software, tokens, stream, moe)
    if software.recompute == "elementwise" and not software.preallocate_gradients:
        return _selective_bytes(shape, local, software, tokens, stream, moe)
    width = 1.0 if fp8 else each
    attention = _attention_bytes(shape, local, software, tokens, width)
    # Inputs of both norms, and of the matmuls after them.
    inputs = tokens * shape.width if software.keep_gathered_inputs else stream
    kept = 2 * each * stream + (0.0 if software.recompute == "elementwise" else 2 * width * inputs)
    if software.eager and software.recompute != "elementwise":
        # What a compiler would fuse: fp32 results of norms, and fp32 copies of queries and keys for rotary positions.
        kept += 8.0 * stream
        if each < 4:
            kept += 4.0 * tokens * (shape.heads + shape.kv_heads) * shape.head_dim / local.tp
    return kept + attention + _mlp_bytes(shape, local, software, tokens, width, moe)


def activation_gradient_bytes(shape: ModelShape, local: LocalShape, software: Software, *, moe: bool) -> float:
    """Bytes of activation gradients while one layer's backward pass is in its feed-forward network.

    Of the hidden features before and after the activation, and of its input and output.
    """
    tokens = local.sequences * local.length / local.cp
    stream = tokens * shape.width / (local.tp if software.sequence_parallel else 1)
    hidden = tokens * (shape.shared_width if moe else shape.mlp_dim) / local.tp
    if moe:
        hidden += tokens * shape.top_k / local.tp * shape.expert_width * software.expert_imbalance
    return software.activation_bytes * ((shape.num_up_projections + 1) * hidden + 2.0 * stream)


def _alternate_mm_bytes(
    shape: ModelShape, local: LocalShape, software: Software, tokens: float, stream: float, moe: bool
) -> float:
    """Input and output of attention, and the first, third, fifth and seventh of seven matmuls (torchtitan)."""
    saved = tokens * (2 * shape.heads * shape.head_dim + shape.kv_heads * shape.v_head_dim) / local.tp
    hidden = tokens * (shape.shared_width if moe else shape.mlp_dim) / local.tp
    if moe:
        hidden += tokens * shape.top_k / local.tp * (shape.expert_width + 2 * shape.width) * software.expert_imbalance
    return software.activation_bytes * (saved + hidden + 2.0 * stream)


def _selective_bytes(
    shape: ModelShape, local: LocalShape, software: Software, tokens: float, stream: float, moe: bool
) -> float:
    """What Danlu's selective recompute saves: a block's input, outputs of matmuls, attention and MLP.

    The output of a row-parallel matmul is saved before and after its reduction; experts are a separate region, so that
    the norm before them and the copies of routed tokens, dispatched and combined, are saved too.
    """
    each = float(software.activation_bytes)
    summed = each * (tokens * shape.width + (stream if local.tp > 1 else 0.0))
    exchanged = 2 if local.cp > 1 else 1
    kept = each * stream + summed + exchanged * _attention_bytes(shape, local, software, tokens, each)
    hidden = shape.shared_width if moe else shape.mlp_dim
    kept += each * shape.num_up_projections * tokens * hidden / local.tp + (summed if hidden else 0.0)
    if not moe:
        return kept
    rows = tokens * shape.top_k / local.tp * software.expert_imbalance
    return kept + each * (3.0 * stream + rows * (4.0 * shape.width + shape.num_up_projections * shape.expert_width))


def _attention_bytes(shape: ModelShape, local: LocalShape, software: Software, tokens: float, width: float) -> float:
    """Queries, keys and values, the output, and scores if they are saved."""
    heads, groups = shape.heads / local.tp, max(1, shape.kv_heads // local.tp)
    each = software.activation_bytes
    inputs = each * tokens * (heads * shape.head_dim + groups * (shape.head_dim + shape.v_head_dim))
    kept = inputs + width * tokens * heads * shape.v_head_dim
    if shape.mla:
        low = shape.mla
        kept += each * tokens * (2 * low.q_lora_rank + 2 * low.kv_lora_rank + low.qk_rope_head_dim)
        if software.recompute == "latent":
            kept -= inputs
    if software.attention == "fused" and software.recompute != "selective":
        kept += 5.0 * local.sequences * heads * local.length**2
    return kept


def _mlp_bytes(
    shape: ModelShape, local: LocalShape, software: Software, tokens: float, width: float, moe: bool
) -> float:
    """Bytes saved by the feed-forward network, or by router, experts and shared experts."""
    each = software.activation_bytes
    copies = float(each * shape.num_up_projections) + (0.0 if software.recompute == "elementwise" else width)
    if software.eager and shape.gated and software.recompute != "elementwise":
        copies += each  # the gate after its activation
    hidden = tokens * (shape.shared_width if moe else shape.mlp_dim) / local.tp * copies
    if not moe:
        return hidden
    rows = tokens * shape.top_k / local.tp * software.expert_imbalance
    # A routed token's input, its combined copy, and the experts' hidden features; router scores in fp32.
    routed = rows * ((each + width) * shape.width + copies * shape.expert_width)
    return hidden + routed + 4.0 * 2 * tokens / local.tp * shape.experts


def p2p_buffer_bytes(
    contents: StageContents, local: LocalShape, shape: ModelShape, flight: float, software: Software
) -> float:
    """Bytes of a stage's outputs kept beside its activations, and of one more microbatch being received.

    Only if send buffers are not freed at once, as in DeepSpeed's pipeline.
    """
    if not software.serial_p2p or not contents.layers:
        return 0.0
    stream = software.activation_bytes * local.sequences * local.length / local.cp * shape.width
    kept = contents.layers * stream if software.recompute == "full" else stream
    return flight * stream + kept


def microbatches_in_flight(
    rank: int, pp: int, stages_per_rank: int, microbatches: int, schedule: PipelineSchedule
) -> float:
    """Most microbatches whose activations a rank holds at once, over all its stages."""
    if schedule == "gpipe":
        return float(microbatches)
    if pp == 1:
        return 1.0
    if schedule == "interleaved":
        ahead = (pp - rank - 1) * 2 + (stages_per_rank - 1) * pp + 1
        return min(ahead, microbatches * stages_per_rank) / stages_per_rank
    return float(min(pp - rank if schedule == "1f1b" else pp, microbatches))


def logits_memory(shape: ModelShape, local: LocalShape, software: Software) -> float:
    """Bytes of the logits of one microbatch at the loss."""
    tokens = local.sequences * local.length / local.cp
    return tokens * shape.vocabulary / local.tp * software.logit_bytes


@dataclass(frozen=True)
class GatheredBytes:
    """Bytes of temporarily unsharded parameters and gradients."""

    persistent: float = 0.0
    """All parameters of the rank, without resharding."""
    layers: float = 0.0
    """Two layers, and the gradients of one, in the passes of layers."""
    head: float = 0.0
    """The head, during the loss."""


def gathered_bytes(
    shape: ModelShape,
    held: RankParameters,
    contents: StageContents,
    tp: int,
    sharding: Sharding,
    software: Software,
    reshards: bool,
) -> GatheredBytes:
    """Unsharded parameters and gradients beside the sharded states."""
    if sharding.parameters == "none":
        return GatheredBytes()
    table = shape.vocabulary * shape.width / tp if contents.has_embedding or contents.has_head else 0.0
    count = held.dense + held.experts
    layer = max(0.0, count - table) / max(1, contents.layers)
    if not reshards:
        return GatheredBytes(count * software.parameter_bytes, layer * software.gradient_bytes)
    layers = layer * (2 * software.parameter_bytes + software.gradient_bytes)
    return GatheredBytes(0.0, layers, table * software.parameter_bytes)
