"""Traits of the training software that a plan does not state: sharding of states, overlap, kernels.

`DANLU` describes this repository; published runs describe other software.
"""

from dataclasses import dataclass
from math import inf
from typing import Literal, NamedTuple

from danlu.ops.newton_schulz import MuonTraits
from danlu.ops.recompute import Recompute, Saving
from danlu.spec.plan import Plan, TokenDispatcher

ShardScope = Literal["none", "group", "all"]
"""Ranks over which a state is sharded: none, one group of replicas, all replicas (PaRO's N, I and G)."""
AttentionKernel = Literal["flash", "native", "fused"]
"""Attention kernels: `flash`, portable flash attention; `native`, libraries for this generation of the chip, for
matmuls too (cuDNN and Transformer Engine on Hopper and later); `fused`, scores in memory with fused softmax, as
Megatron-LM before flash attention."""


@dataclass(frozen=True)
class Sharding:
    """Over which data-parallel ranks each state is sharded (Wu et al., "Rethinking memory and communication costs for
    efficient large language model training", 2023).

    None, none, all is ZeRO-1; none, all, all ZeRO-2; all three all ZeRO-3; all three group HSDP.
    """

    parameters: ShardScope = "all"
    gradients: ShardScope = "all"
    optimizer: ShardScope = "all"


REPLICATED = Sharding("none", "none", "none")
ZERO_1 = Sharding("none", "none", "all")
ZERO_2 = Sharding("none", "all", "all")
ZERO_3 = Sharding("all", "all", "all")
HSDP = Sharding("group", "group", "group")
HSDP_ZERO_1 = Sharding("group", "group", "all")


class TokenDispatch(NamedTuple):
    """How the tokens of a layer reach the experts of other ranks, as a plan's keys say."""

    deduplicated: bool = False
    """`token_dispatcher` is deduplicated: once to every unit of each level that needs a token, level by level."""
    chunks: int = 1
    """`dispatch_chunks`: parts of the tokens that are sent one after another, each while the one before is computed;
    of deduplicated ones over the outermost level."""

    @property
    def dispatcher(self) -> TokenDispatcher:
        """The plan's word for it."""
        return "deduplicated" if self.deduplicated else "alltoall"

    @property
    def words(self) -> str:
        """For tables."""
        parts = f"in {self.chunks} parts" if self.chunks > 1 else ""
        if self.deduplicated:
            return f"deduplicated, {parts}" if parts else "deduplicated"
        return parts or "all at once"


ALL_AT_ONCE = TokenDispatch()
"""A copy for each chosen expert, in one all-to-all: what a plan does that says nothing else."""


def token_dispatch(plan: Plan) -> TokenDispatch:
    """That of a plan."""
    return TokenDispatch(plan.token_dispatcher == "deduplicated", plan.dispatch_chunks)


