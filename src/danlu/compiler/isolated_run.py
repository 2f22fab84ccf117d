"""Run a block forward and backward beside a training step, without a trace of it in the step."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from danlu.torch_compat import TorchDispatchMode, nested_fsdp_gathered, tree_leaves, tree_map

Forward = Callable[..., Any]
COLLECTIVE_NAMESPACES = frozenset({"c10d", "c10d_functional", "_c10d_functional", "_dtensor"})
LOCAL_NAMESPACES = frozenset({"aten", "prim", "prims", "profiler", "danlu"})
COMMUNICATING = frozenset({"danlu::ring_attention", "danlu::ring_attention_backward"})
"""Operators of a local namespace that do communicate."""
SEED = 20260115
"""Of upstream gradients and perturbations. The same on all ranks: what ranks hold copies of must stay copies."""


class IsolatedRuns:
    """One call of a block, to be run as often as wanted: by eager or compiled code, in its own dtype or a wider one.

    Inputs are copies, gradients are returned instead of accumulated, and buffers and random states are put back after
    every run. The block's own hooks do not run: its forward is called, not the block.
    """

    def __init__(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.block = block
        self.call: tuple[tuple[Any, ...], dict[str, Any]] = (args, kwargs)
        self.with_gradients = torch.is_grad_enabled()
        self.began = False
        self.draws_random_numbers = False
        """Whether a run so far drew any; compiled code draws others."""
        self.communicates = False
        """Whether the first run may have used collectives; then all ranks must run it alike."""
        self.upstream: list[Tensor] = []
        """Gradients of the outputs, in the dtypes of the first run."""

    def run(self, forward: Forward, widened: torch.dtype | None = None, perturbation: int = 0) -> dict[str, Tensor]:
        """Outputs, gradients of inputs and parameters, and buffers, by name.

        `widened` computes in this dtype; `perturbation` other than 0 changes the inputs by up to one rounding.
        """
        with ExitStack() as undone:
            undone.enter_context(nested_fsdp_gathered(self.block))
            undone.enter_context(_kept_buffers(self.block))
            undone.enter_context(self._kept_random_states())
            if not self.began:
                undone.enter_context(self._watched_collectives())
            if widened is not None:
                undone.enter_context(_widened(self.block, widened))
            sources, (args, kwargs) = self._copied_inputs(widened, perturbation)
            outputs = [leaf for leaf in tree_leaves(forward(*args, **kwargs)) if isinstance(leaf, Tensor)]
            found = {f"output {at}": output.detach().clone() for at, output in enumerate(outputs)}
            if self.with_gradients:
                found |= self._gradients(outputs, sources)
            return found | {f"buffer {name}": each.clone() for name, each in self.block.named_buffers()}

    def _gradients(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> dict[str, Tensor]:
        outputs = [output for output in outputs if output.requires_grad]
        sources = {f"gradient of input {at}": each for at, each in enumerate(inputs) if each.requires_grad}
        sources |= {f"gradient of {name}": each for name, each in self.block.named_parameters() if each.requires_grad}
        if not outputs or not sources:
            return {}
        if not self.upstream:
            drawn = torch.Generator().manual_seed(SEED)
            self.upstream = [_noise_like(output, drawn) for output in outputs]
        upstream = [each.to(output.dtype) for each, output in zip(self.upstream, outputs, strict=True)]
        gradients = torch.autograd.grad(outputs, list(sources.values()), upstream, allow_unused=True)
        return {name: each for name, each in zip(sources, gradients, strict=True) if each is not None}

    def _copied_inputs(self, widened: torch.dtype | None, perturbation: int) -> tuple[list[Tensor], tuple[Any, Any]]:
        """Copies without the step's history, and what gradients are asked for.

        What compiled code is specialized on must be as in the call: a tensor that is given twice stays one, and the
        result of an operator is one again.
        """
        drawn = torch.Generator().manual_seed(SEED + perturbation)
        sources: dict[int, Tensor] = {}
        copies: dict[int, Tensor] = {}

        def copied(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) not in copies:
                values = leaf.detach().clone()
                if perturbation and leaf.is_floating_point():
                    noise = _noise_like(values, drawn).clamp(-1, 1)
                    values = (values * (1 + torch.finfo(leaf.dtype).eps * noise)).to(leaf.dtype)
                if widened is not None and is_narrower(leaf.dtype, widened):
                    values = values.to(widened)
                source = values.requires_grad_(self.with_gradients and leaf.requires_grad)
                sources[id(leaf)] = source
                copies[id(leaf)] = source if leaf.is_leaf else source.clone()
            return copies[id(leaf)]

        args, kwargs = tree_map(copied, self.call)
        return list(sources.values()), (args, kwargs)

    @contextmanager
    def _watched_collectives(self) -> Iterator[None]:
        self.began, watch = True, _CollectiveWatch()
        with watch:
            yield
        self.communicates = watch.seen and dist.is_initialized() and dist.get_world_size() > 1

    @contextmanager
    def _kept_random_states(self) -> Iterator[None]:
        devices = {each.device for each in _tensors((self.call, list(self.block.parameters()))) if not each.is_meta}
        before = _random_states(devices)
        try:
            yield
        finally:
            after = _random_states(devices)
            if any(not torch.equal(before[device], after[device]) for device in before):
                self.draws_random_numbers = True
            for device, state in before.items():
                _random_module(device).set_rng_state(state, *(() if device.type == "cpu" else (device,)))


class _CollectiveWatch(TorchDispatchMode):
    """Sees whether any operator may communicate: what an operator that is not torch's does inside is not seen."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= func.namespace not in LOCAL_NAMESPACES or func._schema.name in COMMUNICATING
        return func(*args, **(kwargs or {}))


