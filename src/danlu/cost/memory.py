"""Bytes of one rank: states under any sharding, activations in flight, logits, buffers.

States: parameters, gradients and optimiser states divided by the ranks each is split over (Rajbhandari et al., "ZeRO",
2020; Wu et al., PaRO, 2023). Activations of a layer: Korthikanti et al. (2022), equations 1 to 6, widened to gated and
grouped-query layers and to experts. In flight: stage i of 1F1B holds p − i microbatches (SC 2021), interleaved
schedules (p − 1)/(p·v) more.
"""

from dataclasses import dataclass

from danlu.cost.layer import Cut
from danlu.cost.shape import Shape
from danlu.cost.software import Sharding, Software, Split
from danlu.cost.stages import Held, Holding
from danlu.spec.plan import Schedule

CONTEXT = 1.65e9
"""Bytes that a program holds on an accelerator before it has a tensor: the driver's context and its kernels.

1,573 MiB on an A100 by nvidia-smi in BigScience's chronicle of BLOOM.
"""
COMMUNICATOR = 0.4e9
"""Bytes of one group's channels: 24 channels with 4 MiB for each protocol to either side, NCCL's defaults on a node."""
SLACK = 1.06
"""What the allocator reserves over what tensors take at the peak: blocks that no request fits into."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of the fullest rank, by kind."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float
    """Gathered parameters of sharded layers, and the buckets that gradients and parameters are sent in."""
    groups: int
    """Groups of ranks that keep channels open."""

    @property
    def allocated(self) -> float:
        """What tensors take at the peak."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.logits + self.buffers

    @property
    def reserved(self) -> float:
        """What the allocator holds."""
        return SLACK * self.allocated

    @property
    def device(self) -> float:
        """Everything on the device: with context and channels."""
        return self.with_allocated(self.allocated)

    def with_allocated(self, allocated: float) -> float:
        """Everything on the device if tensors took so much at the peak."""
        return SLACK * allocated + CONTEXT + self.groups * COMMUNICATOR


@dataclass(frozen=True)
class Replicas:
    """Ranks that hold the same parameters, and of how many a group consists."""

    all: int
    group: int

    def over(self, split: Split) -> int:
        """Ranks over which a state is split."""
        return {"none": 1, "group": self.group, "all": self.all}[split]


def state_bytes(
    held: Held, dense: Replicas, experts: Replicas, sharding: Sharding, software: Software, *, whole: bool = False
) -> tuple[float, float, float]:
    """Bytes of parameters, gradients (`whole` until the last microbatch) and optimiser states of one rank."""

    def split(bytes_each: float, over: Split) -> float:
        return bytes_each * (held.dense / dense.over(over) + held.experts / experts.over(over))

    parameters = split(software.parameter_bytes, sharding.parameters)
    if sharding.parameters != "none" and not software.keeps_half:
        parameters = 0.0
    gradients = split(software.gradient_bytes, "none" if whole else sharding.gradients)
    optimizer = split(software.optimizer_bytes, sharding.optimizer)
    if software.gradient_bytes == 2:
        optimizer += split(4, sharding.optimizer)  # the update needs them in fp32
    elif software.accumulates_apart:
        gradients += split(2, "none")  # a microbatch's own, before they are added up
    return parameters, gradients, optimizer


def layer_activations(shape: Shape, cut: Cut, software: Software, *, moe: bool, fp8: bool = False) -> float:
    """Bytes that one layer keeps of one microbatch for its backward pass; in fp8, inputs of products take one each."""
    tokens = cut.sequences * cut.length / cut.cp
    stream = tokens * shape.width / (cut.tp if software.sequence_parallel else 1)
    each = float(software.activation_bytes)
    if software.recompute == "full":
        return each * stream
    if software.recompute == "alternate":
        return _alternate(shape, cut, software, tokens, stream, moe)
    if software.recompute == "elementwise" and not software.preallocates:
        return _products(shape, cut, software, tokens, stream, moe)
    width = 1.0 if fp8 else each
    attention = _attention(shape, cut, software, tokens, width)
    # Inputs of both norms, and of the products behind them.
    inputs = tokens * shape.width if software.keeps_gathered else stream
    kept = 2 * each * stream + (0.0 if software.recompute == "elementwise" else 2 * width * inputs)
    if software.eager and software.recompute != "elementwise":
        # What a compiler would fuse away: what norms make in fp32, and fp32 copies of queries and keys to be rotated.
        kept += 8.0 * stream
        if each < 4:
            kept += 4.0 * tokens * (shape.heads + shape.kv_heads) * shape.head / cut.tp
    return kept + attention + _feed_forward(shape, cut, software, tokens, width, moe)


def layer_gradients(shape: Shape, cut: Cut, software: Software, *, moe: bool) -> float:
    """Bytes of gradients of activations while one layer's backward pass is in its feed-forward network.

    Of the hidden features before and after the activation, and of the stream on either side.
    """
    tokens = cut.sequences * cut.length / cut.cp
    stream = tokens * shape.width / (cut.tp if software.sequence_parallel else 1)
    hidden = tokens * (shape.shared_width if moe else shape.mlp) / cut.tp
    if moe:
        hidden += tokens * shape.top_k / cut.tp * shape.expert_width * software.imbalance
    return software.activation_bytes * ((shape.into + 1) * hidden + 2.0 * stream)


