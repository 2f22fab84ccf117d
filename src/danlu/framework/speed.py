"""The framework's operators by themselves, at several sizes: what `danlu probe` times and predictions are made of.

Every one is what a step of the loop runs, not compiled: the same modules and functions, on tensors of their own.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from danlu.comm.measure import Timed
from danlu.framework.moe import MoeLayer
from danlu.framework.optimizer import build_optimizer
from danlu.framework.placements import tensor_placements
from danlu.framework.transformer import Decoder, rotate
from danlu.parallel.loss import cross_entropy_sum
from danlu.parallel.norm import clip, local_square_sum
from danlu.parallel.tensor import apply_tp
from danlu.spec.cluster import SHARED_TOKENS, SHARED_WIDTH, Operator
from danlu.spec.model import Model, Moe
from danlu.spec.recipe import Optimizer

Run = Callable[[], object]

_WIDTH = 512
_HEAD = 64
_HEADS = 8
_EXPERTS, _TOP_K = 8, 2
_TOKENS = (64, 256, 512, 1024, 2048, 4096)
"""Of one microbatch, for operators that move bytes: close together, because caches and page faults make steps."""
_LENGTHS = (128, 256, 512, 1024, 2048)
_VOCABULARY = 4096
_SPLIT_HEADS = 4


def operators(device: torch.device, dtype: torch.dtype) -> dict[Operator, Callable[[], Iterable[Timed]]]:
    """For every operator a way to make its runs; sizes are as `Operator` says."""

    def values(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype).requires_grad_()

    def matmul() -> Iterable[Timed]:
        for tokens in (16, 128, 1024):
            inputs = values(tokens, 1024), values(1024, 1024), values(tokens, 1024)
            yield Timed(2.0 * tokens * 1024**2, partial(_products, *inputs), 3)

    def heads(back: bool) -> Iterable[Timed]:
        for length in _LENGTHS:
            sequences = max(1, 1024 // length)
            qkv = [values(sequences, length, _HEADS, _HEAD).transpose(1, 2) for _ in range(3)]
            yield Timed(float(length), _pass(_attend, qkv, back), sequences * _HEADS)

    def streams(make: Callable[[Tensor], Tensor], back: bool, *feature: int) -> Iterable[Timed]:
        for tokens in _TOKENS:
            x = values(1, tokens, *feature)
            yield Timed(float(x.numel()), _pass(make, [x], back), 1)

    def hidden(back: bool) -> Iterable[Timed]:
        for tokens in _TOKENS:
            inputs = [values(tokens, _WIDTH), values(tokens, _WIDTH)]
            yield Timed(float(inputs[0].numel()), _pass(_activate, inputs, back), 1)

    def sums(run: Callable[[Tensor, Tensor], Tensor]) -> Iterable[Timed]:
        for tokens in _TOKENS:
            x, y = values(tokens, _WIDTH).detach(), values(tokens, _WIDTH).detach()
            yield Timed(float(x.numel()), partial(run, x, y), 1)

    def scores(back: bool) -> Iterable[Timed]:
        for tokens in (32, 128, 512, 1024, 2048):
            x = values(1, tokens, _VOCABULARY)
            yield Timed(float(x.numel()), _pass(_score, [x], back), 1)

    def routed(back: bool) -> Iterable[Timed]:
        layer = MoeLayer(_WIDTH, Moe(experts=_EXPERTS, top_k=_TOP_K, width=1), "swiglu", None).to(device, dtype)
        layer.exchange = _Nowhere()
        for tokens in _TOKENS:
            x = values(1, tokens, _WIDTH)
            yield Timed(float(_TOP_K * x.numel()), _pass(layer, [x], back), 1)

    def update() -> Iterable[Timed]:
        for width in (128, 512, 1024):
            yield _updated([nn.Linear(width, width, bias=False, device=device) for _ in range(8)], device)

    def unit() -> Iterable[Timed]:
        for width in (16, 256, 512, 768, 1024):
            yield _sharded(width, device, dtype)

    def split() -> Iterable[Timed]:
        for layers in (1, 2):
            yield _shared(layers, device, dtype)

    norm = nn.RMSNorm(_WIDTH).to(device, dtype)
    return {
        "matmul": matmul,
        "attention": lambda: heads(False),
        "attention_backward": lambda: heads(True),
        "norm": lambda: streams(norm, False, _WIDTH),
        "norm_backward": lambda: streams(norm, True, _WIDTH),
        "rotation": lambda: streams(lambda x: rotate(x, 10000.0), False, _HEADS, _HEAD),
        "rotation_backward": lambda: streams(lambda x: rotate(x, 10000.0), True, _HEADS, _HEAD),
        "activation": lambda: hidden(False),
        "activation_backward": lambda: hidden(True),
        "add": lambda: sums(torch.add),
        "copy": lambda: sums(_copy),
        "loss": lambda: scores(False),
        "loss_backward": lambda: scores(True),
        "dispatch": lambda: routed(False),
        "dispatch_backward": lambda: routed(True),
        "optimizer": update,
        "unit": unit,
        "split": split,
    }


def _attend(q_BHSW: Tensor, k_BHSW: Tensor, v_BHSW: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q_BHSW, k_BHSW, v_BHSW, is_causal=True)


class _Nowhere(nn.Module):
    """An exchange whose experts answer with what they are asked."""

    def forward(self, x_ND: Tensor, counts_E: Tensor, experts: nn.Module) -> Tensor:
        """Token copies as they are."""
        return x_ND


def _products(x: Tensor, weight: Tensor, gradient: Tensor) -> None:
    """Forward, and backward for inputs and for weights."""
    with torch.no_grad():
        F.linear(x, weight)
        gradient @ weight
        gradient.t() @ x


def _activate(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _copy(x: Tensor, y: Tensor) -> Tensor:
    return y.copy_(x)


def _score(scores_BSV: Tensor) -> Tensor:
    tokens = scores_BSV.shape[1]
    targets = torch.zeros(1, tokens, dtype=torch.int64, device=scores_BSV.device)
    return cross_entropy_sum(scores_BSV, targets, None) / tokens


def _pass(forward: Callable[..., Tensor], inputs: list[Tensor], back: bool) -> Run:
    """The forward pass, or the backward pass of one that was done before."""
    if not back:
        return partial(forward, *inputs)
    result = forward(*inputs)
    gradient = torch.ones_like(result)
    return lambda: torch.autograd.grad(result, inputs, gradient, retain_graph=True)


def _updated(parts: list[nn.Module], device: torch.device) -> Timed:
    """Norm, clipping and AdamW, as the loop does them."""
    optimizer = build_optimizer(parts, Optimizer())
    parameters = [parameter for part in parts for parameter in part.parameters()]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)

    def run() -> None:
        norm = float(local_square_sum(parameters, 1, device)) ** 0.5
        clip(parameters, norm, norm / 2)
        optimizer.step()

    return Timed(float(sum(parameter.numel() for parameter in parameters)), run)


class _Use(torch.autograd.Function):
    """Take matrices and give them gradients, with nothing computed: what is left is what sharding them costs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        """Pass `x` on."""
        ctx.save_for_backward(*weights)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        """Gradients of the right sizes, whatever is in them."""
        return grads[0], *(torch.empty_like(weight) for weight in ctx.saved_tensors)


