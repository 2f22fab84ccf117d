"""Recompute: what the forward pass of a layer keeps, and what its backward pass runs again."""

from typing import Literal, NamedTuple

from danlu.spec.recompute import RecomputeLayers, RecomputeMode

Recompute = Literal["none", "selective", "elementwise", "alternate", "latent", "full"]
"""Recomputed in the backward pass: `none`; `selective`, core attention (Megatron's `--recompute-granularity
selective`); `elementwise`, all but matmuls and attention (a plan's "selective"); `alternate`, all but every second
matmul and attention (torchtitan's selective `op`); `latent`, MLA's up-projections; `full`, everything (Megatron's
`--recompute-granularity full`)."""

PLAN_MODES: dict[RecomputeMode, Recompute] = {"none": "none", "selective": "elementwise", "full": "full"}
"""The modes of a plan."""


def plan_recompute(recompute: RecomputeMode | RecomputeLayers, layers: int) -> Recompute | tuple[Recompute, ...]:
    """A plan's recompute: one mode, or that of every layer."""
    if isinstance(recompute, RecomputeLayers):
        return tuple(PLAN_MODES[mode] for mode in recompute.modes(layers))
    return PLAN_MODES[recompute]


class Rerun(NamedTuple):
    """Shares of a layer's forward pass that its backward pass runs again."""

    attention: float = 0.0
    """Scores, softmax and weighted sum."""
    linear: float = 0.0
    elementwise: float = 0.0
    collectives: float = 0.0


RERUN: dict[Recompute, Rerun] = {
    "none": Rerun(),
    "selective": Rerun(attention=1),
    "elementwise": Rerun(elementwise=1),
    "alternate": Rerun(linear=0.5, elementwise=1),
    "latent": Rerun(),  # and the up-projections, see `attention.latent_matmuls`
    "full": Rerun(attention=1, linear=1, elementwise=1, collectives=1),
}

SAVED_BY_SELECTIVE: dict[str, tuple[str, ...]] = {
    "aten": (
        "mm",
        "bmm",
        "addmm",
        "baddbmm",
        "_grouped_mm",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    ),
    "_c10d_functional": ("reduce_scatter_tensor", "all_to_all_single"),
    "danlu": ("block_scaled_mm", "grouped_mm", "grouped_mm_input_gradient", "ring_attention", "masked_attention"),
}
"""Operators, by namespace, whose results a plan's "selective" keeps: matmuls, attention, and what came over the
network."""


class Saving(NamedTuple):
    """How a layer's activations are saved for its backward pass."""

    mode: Recompute
    element_bytes: int
    """Of an activation."""
    matmul_bytes: float
    """Of an element that only a matmul reads: 1 in fp8."""
    gathered_inputs: bool
    """What tensor parallelism gathered for a matmul is kept, instead of gathered again."""
    scores: bool
    """Attention scores go through memory, as before flash attention."""
    by_operator: bool
    """`elementwise` keeps the results of operators, as PyTorch's selective checkpointing does, not inputs of fused
    kernels."""