def is_narrower(dtype: torch.dtype, widened: torch.dtype) -> bool:
    """Whether numbers of a dtype are floating-point numbers of fewer bits."""
    return dtype.is_floating_point and dtype.itemsize < widened.itemsize


def wider_dtype(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype:
    """In what a block's call is nearly exact: fp32 if any of its tensors has fewer bits, else fp64."""
    tensors = [*_tensors((args, kwargs)), *block.parameters()]
    narrow = any(is_narrower(each.dtype, torch.float32) for each in tensors)
    return torch.float32 if narrow else torch.float64


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _noise_like(tensor: Tensor, drawn: torch.Generator) -> Tensor:
    """Normal random numbers in a tensor's dtype, on its device, laid out as it is."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    noise = torch.randn(local.shape, generator=drawn).to(local.device, local.dtype)
    if isinstance(tensor, DTensor):
        where = tensor.device_mesh, tensor.placements
        return DTensor.from_local(noise, *where, run_check=False, shape=tensor.shape, stride=tensor.stride())
    return noise


def _random_module(device: torch.device) -> Any:
    return torch.random if device.type == "cpu" else torch.get_device_module(device)


def _random_states(devices: set[torch.device]) -> dict[torch.device, Tensor]:
    others = {device for device in devices if device.type != "cpu"}
    states = {device: _random_module(device).get_rng_state(device) for device in others}
    return {torch.device("cpu"): torch.get_rng_state(), **states}


@contextmanager
def _kept_buffers(block: nn.Module) -> Iterator[None]:
    """Put back the buffers that a run changes, such as a router's count of tokens."""
    kept = [
        (module, name, buffer, buffer.detach().clone())
        for module in block.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, values in kept:
                if getattr(module, name) is not buffer:
                    setattr(module, name, buffer)
                buffer.copy_(values)


@contextmanager
def _widened(block: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Replace parameters and buffers by copies of more bits; the very same objects are put back."""
    replaced: list[tuple[nn.Module, str, Tensor]] = []
    copies: dict[int, Tensor] = {}
    try:
        for module in block.modules():
            own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            for name, tensor in own:
                if is_narrower(tensor.dtype, dtype):
                    if id(tensor) not in copies:
                        values = tensor.detach().to(dtype)
                        wanted = tensor.requires_grad
                        copies[id(tensor)] = (
                            nn.Parameter(values, wanted) if isinstance(tensor, nn.Parameter) else values
                        )
                    replaced.append((module, name, tensor))
                    setattr(module, name, copies[id(tensor)])
        yield
    finally:
        for module, name, tensor in replaced:
            setattr(module, name, tensor)