@dataclass(frozen=True, kw_only=True)
class Software:
    """How training software runs a plan."""

    sharding: Sharding | None = None
    """From the plan's `replicate` and `shard` if None."""
    attention: AttentionKernel = "native"
    sequence_parallel: bool = True
    recompute: Recompute | tuple[Recompute, ...] | None = None
    """Of all layers, or of each; from the plan if None."""
    recomputed_layers: int | None = None
    """Layers with recompute; all if None."""
    recompute_stops_early: bool = True
    """End full recompute before a layer's last matmul, whose result nothing needs, as PyTorch's non-reentrant
    checkpointing and XLA do; Megatron's own runs all of the layer again."""
    expert_tp: int = 1
    """Tensor parallelism inside an expert."""
    expert_imbalance: float = 1.0
    """Tokens of the fullest expert rank over the mean: 1 is forced balance or token dropping."""
    overlap_grad_reduce: bool = True
    """Reduce gradients and gather parameters while computing."""
    compiled_gathers: bool = False
    """A compiler schedules gathers and reductions of sharded parameters, and the chip moves them without its cores, as
    XLA does on TPUs; otherwise they are kernels that compete with compute."""
    overlap_tp_comm: bool = False
    overlap_ep_comm: bool = False
    """Send tokens to experts while another microbatch computes."""
    overlap_p2p_comm: bool = True
    """Send between stages while computing; only the interleaved schedules can."""
    dedup_dispatch: bool = False
    """Send a token once to every node and rank that needs it (DeepEP, HybridEP), not once per expert."""
    dispatch: TokenDispatch = ALL_AT_ONCE
    dispatch_choices: tuple[TokenDispatch, ...] = ()
    """Of these each layer takes what is best, instead of `dispatch`: a bound on the time with any of them."""
    fused_grouped_gemm: bool = False
    """Run the matmuls of all experts in one kernel, with the activation in it, not one call per expert."""
    quantized_input_bytes: float = 0.0
    """Bytes of an element that is kept for a quantized matmul, with its scale; 0: one in fp8, else an activation's."""
    fp8_attention: bool = False
    """Run attention in fp8 too if linear layers do."""
    graph_capture: bool = False
    """Replay the full step as one CUDA graph: no kernel waits for the host."""
    mtp_layers: int = 0
    """Multi-token prediction: tokens predicted beyond the next one, each with its own layer and pass through the head
    (DeepSeek-AI, "DeepSeek-V3", 2024, section 2.2)."""
    gradient_bytes: int = 4
    """Bytes of a gradient as stored and reduced."""
    activation_bytes: int = 2
    """Bytes of an activation element as saved and sent."""
    parameter_bytes: int = 2
    """Bytes of a parameter as used and gathered; the fp32 copy is an optimizer state."""
    optimizer_bytes: int = 12
    """Bytes of a parameter's optimizer states: its fp32 copy and two moments."""
    ema: bool = False
    """Keep an average of the parameters in fp32, sharded like the optimizer's states."""
    muon: MuonTraits | None = None
    """Muon for some matrices, which then have one moment instead of two; AdamW for all parameters if None."""
    init_unsharded: bool = False
    """Initialize all parameters of a rank on its chip before they are sharded over replicas, as Megatron does unless it
    is given a meta device or the CPU."""
    keep_half_parameters: bool = True
    """Keep half-precision parameters beside the fp32 copy even if they are sharded like it."""
    unfused_grad_accumulation: bool = False
    """Accumulate gradients of microbatches in a separate pass over memory, not in the weight-gradient matmul."""
    all_reduce_gradients: bool = False
    """All-reduce gradients even if a rank needs only its optimizer shard."""
    serial_p2p: bool = False
    """Send and receive between stages one after the other, as DeepSpeed's pipeline does, not both at once."""
    count_embedding_and_head: bool = False
    """Count the embedding and the head as a layer each when layers are split into stages."""
    logit_bytes: float = 14.0
    """Bytes held per logit at the loss: half precision, fp32, its log-softmax and their gradient; less where fused."""
    extra_process_groups: int = 0
    """Process groups beside one per axis and one of all ranks."""
    bucket_bytes: float = 0.0
    """Bytes of buffers that gradients and parameters are sent in."""
    reduce_every_microbatch: bool = True
    """With sharded gradients or parameters, reduce after every microbatch, as FSDP does; Megatron: once per step."""
    reduce_replicas_once: bool = False
    """With gradients that are sharded within groups, sum those of the groups once per step, not every microbatch."""
    keep_gathered_inputs: bool = False
    """Keep what tensor parallelism gathered for a matmul, instead of gathering it again in the backward pass."""
    expose_regather: bool = False
    """Gather such inputs again before the backward pass goes on, not while it computes gradients of inputs, as Megatron
    does; only then does it take time."""
    defer_reduce_in_pipeline: bool = True
    """In a pipeline keep gradients unsharded and reduce them after the last microbatch, as torch's pipelining does."""
    preallocate_gradients: bool = True
    """Allocate all gradients at the start, as Megatron does, not when they are computed, as PyTorch does."""
    eager: bool = False
    """Run every operator as a kernel of its own, which moves its inputs and its result through memory and saves what it
    needs separately, as PyTorch does without a compiler."""
    launch_blocking: bool = False
    """Wait for every kernel before the next is launched (`CUDA_LAUNCH_BLOCKING=1`), as a remedy for hangs."""
    ulysses: bool = False
    """Context parallelism by all-to-all between heads and positions, not by a ring of keys and values, unless the plan
    chooses the ring."""
    ring_gradient_bytes: int = 2
    """Bytes of a gradient of a key or value as a ring passes it on."""
    overlap_ring: bool = True
    """Pass keys and values around the ring while attention computes."""
    ring_bandwidth: float = inf
    """Bytes per second of one group between nodes, if its library drives one adapter per group."""
    pad_values: bool = False
    """Pad values of latent attention to the width of its keys, for attention kernels that have one width."""
    document_mask: bool = False
    """Keep documents apart by a mask in memory, with which attention kernels compute every pair of positions instead of
    the causal half."""
    sliding_window: int = 0
    """Tokens that a token attends to in layers with a sliding window; 0 is none."""
    sliding_window_fraction: float = 0.0
    """Share of layers with a sliding window."""

    def regathers(self, recompute: Recompute) -> bool:
        """Whether the backward pass of a layer gathers the inputs of its matmuls again, beside a full recompute."""
        return recompute == "elementwise" or (recompute == "none" and not self.keep_gathered_inputs)

    def saving(self, recompute: Recompute, fp8: bool) -> Saving:
        """How activations are saved; with `fp8`, matmul inputs take one byte each, if not said."""
        return Saving(
            recompute,
            element_bytes=self.activation_bytes,
            matmul_bytes=self.quantized_input_bytes or (1.0 if fp8 else float(self.activation_bytes)),
            gathered_inputs=self.keep_gathered_inputs,
            scores=self.attention == "fused",
            by_operator=not self.preallocate_gradients,
        )


DANLU = Software(
    keep_half_parameters=False,
    reduce_replicas_once=True,
    ulysses=True,
    ring_gradient_bytes=4,
    keep_gathered_inputs=True,
    expose_regather=True,
    pad_values=True,
    eager=True,
    preallocate_gradients=False,
    logit_bytes=10.0,
)
"""The software of this repository, not compiled; what it saves matches its dry run."""
