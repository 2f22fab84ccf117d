"""Norms, gated MLPs, experts and attention of a custom model, computed by Danlu's operators (`model.use_kernels`).

An RMS norm is known by its one weight, an MLP by its matrices, experts by their class in `transformers`. What they
compute is tried: a small copy and the operator are given the same input, and results and gradients must agree. A module
that differs keeps its own forward, with a warning. Attention is that of `transformers`, see `attention`.

Shapes: N rows, D features.
"""

import warnings
from collections.abc import Callable
from copy import copy as shallow_copy
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn

from danlu.framework.custom.attention import apply_attention
from danlu.framework.custom.construct import CustomModelError
from danlu.framework.custom.experts import EXPERT_FAMILIES, compute_at_once, known_experts, small_experts
from danlu.ops.operators.gated import gated_product
from danlu.ops.operators.norm import rms_norm
from danlu.torch_compat import without_fake_tensors

Forward = Callable[[nn.Module, Tensor], Tensor]

_SEPARATE = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Names of gate, up and down: of `transformers`, and of Llama's own code."""
_FUSED = ("gate_up_proj", "down_proj")
_EPSILONS = ("variance_epsilon", "eps", "epsilon")
_WIDTH, _HIDDEN = 16, 24
"""Of the copy of an MLP that is tried: what it computes does not depend on its size."""
_ROUNDINGS = 16
"""Roundings of a dtype that two ways to compute the same may be apart, of the largest value."""


def apply_kernels(module: nn.Module, dtype: torch.dtype, factory: str) -> dict[str, str]:
    """Compute what is known with Danlu's operators; returns the operator of every module that was found, by name.

    Raises `CustomModelError` if nothing is found, because the key would have no effect.
    """
    found: dict[str, str] = {}
    different: dict[str, str] = {}
    if apply_attention(module):
        found["attention of documents and windows"] = "masked_attention"
    for name, each in known_experts(module).items():
        if "forward" in vars(each):
            continue
        if _computes_at_once(each, dtype):
            compute_at_once(each)
            found[name] = "grouped_mm"
        else:
            different[type(each).__name__] = name
    for name, each in module.named_modules():
        operator, candidates = _candidates(each)
        if not candidates:
            continue
        for forward in candidates:
            if _computes_the_same(each, forward, dtype):
                each.forward = partial(forward, each)
                found[name] = operator
                break
        else:
            different[type(each).__name__] = name
    for kind, name in different.items():
        warnings.warn(
            f"`model.use_kernels`: {kind} (`{name}`) looks like an RMS norm, a gated MLP or experts, but computes "
            "something else; it keeps its own forward",
            RuntimeWarning,
            stacklevel=2,
        )
    if not found:
        raise CustomModelError(
            "model.use_kernels",
            f'is true, but "{factory}" has no RMS norm, gated MLP or experts that Danlu\'s operators compute',
            "remove it: known are norms with one `weight`, MLPs of gate_proj, up_proj and down_proj (or w1, w3 and "
            f"w2), or of gate_up_proj and down_proj, and {', '.join(EXPERT_FAMILIES)} of transformers",
        )
    return found


def _candidates(module: nn.Module) -> tuple[str, list[Forward]]:
    """The operator that may compute a module, and the ways to call it."""
    if "forward" in vars(module):  # replaced already: what its class computes is not what it computes
        return "", []
    if _is_norm(module):
        return "rms_norm", [
            partial(_norm, offset=offset, wide=wide) for offset, wide in product((0.0, 1.0), (True, False))
        ]
    kinds = ("swiglu", "geglu")
    for names in _SEPARATE:
        if _has_only(module, names):
            return "gated_product", [partial(_separate, names=names, activation=kind) for kind in kinds]
    if _has_only(module, _FUSED):
        return "gated_product", [partial(_fused, activation=kind) for kind in kinds]
    return "", []


def _is_norm(module: nn.Module) -> bool:
    """Whether all that a module has is one weight of one dim, and its class is named after an RMS norm."""
    parameters = dict(module.named_parameters())
    weight = parameters.pop("weight", None)
    is_named = "rmsnorm" in type(module).__name__.lower().replace("_", "")
    return is_named and weight is not None and weight.ndim == 1 and not parameters and not any(module.children())


def _has_only(module: nn.Module, names: tuple[str, ...]) -> bool:
    """Whether a module's parameters are those of linear layers of these names."""
    layers = dict(module.named_children())
    own = {name.partition(".")[0] for name, _ in module.named_parameters()}
    return own == set(names) and all(isinstance(layers.get(name), nn.Linear) for name in names)


