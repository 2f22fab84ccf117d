"""Experts of `transformers` mixtures, found by their class: over `ep`, at once with `use_kernels`, in a dry run evenly.

Shapes: T tokens, K experts of a token, D width, E experts, N token copies (T × K), F hidden width of an expert.
"""

from collections.abc import Callable, Iterator
from copy import copy as shallow_copy
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from danlu.comm.level_groups import LevelGroups
from danlu.framework.custom.construct import CustomModelError
from danlu.framework.custom.module_structure import ModuleStructure
from danlu.framework.decoder.moe import LocalDispatcher, SendInParts, through_experts
from danlu.ops.operators.experts import GroupedProducts
from danlu.parallel.expert import shard_experts
from danlu.spec.divisors import closest_divisor
from danlu.spec.plan import Plan


@dataclass(frozen=True)
class ExpertFamily:
    """How a class keeps the matrices of its experts: stacked, `gate_up_proj` (E × 2F × D) and `down_proj` (E × D × F).

    Its forward takes hidden states (T × D), chosen experts (T × K) and their weights (T × K), and its `_apply_gate`
    makes the inputs of `down_proj` out of the outputs of `gate_up_proj`.
    """

    transposed: bool = False
    """Matrices are stored for `x @ matrix`, not for `x @ matrix.T`."""
    bias: bool = False
    """Both have a bias, `gate_up_proj_bias` and `down_proj_bias`."""

    @property
    def parameters(self) -> frozenset[str]:
        """Names of the parameters, all of them stacked by expert."""
        names = ("gate_up_proj", "down_proj")
        return frozenset((*names, *(f"{name}_bias" for name in names if self.bias)))


EXPERT_FAMILIES = {
    "MixtralExperts": ExpertFamily(),
    "Qwen2MoeExperts": ExpertFamily(),
    "Qwen3MoeExperts": ExpertFamily(),
    "OlmoeExperts": ExpertFamily(),
    "DeepseekV3Experts": ExpertFamily(),
    "GptOssExperts": ExpertFamily(transposed=True, bias=True),
}
"""Known classes of `transformers`; a class of that name elsewhere may compute something else."""


def known_experts(module: nn.Module) -> dict[str, nn.Module]:
    """The experts of known families in a module, by name."""
    return {name: each for name, each in module.named_modules() if _family(each) is not None}


def _family(module: nn.Module) -> ExpertFamily | None:
    """The family of experts, or None; FSDP makes a subclass of a module's class, so its parents count."""
    for kind in type(module).__mro__:
        if kind.__module__.startswith("transformers.models.") and kind.__name__ in EXPERT_FAMILIES:
            family = EXPERT_FAMILIES[kind.__name__]
            names = {name for name, _ in module.named_parameters()}
            # another version of transformers may keep them in another way
            return family if names == family.parameters and hasattr(module, "_apply_gate") else None
    return None


def check_expert_parallelism(module: nn.Module, structure: ModuleStructure, plan: Plan) -> None:
    """Raise `CustomModelError` unless every layer's experts can be divided over the ranks of `ep`."""
    ep, known = plan.degrees.ep, known_experts(module)
    if not known:
        classes = ", ".join(EXPERT_FAMILIES)
        found = next(_unknown_experts(module), "")
        problem = f"the experts in {found} are not of a known class" if found else "the module has no experts"
        raise CustomModelError(
            "degrees.ep",
            f"is {ep}, but {problem}",
            f"ep = 1: `shard` shards their states; known are {classes} of transformers" if found else "ep = 1",
        )
    for name, experts in known.items():
        count = _count(experts)
        if count % ep:
            raise CustomModelError(
                "degrees.ep",
                f"is {ep}, but must divide the {count} experts of {name}",
                f"ep = {closest_divisor(ep, count)}",
            )
        if not any(name.startswith(f"{block}.") for block in structure.blocks):
            raise CustomModelError(
                "degrees.ep",
                f"is {ep}, but the experts {name} are in none of the layers",
                "name them in `model.blocks`",
            )
    if plan.compile:
        raise CustomModelError(
            "compile",
            f"is set and `degrees.ep` is {ep}, which is not tested together for a custom model",
            "compile = false",
        )
    modes = plan.recompute_modes(len(structure.blocks))
    for block, mode in zip(structure.blocks, modes, strict=True):
        if mode == "selective" and any(name.startswith(f"{block}.") for name in known):
            raise CustomModelError(
                "recompute",
                f"is selective for {block}, whose experts gather their parameters inside of it with `ep`",
                'recompute = "full" or "none"',
            )