class _Matrices(nn.Module):
    """As many parameters as a layer has, and nothing to compute with them."""

    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(width, width, device=device) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        """Use every one of them."""
        used: Tensor = _Use.apply(x, *self.weights)
        return used


def _sharded(width: int, device: torch.device, dtype: torch.dtype) -> Timed:
    """A module gathered forward and again backward, and its gradient reduced, over this rank alone."""
    module = _Matrices(width, device)
    fully_shard(
        module, mesh=_mesh_of_one(device), mp_policy=MixedPrecisionPolicy(param_dtype=dtype), reshard_after_forward=True
    )
    x = torch.zeros(1, device=device, dtype=dtype, requires_grad=True)

    def run() -> None:
        module(x).sum().backward()
        for parameter in module.parameters():
            parameter.grad = None

    return Timed(8.0 * width**2, run)


def _shared(layers: int, device: torch.device, dtype: torch.dtype) -> Timed:
    """Layers whose matrices this rank shares with its neighbour, less what the rank computes of them.

    Of a size that fills caches between two operators: dispatched one right after the other they are twice as quick.
    """
    mesh = _mesh_of_neighbours(device)
    ranks = mesh.size()
    part, whole = _layers(layers, _SPLIT_HEADS, device, dtype), _layers(layers, _SPLIT_HEADS // ranks, device, dtype)
    apply_tp(part, tensor_placements(part), mesh)
    length = SHARED_TOKENS // ranks
    x, y = (
        torch.zeros(1, n, SHARED_WIDTH, device=device, dtype=dtype).requires_grad_() for n in (length, SHARED_TOKENS)
    )
    return Timed(float(layers), _both_passes(part, x), less=_both_passes(whole, y))


def _both_passes(part: nn.Module, x: Tensor) -> Run:
    x.requires_grad_()
    return lambda: part(x).sum().backward()


def _layers(layers: int, heads: int, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Layers with so many heads, and a feed-forward network as wide as they ask for."""
    model = Model(
        vocabulary=64, layers=layers, width=SHARED_WIDTH, heads=heads, head_width=_HEAD, mlp_width=heads * 176,
        sequence=SHARED_TOKENS,
    )  # fmt: skip
    return Decoder(model, first=False, last=False).to(device, dtype)


def _mesh_of_one(device: torch.device) -> DeviceMesh:
    return _mesh_of([dist.get_rank()], device)


def _mesh_of_neighbours(device: torch.device) -> DeviceMesh:
    """This rank and the one beside it; an odd last one by itself."""
    first = dist.get_rank() // 2 * 2
    return _mesh_of([rank for rank in (first, first + 1) if rank < dist.get_world_size()], device)


def _mesh_of(ranks: list[int], device: torch.device) -> DeviceMesh:
    return DeviceMesh.from_group(dist.new_group(ranks, use_local_synchronization=True), device.type)
