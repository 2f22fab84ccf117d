"""Microbenchmarks of the framework's operators at several sizes: `danlu probe` times them, and predictions use them.

Each runs the same modules and functions as a training step, eagerly, on its own tensors.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from danlu.comm.rank_benchmark import BenchmarkCase
from danlu.comm.world import World
from danlu.framework.decoder.decoder import Decoder
from danlu.framework.decoder.moe import MoeLayer
from danlu.framework.decoder.norm import RMSNorm
from danlu.framework.decoder.parallelism import decoder_tp_plan
from danlu.framework.decoder.rope import apply_rope
from danlu.framework.optimizer import build_optimizer
from danlu.ops.operators.gated import gated_product
from danlu.parallel.grad_norm import clip_grads_with_norm, local_squared_norm
from danlu.parallel.loss import cross_entropy_sum
from danlu.parallel.tensor import apply_tp
from danlu.spec.cluster import TP_PROBE_TOKENS, TP_PROBE_WIDTH, OperatorName
from danlu.spec.model import Model, Moe
from danlu.spec.recipe import OptimizerConfig

BenchmarkFn = Callable[[], object]

_WIDTH = 512
_HEAD = 64
_HEADS = 8
_EXPERTS, _TOP_K = 8, 2
_TOKENS = (64, 256, 512, 1024, 2048, 4096)
"""Of one microbatch, for operators that move bytes: closely spaced, because caches and page faults make jumps."""
_LENGTHS = (128, 256, 512, 1024, 2048)
_VOCABULARY = 4096
_SPLIT_HEADS = 4


def operator_benchmarks(
    device: torch.device, dtype: torch.dtype
) -> dict[OperatorName, Callable[[], Iterable[BenchmarkCase]]]:
    """A function for every operator that yields its benchmark cases; sizes are as `OperatorName` says."""

    def values(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype).requires_grad_()

    def matmul() -> Iterable[BenchmarkCase]:
        for tokens in (16, 128, 1024):
            inputs = values(tokens, 1024), values(1024, 1024), values(tokens, 1024)
            yield BenchmarkCase(2.0 * tokens * 1024**2, partial(_products, *inputs), 3)

    def heads(backward: bool) -> Iterable[BenchmarkCase]:
        for length in _LENGTHS:
            sequences = max(1, 1024 // length)
            qkv = [values(sequences, length, _HEADS, _HEAD).transpose(1, 2) for _ in range(3)]
            yield BenchmarkCase(float(length), _forward_or_backward(_attend, qkv, backward), sequences * _HEADS)

    def activations(make: Callable[[Tensor], Tensor], backward: bool, *feature: int) -> Iterable[BenchmarkCase]:
        for tokens in _TOKENS:
            x = values(1, tokens, *feature)
            yield BenchmarkCase(float(x.numel()), _forward_or_backward(make, [x], backward), 1)

    def hidden(backward: bool) -> Iterable[BenchmarkCase]:
        for tokens in _TOKENS:
            inputs = [values(tokens, _WIDTH), values(tokens, _WIDTH)]
            yield BenchmarkCase(float(inputs[0].numel()), _forward_or_backward(_activate, inputs, backward), 1)

    def elementwise(run: Callable[[Tensor, Tensor], Tensor]) -> Iterable[BenchmarkCase]:
        for tokens in _TOKENS:
            x, y = values(tokens, _WIDTH).detach(), values(tokens, _WIDTH).detach()
            yield BenchmarkCase(float(x.numel()), partial(run, x, y), 1)

    def logits(backward: bool) -> Iterable[BenchmarkCase]:
        for tokens in (32, 128, 512, 1024, 2048):
            x = values(1, tokens, _VOCABULARY)
            yield BenchmarkCase(float(x.numel()), _forward_or_backward(_mean_loss, [x], backward), 1)

    def routed(backward: bool) -> Iterable[BenchmarkCase]:
        layer = MoeLayer(_WIDTH, Moe(experts=_EXPERTS, top_k=_TOP_K, width=1), "swiglu", None).to(device, dtype)
        layer.dispatcher = _IdentityDispatcher()
        for tokens in _TOKENS:
            x = values(1, tokens, _WIDTH)
            yield BenchmarkCase(float(_TOP_K * x.numel()), _forward_or_backward(layer, [x], backward), 1)

    def update() -> Iterable[BenchmarkCase]:
        for width in (128, 512, 1024):
            yield _optimizer_benchmark([nn.Linear(width, width, bias=False, device=device) for _ in range(8)], device)

    def unit() -> Iterable[BenchmarkCase]:
        for width in (16, 256, 512, 768, 1024):
            yield _fsdp_benchmark(width, device, dtype)

    def split() -> Iterable[BenchmarkCase]:
        for layers in (1, 2):
            yield _tp_benchmark(layers, device, dtype)

    norm = RMSNorm(_WIDTH, eps=1e-5).to(device, dtype)
    return {
        "matmul": matmul,
        "attention": lambda: heads(False),
        "attention_backward": lambda: heads(True),
        "norm": lambda: activations(norm, False, _WIDTH),
        "norm_backward": lambda: activations(norm, True, _WIDTH),
        "rotation": lambda: activations(lambda x: apply_rope(x, 10000.0), False, _HEADS, _HEAD),
        "rotation_backward": lambda: activations(lambda x: apply_rope(x, 10000.0), True, _HEADS, _HEAD),
        "activation": lambda: hidden(False),
        "activation_backward": lambda: hidden(True),
        "add": lambda: elementwise(torch.add),
        "copy": lambda: elementwise(_copy),
        "loss": lambda: logits(False),
        "loss_backward": lambda: logits(True),
        "dispatch": lambda: routed(False),
        "dispatch_backward": lambda: routed(True),
        "optimizer": update,
        "unit": unit,
        "split": split,
    }


def _attend(q_BHSW: Tensor, k_BHSW: Tensor, v_BHSW: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q_BHSW, k_BHSW, v_BHSW, is_causal=True)


class _IdentityDispatcher(nn.Module):
    """A dispatcher whose experts return their inputs."""

    def forward(self, x_ND: Tensor, counts_E: Tensor, experts: nn.Module) -> Tensor:
        """Return token copies unchanged."""
        return x_ND


def _products(x: Tensor, weight: Tensor, gradient: Tensor) -> None:
    """Forward, and backward for inputs and for weights."""
    with torch.no_grad():
        F.linear(x, weight)
        gradient @ weight
        gradient.t() @ x


def _activate(gate: Tensor, up: Tensor) -> Tensor:
    return gated_product(gate, up, "swiglu")


def _copy(x: Tensor, y: Tensor) -> Tensor:
    return y.copy_(x)


def _mean_loss(logits_BSV: Tensor) -> Tensor:
    tokens = logits_BSV.shape[1]
    targets = torch.zeros(1, tokens, dtype=torch.int64, device=logits_BSV.device)
    return cross_entropy_sum(logits_BSV, targets, None) / tokens


def _forward_or_backward(forward: Callable[..., Tensor], inputs: list[Tensor], backward: bool) -> BenchmarkFn:
    """The forward pass, or the backward pass of one that already ran."""
    if not backward:
        return partial(forward, *inputs)
    result = forward(*inputs)
    gradient = torch.ones_like(result)
    return lambda: torch.autograd.grad(result, inputs, gradient, retain_graph=True)


def _optimizer_benchmark(modules: list[nn.Module], device: torch.device) -> BenchmarkCase:
    """Norm, clipping and AdamW, as in the training loop."""
    optimizer = build_optimizer(modules, OptimizerConfig())
    parameters = [parameter for module in modules for parameter in module.parameters()]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)

    def run() -> None:
        norm = float(local_squared_norm(parameters, 1, device)) ** 0.5
        clip_grads_with_norm(parameters, norm, norm / 2)
        optimizer.step()

    return BenchmarkCase(float(sum(parameter.numel() for parameter in parameters)), run)


class _TouchWeights(torch.autograd.Function):
    """Take matrices and give them gradients without computing: what remains is the cost of sharding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        """Return a copy of `x`."""
        ctx.save_for_backward(*weights)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        """Gradients of the same sizes, uninitialized."""
        return grads[0], *(torch.empty_like(weight) for weight in ctx.saved_tensors)