def _unknown_experts(module: nn.Module) -> Iterator[str]:
    """Modules that look like routed experts: named so, and stacked or in a list."""
    for name, each in module.named_modules():
        is_stacked = any(parameter.ndim >= 3 for parameter in each.parameters(recurse=False))
        if "expert" in f"{name.rpartition('.')[2]} {type(each).__name__}".lower() and (
            is_stacked or isinstance(each, nn.ModuleList)
        ):
            yield f"`{name}` ({type(each).__module__}.{type(each).__qualname__})"


def apply_expert_parallel(module: nn.Module, mesh: DeviceMesh, levels: LevelGroups | None, chunks: int) -> None:
    """Keep this rank's experts of every layer, and reach the others as `ep` does; parameters stay global tensors."""
    for experts in known_experts(module).values():
        count = _count(experts)
        _replace_forward(experts, shard_experts(experts, mesh, levels, chunks), count)


def balance_experts(module: nn.Module) -> None:
    """Give every expert the same load, as FakeTensors have no values to choose by; `ep` that is applied stays."""
    for experts in known_experts(module).values():
        if not hasattr(experts, "dispatcher"):
            compute_at_once(experts)
        if isinstance(experts.dispatcher, LocalDispatcher):
            experts.dispatcher.assume_balanced = True


def compute_at_once(experts: nn.Module) -> None:
    """Compute all experts of a known family in one product for each of their matrices, on the rank that has them."""
    _replace_forward(experts, LocalDispatcher(), _count(experts))


def small_experts(experts: nn.Module, count: int, width: int, hidden: int) -> nn.Module:
    """Experts of the same class on the CPU with values of their own, whatever device their parameters are on."""
    family, copy = _family(experts), shallow_copy(experts)
    assert family is not None
    sizes = {"gate_up_proj": (2 * hidden, width), "down_proj": (width, hidden)}  # outputs and inputs
    copy._modules, copy._parameters = dict(experts._modules), {}
    if hasattr(copy, "num_experts"):  # what `transformers` divides tokens by
        copy.num_experts = count  # type: ignore[assignment]
    for name, (outputs, inputs) in sizes.items():
        shape = (inputs, outputs) if family.transposed else (outputs, inputs)
        copy.register_parameter(name, nn.Parameter(torch.randn(count, *shape, device="cpu") / inputs**0.5))
        if family.bias:
            copy.register_parameter(f"{name}_bias", nn.Parameter(torch.randn(count, outputs, device="cpu")))
    return copy


def _count(experts: nn.Module) -> int:
    return len(experts.get_parameter("down_proj"))


def _replace_forward(experts: nn.Module, dispatcher: nn.Module, count: int) -> None:
    """Send token copies through a dispatcher instead of the module's own forward, which needs all experts."""
    experts.add_module("dispatcher", dispatcher)
    experts.forward = partial(_forward, experts, count)


def _forward(experts: nn.Module, count: int, hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """What the module's own forward computes: every token's sum over its experts, by their weights."""
    chosen_N, top_k = index_TK.flatten(), index_TK.shape[-1]
    counts_E = torch.zeros(count, dtype=torch.int64, device=hidden_TD.device)
    counts_E.scatter_add_(0, chosen_N, torch.ones_like(chosen_N))
    dispatcher = experts.get_submodule("dispatcher")
    compute = partial(_compute, experts)
    y_TD = through_experts(hidden_TD, index_TK, weights_TK, top_k, counts_E, dispatcher, compute)
    return y_TD.to(hidden_TD.dtype)


def _compute(experts: nn.Module, x_ND: Tensor, counts: list[int] | Tensor | SendInParts) -> Tensor:
    """Transform token copies sorted by expert, `counts[e]` of them for the e-th expert held here.

    Instead of counts, a function that is given tokens as they are and what transforms copies, as often as it likes.
    """
    if callable(counts):
        return counts(x_ND, partial(_compute, experts))
    family = _family(experts)
    assert family is not None
    held = {
        name: weight.to_local() if isinstance(weight, DTensor) else weight
        for name, weight in experts.named_parameters()
    }
    products = GroupedProducts(counts, x_ND.device)
    multiply = products if family.transposed else products.by_transposes
    apply_gate: Callable[[Tensor], Tensor] = experts._apply_gate  # type: ignore[assignment]
    hidden = apply_gate(multiply(x_ND, held["gate_up_proj"], held.get("gate_up_proj_bias")))
    return multiply(hidden, held["down_proj"], held.get("down_proj_bias"))