def _norm(module: nn.Module, x: Tensor, offset: float, wide: bool) -> Tensor:
    """An epsilon that is not given is that of fp32 (`wide`) or of the input, depending on torch's version."""
    given = next((getattr(module, name) for name in _EPSILONS if hasattr(module, name)), None)
    default = torch.finfo(torch.promote_types(x.dtype, torch.float32) if wide else x.dtype).eps
    eps = default if given is None else float(given)
    return rms_norm(x, module.weight, eps, offset)  # type: ignore[arg-type]


def _separate(module: nn.Module, x: Tensor, names: tuple[str, ...], activation: str) -> Tensor:
    gate, up, down = (module.get_submodule(name) for name in names)
    result: Tensor = down(gated_product(gate(x), up(x), activation))
    return result


def _fused(module: nn.Module, x: Tensor, activation: str) -> Tensor:
    projection, down = (module.get_submodule(name) for name in _FUSED)
    gate, up = projection(x).chunk(2, dim=-1)
    result: Tensor = down(gated_product(gate, up, activation))
    return result


def _computes_the_same(module: nn.Module, forward: Forward, dtype: torch.dtype) -> bool:
    """Try a small copy."""
    for each in _tried(dtype):
        with without_fake_tensors(), torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(0)
            copy = _small_copy(module).to(each).train()
            expected = _results(copy, copy, each)
            actual = _results(copy, partial(forward, copy), each)
        if expected is None or actual is None or not _are_close(actual, expected, each):
            return False
    return True


def _tried(dtype: torch.dtype) -> list[torch.dtype]:
    """In fp32, which tells activations apart, and in the run's dtype, which may have another epsilon."""
    return list(dict.fromkeys((torch.float32, dtype)))


def _computes_at_once(experts: nn.Module, dtype: torch.dtype) -> bool:
    """Try a copy with three experts, of which every token has two, by weights that depend on it."""
    for each in _tried(dtype):
        with without_fake_tensors(), torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(0)
            own = small_experts(experts, 3, _WIDTH, _HIDDEN).to(each)
            mine = small_experts(own, 3, _WIDTH, _HIDDEN)
            mine._parameters = own._parameters
            compute_at_once(mine)
            expected = _results(own, partial(_two_of_three, own), each)
            actual = _results(mine, partial(_two_of_three, mine), each)
        if expected is None or actual is None or not _are_close(actual, expected, each):
            return False
    return True


def _two_of_three(experts: nn.Module, x_TD: Tensor) -> Tensor:
    index_TK = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2], [1, 0]], device="cpu")
    y_TD: Tensor = experts(x_TD, index_TK, x_TD[:, :2].softmax(-1))
    return y_TD


def _small_copy(module: nn.Module) -> nn.Module:
    """A module of the same class on the CPU with values of its own, whatever device its parameters are on."""
    copy = shallow_copy(module)
    copy._modules, copy._parameters = dict(module._modules), dict(module._parameters)
    for name, layer in list(copy.named_children()):
        if isinstance(layer, nn.Linear):
            wide = _HIDDEN * (2 if name == "gate_up_proj" else 1)
            shape = (_HIDDEN, _WIDTH) if name in ("down_proj", "w2") else (_WIDTH, wide)
            setattr(copy, name, nn.Linear(*shape, bias=layer.bias is not None, device="cpu"))
    if isinstance(weight := getattr(copy, "weight", None), nn.Parameter):
        copy.weight = nn.Parameter(torch.rand(weight.shape, device="cpu") + 0.5)
    return copy


def _results(copy: nn.Module, forward: Callable[[Tensor], Tensor], dtype: torch.dtype) -> list[Tensor] | None:
    """Result and gradients for rows of ordinary size, and for some as small as an epsilon; None if it fails."""
    generator = torch.Generator().manual_seed(1)
    weight = getattr(copy, "weight", None)
    width = weight.numel() if isinstance(weight, nn.Parameter) else _WIDTH
    scale_N = torch.tensor([1.0, 1.0, 1.0, 1e-3, 1e-3])
    x_ND = (torch.randn(5, width, generator=generator) * scale_N[:, None]).to(dtype).requires_grad_()
    try:
        y_ND = forward(x_ND)
        gradient = torch.randn(y_ND.shape, generator=generator).to(y_ND.dtype)
        return [y_ND, *torch.autograd.grad(y_ND, [x_ND, *copy.parameters()], gradient)]
    except (RuntimeError, TypeError, AttributeError):  # a forward that needs more than its input
        return None


def _are_close(actual: list[Tensor], expected: list[Tensor], dtype: torch.dtype) -> bool:
    """Row by row of a result, as small rows would be lost beside large ones."""
    for one, other in zip(actual, expected, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        limit = _ROUNDINGS * torch.finfo(dtype).eps * other.abs().amax(-1, keepdim=True)
        if not bool(((one - other).abs() <= limit).all()):
            return False
    return True