def _alternate(shape: Shape, cut: Cut, software: Software, tokens: float, stream: float, moe: bool) -> float:
    """Input and output of attention, and the first, third, fifth and seventh of seven products (torchtitan)."""
    saved = tokens * (2 * shape.heads * shape.head + shape.kv_heads * shape.value) / cut.tp
    hidden = tokens * (shape.shared_width if moe else shape.mlp) / cut.tp
    if moe:
        hidden += tokens * shape.top_k / cut.tp * (shape.expert_width + 2 * shape.width) * software.imbalance
    return software.activation_bytes * (saved + hidden + 2.0 * stream)


def _products(shape: Shape, cut: Cut, software: Software, tokens: float, stream: float, moe: bool) -> float:
    """What this program's selective recompute keeps: a block's input, results of products, attention and the network.

    A product that is summed over ranks is kept before and after; experts are a region by themselves, so that the norm
    before them and the copies of routed tokens, there and back, are kept too.
    """
    each = float(software.activation_bytes)
    summed = each * (tokens * shape.width + (stream if cut.tp > 1 else 0.0))
    exchanged = 2 if cut.cp > 1 else 1
    kept = each * stream + summed + exchanged * _attention(shape, cut, software, tokens, each)
    hidden = shape.shared_width if moe else shape.mlp
    kept += each * shape.into * tokens * hidden / cut.tp + (summed if hidden else 0.0)
    if not moe:
        return kept
    rows = tokens * shape.top_k / cut.tp * software.imbalance
    return kept + each * (3.0 * stream + rows * (4.0 * shape.width + shape.into * shape.expert_width))


def _attention(shape: Shape, cut: Cut, software: Software, tokens: float, width: float) -> float:
    """Queries, keys and values, the output, and whatever of the scores is kept."""
    heads, groups = shape.heads / cut.tp, max(1, shape.kv_heads // cut.tp)
    each = software.activation_bytes
    inputs = each * tokens * (heads * shape.head + groups * (shape.head + shape.value))
    kept = inputs + width * tokens * heads * shape.value
    if shape.latent:
        low = shape.latent
        kept += each * tokens * (2 * low.query_rank + 2 * low.key_value_rank + low.rotary)
        if software.recompute == "latent":
            kept -= inputs
    if software.attention == "fused" and software.recompute != "selective":
        kept += 5.0 * cut.sequences * heads * cut.length**2
    return kept


def _feed_forward(shape: Shape, cut: Cut, software: Software, tokens: float, width: float, moe: bool) -> float:
    """Bytes kept by the feed-forward network, or by router, experts and shared experts."""
    each = software.activation_bytes
    copies = float(each * shape.into) + (0.0 if software.recompute == "elementwise" else width)
    if software.eager and shape.gated and software.recompute != "elementwise":
        copies += each  # the gate after its own activation
    hidden = tokens * (shape.shared_width if moe else shape.mlp) / cut.tp * copies
    if not moe:
        return hidden
    rows = tokens * shape.top_k / cut.tp * software.imbalance
    # A routed token's input, its copy back, and the experts' hidden features; scores in fp32.
    routed = rows * ((each + width) * shape.width + copies * shape.expert_width)
    return hidden + routed + 4.0 * 2 * tokens / cut.tp * shape.experts


def pipe_buffers(holding: Holding, cut: Cut, shape: Shape, flight: float, software: Software) -> float:
    """Bytes of a stage's outputs that are kept beside its activations, and of one more microbatch on its way in.

    Only where sends are not freed at once, as in DeepSpeed's pipeline.
    """
    if not software.serial_transfers or not holding.layers:
        return 0.0
    stream = software.activation_bytes * cut.sequences * cut.length / cut.cp * shape.width
    kept = holding.layers * stream if software.recompute == "full" else stream
    return flight * stream + kept


def in_flight(rank: int, pp: int, stages_per_rank: int, microbatches: int, schedule: Schedule) -> float:
    """Microbatches whose activations of all its stages a rank holds at once, at most."""
    if schedule == "gpipe":
        return float(microbatches)
    if pp == 1:
        return 1.0
    if schedule == "interleaved":
        ahead = (pp - rank - 1) * 2 + (stages_per_rank - 1) * pp + 1
        return min(ahead, microbatches * stages_per_rank) / stages_per_rank
    return float(min(pp - rank if schedule == "1f1b" else pp, microbatches))


def logit_bytes(shape: Shape, cut: Cut, software: Software) -> float:
    """Bytes of the logits of one microbatch at the loss."""
    tokens = cut.sequences * cut.length / cut.cp
    return tokens * shape.vocabulary / cut.tp * software.logit_bytes


@dataclass(frozen=True)
class Gathered:
    """Bytes that are whole for a moment where states are split."""

    always: float = 0.0
    """All parameters of the rank, without resharding."""
    layers: float = 0.0
    """Two layers, and the gradients of one, in the passes of layers."""
    head: float = 0.0
    """The head, while the loss is taken."""


def gathered(
    shape: Shape, held: Held, holding: Holding, tp: int, sharding: Sharding, software: Software, reshards: bool
) -> Gathered:
    """What is whole beside the split states."""
    if sharding.parameters == "none":
        return Gathered()
    table = shape.vocabulary * shape.width / tp if holding.embedding or holding.head else 0.0
    count = held.dense + held.experts
    layer = max(0.0, count - table) / max(1, holding.layers)
    if not reshards:
        return Gathered(count * software.parameter_bytes, layer * software.gradient_bytes)
    layers = layer * (2 * software.parameter_bytes + software.gradient_bytes)
    return Gathered(0.0, layers, table * software.parameter_bytes)