class _ParameterHolder(nn.Module):
    """As many parameters as a layer has, without computation."""

    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(width, width, device=device) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        """Use every parameter."""
        used: Tensor = _TouchWeights.apply(x, *self.weights)
        return used


def _fsdp_benchmark(width: int, device: torch.device, dtype: torch.dtype) -> BenchmarkCase:
    """A module gathered in forward and again in backward, and its gradient reduced, over this rank alone."""
    module = _ParameterHolder(width, device)
    fully_shard(
        module, mesh=_mesh_of_one(device), mp_policy=MixedPrecisionPolicy(param_dtype=dtype), reshard_after_forward=True
    )
    x = torch.zeros(1, device=device, dtype=dtype, requires_grad=True)

    def run() -> None:
        module(x).sum().backward()
        for parameter in module.parameters():
            parameter.grad = None

    return BenchmarkCase(8.0 * width**2, run)


def _tp_benchmark(layers: int, device: torch.device, dtype: torch.dtype) -> BenchmarkCase:
    """Layers sharded over this rank and its neighbor, minus the computation of the rank's shard.

    Of a size that fills caches between two operators: dispatched back to back they are twice as fast.
    """
    mesh = _mesh_of_neighbors(device)
    ranks = mesh.size()
    module, baseline_module = (
        _layers(layers, _SPLIT_HEADS, device, dtype),
        _layers(layers, _SPLIT_HEADS // ranks, device, dtype),
    )
    apply_tp(module, decoder_tp_plan(module), mesh)
    length = TP_PROBE_TOKENS // ranks
    x, y = (
        torch.zeros(1, n, TP_PROBE_WIDTH, device=device, dtype=dtype).requires_grad_()
        for n in (length, TP_PROBE_TOKENS)
    )
    return BenchmarkCase(float(layers), _both_passes(module, x), baseline=_both_passes(baseline_module, y))


def _both_passes(module: nn.Module, x: Tensor) -> BenchmarkFn:
    x.requires_grad_()
    return lambda: module(x).sum().backward()


def _layers(layers: int, heads: int, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Layers with this many heads, and a feed-forward network of proportional width."""
    model = Model(
        vocabulary=64, layers=layers, width=TP_PROBE_WIDTH, heads=heads, head_width=_HEAD, mlp_width=heads * 176,
        sequence=TP_PROBE_TOKENS,
    )  # fmt: skip
    return Decoder(model, first=False, last=False).to(device, dtype)


def _mesh_of_one(device: torch.device) -> DeviceMesh:
    world = World.adopt(device)
    return _mesh_of([world.rank], world)


def _mesh_of_neighbors(device: torch.device) -> DeviceMesh:
    """This rank and the one next to it; an odd last one alone."""
    world = World.adopt(device)
    first = world.rank // 2 * 2
    return _mesh_of([rank for rank in (first, first + 1) if rank < world.size], world)


def _mesh_of(ranks: list[int], world: World) -> DeviceMesh:
    return world.device_mesh([world.new_group(ranks, "probe")])
