"""What a training program does that a plan does not say: how states are split, what is hidden, which kernels.

The defaults are Danlu's own program; published runs of other programs set what they did.
"""

from dataclasses import dataclass
from math import inf
from typing import Literal

Split = Literal["none", "group", "all"]
"""Over which ranks a state is split: none, one group of replicas, all replicas (PaRO's N, I and G)."""
Attention = Literal["flash", "native", "fused"]
"""Kernels of attention: flash attention that runs on any chip; libraries written for this generation of the chip, for
products too (cuDNN and Transformer Engine on Hopper and later); or, before flash attention, scores in memory."""
Recompute = Literal["none", "selective", "elementwise", "alternate", "latent", "full"]
"""Computed again in the backward pass: nothing; the core of attention; all but matrix products and attention; all but
every second product and attention; the up-projections of latent attention; everything."""


@dataclass(frozen=True)
class Sharding:
    """Over which data-parallel ranks each state is split (Wu et al., "Rethinking memory and communication costs for
    efficient large language model training", 2023).

    None, none, all is ZeRO-1; none, all, all ZeRO-2; all three all ZeRO-3; all three group HSDP.
    """

    parameters: Split = "all"
    gradients: Split = "all"
    optimizer: Split = "all"


REPLICATED = Sharding("none", "none", "none")
ZERO_1 = Sharding("none", "none", "all")
ZERO_2 = Sharding("none", "all", "all")
ZERO_3 = Sharding("all", "all", "all")
HYBRID = Sharding("group", "group", "group")


@dataclass(frozen=True)
class Latent:
    """Latent attention (DeepSeek-AI, "DeepSeek-V2", 2024): ranks of the down-projections, widths of a head's parts."""

    query_rank: int
    key_value_rank: int
    rotary: int
    key: int
    value: int


@dataclass(frozen=True, kw_only=True)
class Software:
    """How a program runs a plan."""

    sharding: Sharding | None = None
    """As the plan's `replicate` and `shard` say when left out."""
    attention: Attention = "native"
    sequence_parallel: bool = True
    recompute: Recompute | None = None
    """As the plan says when left out."""
    recomputed_layers: int | None = None
    """Layers computed again; all of them when left out."""
    expert_tp: int = 1
    """Tensor parallelism inside an expert."""
    imbalance: float = 1.0
    """Tokens of the fullest expert rank over the mean: 1 is balanced by force or by dropping tokens."""
    hides_gradients: bool = True
    """Reduce gradients, and gather parameters, while computing."""
    hides_tensor: bool = False
    hides_experts: bool = False
    """Send tokens to experts while another microbatch computes."""
    hides_transfers: bool = True
    """Send between stages while computing; only the interleaved schedules can."""
    sends_once: bool = False
    """Send a token once to every node and rank that needs it (DeepEP, HybridEP), not once an expert."""
    fuses_experts: bool = False
    """Run the products of all experts in one kernel, with the activation in it, not one call an expert."""
    fp8_attention: bool = False
    """Run attention in fp8 too where linear layers do."""
    graphed: bool = False
    """Replay the whole step as one recorded graph: no kernel waits for the host."""
    predicts_ahead: int = 0
    """Tokens predicted ahead beside the next one, each by a layer and a pass through the head of its own (DeepSeek-AI,
    "DeepSeek-V3", 2024, section 2.2)."""
    gradient_bytes: int = 4
    """Bytes of a gradient as it is kept and reduced."""
    activation_bytes: int = 2
    """Bytes of an element of the activations that are kept and sent."""
    parameter_bytes: int = 2
    """Bytes of a parameter as it is computed with and gathered; the fp32 copy is the optimiser's."""
    optimizer_bytes: int = 12
    """Bytes of a parameter's states: its fp32 copy and two moments."""
    builds_whole: bool = False
    """Make all parameters of a rank on its chip before they are split between replicas, as Megatron does unless told of
    another device to make them on."""
    keeps_half: bool = True
    """Keep half-precision parameters beside the fp32 copy even where they are split like it."""
    accumulates_apart: bool = False
    """Add up gradients of microbatches in a pass over memory of its own, not in the product that makes them."""
    reduces_whole: bool = False
    """Give every rank all reduced gradients even where it needs only its part for its share of the optimiser."""
    serial_transfers: bool = False
    """Send and receive between stages one after the other, as DeepSpeed's pipeline does, not both at once."""
    embedding_slots: bool = False
    """Count the embedding and the head as a layer each when stages are cut."""
    logit_bytes: float = 14.0
    """Bytes held a logit at the loss: half precision, fp32, its log-softmax and their gradient; less where fused."""
    extra_groups: int = 0
    """Groups of ranks with channels open beside one an axis and one of all."""
    bucket_bytes: float = 0.0
    """Bytes of buffers that gradients and parameters are sent in."""
    synchronises_every_microbatch: bool = True
    """With split gradients or parameters, reduce after every microbatch, as FSDP does; Megatron reduces once a step."""
    keeps_gathered: bool = False
    """Keep what tensor parallelism gathered for a product, not gather it again in the backward pass."""
    defers_in_pipeline: bool = True
    """In a pipeline keep gradients whole and reduce them after the last microbatch, as torch's pipelining does."""
    preallocates: bool = True
    """Make room for every gradient at the start, as Megatron does, not when it comes, as PyTorch does."""
    eager: bool = False
    """Keep what each operator needs by itself, as PyTorch does without a compiler."""
    blocking_launches: bool = False
    """Wait for every kernel before the next is launched, as a remedy for hangs."""
    exchanges_heads: bool = False
    """Share sequences by exchanging heads against positions around attention, not by passing keys and values round."""
    ring_bandwidth: float = inf
    """Bytes a second that one group of ranks gets between nodes, where its library drives one adapter for a group."""
    latent: Latent | None = None
    window: int = 0
    """Tokens that a token attends to in layers with a sliding window; 0 is none."""
    windowed: float = 0.0
    """Share of layers with a sliding window."""


OURS = Software(
    keeps_half=False, exchanges_heads=True, keeps_gathered=True, eager=True, preallocates=False, logit_bytes=10.0
)
"""The program of this repository, not compiled; what it keeps is as its dry run has it."""
