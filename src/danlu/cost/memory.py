"""Memory of one rank: states under any sharding, microbatches in flight, buffers.

States: parameters, gradients and optimizer states divided by the ranks each is sharded over (Rajbhandari et al.,
"ZeRO", 2020; Wu et al., PaRO, 2023). Activations of a layer: `danlu.ops.layer`. In flight: stage i of 1F1B holds p − i
microbatches (SC 2021), interleaved schedules (p − 1)/(p·v) more.
"""

from dataclasses import dataclass

from danlu.cost.software import Sharding, ShardScope, Software
from danlu.cost.stage_contents import RankParameters, StageContents
from danlu.ops.embedding_head import table_parameters
from danlu.ops.layer_shard import LayerShard
from danlu.ops.model_shape import ModelShape
from danlu.spec.plan import PipelineSchedule

CONTEXT_BYTES = 1.65e9
"""Bytes on an accelerator before any tensor: the driver's context and its kernels.

1,573 MiB on an A100 by nvidia-smi in BigScience's chronicle of BLOOM.
"""
COMMUNICATOR_BYTES = 0.4e9
"""Bytes of one communicator: 24 channels with 4 MiB per protocol and direction, NCCL's defaults on a node."""
FRAGMENTATION = 1.06
"""Reserved over allocated memory at the peak: blocks that no request fits into."""

MASTER_BYTES = 4
"""Bytes of a parameter as the optimizer updates it, in fp32."""
EMA_BYTES = 4
"""Bytes of a parameter's average, in fp32."""


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
    is_master = sharding.parameters != "none" and not software.keep_half_parameters
    if is_master:
        parameters = 0.0
    gradients = split(software.gradient_bytes, "none" if unsharded else sharding.gradients)
    optimizer = split(software.optimizer_bytes + (EMA_BYTES if software.ema else 0), sharding.optimizer)
    if is_master and sharding.optimizer != sharding.parameters:
        # The fp32 copy is the parameters themselves, and the average is sharded like them.
        own = MASTER_BYTES + (EMA_BYTES if software.ema else 0)
        optimizer += split(own, sharding.parameters) - split(own, sharding.optimizer)
    if software.gradient_bytes == 2:
        optimizer += split(4, sharding.optimizer)  # the update needs them in fp32
    elif software.unfused_grad_accumulation:
        gradients += split(2, "none")  # those of one microbatch, before they are accumulated
    return parameters, gradients, optimizer


def p2p_buffer_bytes(contents: StageContents, shard: LayerShard, flight: float, software: Software) -> float:
    """Bytes of a stage's outputs kept beside its activations, and of one more microbatch being received.

    Only if send buffers are not freed at once, as in DeepSpeed's pipeline.
    """
    if not software.serial_p2p or not contents.layers:
        return 0.0
    stream = software.activation_bytes * shard.tokens * shard.model.width
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
    table = table_parameters(shape) / tp if contents.has_embedding or contents.has_head else 0.0
    count = held.dense + held.experts
    layer = max(0.0, count - table) / max(1, contents.layers)
    if not reshards:
        return GatheredBytes(count * software.parameter_bytes, layer * software.gradient_bytes)
    layers = layer * (2 * software.parameter_bytes + software.gradient_bytes)
    return GatheredBytes(0.0, layers, table * software.parameter_bytes)
