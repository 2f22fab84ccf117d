"""Tracks phase, module and microbatch of every op, in forward, backward and recompute."""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from danlu.dryrun.live_memory import LiveMemoryTracker
from danlu.dryrun.memory_timeline import StepContext
from danlu.memory.recompute import wrap_recomputed
from danlu.torch_compat import (
    FSDPParamGroup,
    backward_sequence_number,
    gathered_parameter,
    is_backward_running,
    next_sequence_number,
)

_LEAF = (1 << 64) - 1
"""Sequence number of the nodes that accumulate gradients; they belong to what ran before them."""
_NUMBER = re.compile(r"(?<=\.)(?<!mtp\.)\d+(?=\.|$)")


def mask_layer_numbers(module: str) -> str:
    """A module's name with layer indices replaced by `*`: equal layers share it."""
    return _NUMBER.sub("*", module)


def layer_numbers(module: str) -> Iterator[int]:
    """The layer indices in a module's name."""
    return (int(found[0]) for found in _NUMBER.finditer(module))


def with_layer_number(module: str, layer: int) -> str:
    """A module's name in another layer."""
    return _NUMBER.sub(str(layer), module, count=1)


class ModuleTracker:
    """Tracks which module runs.

    In the forward pass this is a stack of modules. Every node of the autograd graph has a sequence number, so the
    numbers at which modules were entered and left give, in the backward pass, the module that made the node that runs,
    and its microbatch.
    """

    def __init__(self, stage_modules: Iterable[nn.Module], live: LiveMemoryTracker) -> None:
        self.contexts: list[StepContext] = []
        """Every context so far; `record_context` returns an index into it."""
        self.in_optimizer = False
        self._numbers: dict[StepContext, int] = {}
        self._layers: dict[str, int] = {}
        self._live = live
        self._names: dict[int, str] = {}
        self._roots: dict[int, int] = {}
        """Microbatches that every stage module has begun."""
        self._module_numbers: dict[int, int] = {}
        for number, stage_module in enumerate(stage_modules, start=1):
            self._module_numbers[id(stage_module)] = number
            self._names |= {id(module): name for name, module in stage_module.named_modules()}
            self._roots[id(stage_module)] = 0
            # The second time a region's module itself is not called.
            wrap_recomputed(stage_module, self.as_module)
        self._stack: list[str] = []
        self._microbatch: int | None = None
        self._module_number = 0
        """The stage module that runs, counted from 1; 0 if none does."""
        self._forward_module_number = 0
        self._starts: list[int] = [0]
        self._spans: list[tuple[str, int | None, int]] = [("", None, 0)]
        self._last: tuple[str, int | None] = ("", None)
        self._unit: str | None = None
        self._reducing = False
        self._in_backward = False
        self._hooked: set[int] = set()

    def record_context(self) -> int:
        """Set the memory tracker's context to what runs now; returns its index in `contexts`."""
        phase, module, microbatch = self._now()
        layer = self._layer(module)
        self._live.layer = layer if layer >= 0 else -1 - self._module_number
        number = self._live.context = self._number((phase, module if self._unit is None else self._unit, microbatch))
        return number

    @contextmanager
    def install_hooks(self) -> Iterator[None]:
        """Track modules, and the units that FSDP gathers, inside this context."""
        with ExitStack() as stack:
            for handle in (
                register_module_forward_pre_hook(lambda module, inputs: self._enter(module)),
                register_module_forward_hook(lambda module, inputs, output: self._leave(module)),
            ):
                stack.callback(handle.remove)
            for name in ("unshard", "wait_for_unshard", "post_backward"):
                original = getattr(FSDPParamGroup, name)
                setattr(FSDPParamGroup, name, self._inside_unit(original, reducing=name == "post_backward"))
                stack.callback(setattr, FSDPParamGroup, name, original)
            yield

    def as_module(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, tracked as if it were a module."""

        def entered(*args: Any, **kwargs: Any) -> Any:
            depth = len(self._stack)
            self._stack.append(name)
            self._mark()
            try:
                return function(*args, **kwargs)
            finally:
                # Recompute stops early, by an exception, as soon as it has what it needs.
                del self._stack[depth:]
                self._mark()

        return entered

    def as_backward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, tracked as a backward pass, also where it works between autograd's nodes."""

        def entered(*args: Any, **kwargs: Any) -> Any:
            self._in_backward, self._last = True, ("", None)
            try:
                return function(*args, **kwargs)
            finally:
                self._in_backward = False

        return entered

    def tag_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Tag the gradients that the backward pass left, so that they do not count as activations."""
        self._live.tag((each.grad for each in parameters if each.grad is not None), "gradients")

    def _now(self) -> StepContext:
        if self.in_optimizer:
            self._module_number = 0
            return "optimizer", "", None
        if not is_backward_running():
            if self._unit is not None and not self._stack:
                # A pipeline schedule gathers and reduces outside of modules, before and after its passes.
                return "backward" if self._reducing else "forward", self._unit, None
            if self._in_backward:
                return "backward", *self._last
            self._module_number = self._forward_module_number
            return "forward", self._here(), self._microbatch
        number = backward_sequence_number()
        if number is not None and number != _LEAF:
            module, microbatch, self._module_number = self._spans[bisect_right(self._starts, number) - 1]
            self._last = module, microbatch
        else:
            module, microbatch = self._last
        if self._stack:
            return "recompute", self._stack[-1], microbatch
        return "backward", module, microbatch

    def _number(self, context: StepContext) -> int:
        number = self._numbers.get(context)
        if number is None:
            number = self._numbers[context] = len(self.contexts)
            self.contexts.append(context)
        return number

    def _layer(self, module: str) -> int:
        """Index of the layer that a module belongs to, or -1."""
        layer = self._layers.get(module)
        if layer is None:
            layer = self._layers[module] = next(layer_numbers(module), -1)
        return layer

    def _here(self) -> str:
        return self._stack[-1] if self._stack else ""

    def _enter(self, module: nn.Module) -> None:
        key = id(module)
        if key in self._roots and not self._stack:
            self._microbatch = self._roots[key]
            self._roots[key] += 1
            self._forward_module_number = self._module_numbers[key]
        self._stack.append(self._names.get(key, self._here()))
        self._mark()

    def _leave(self, module: nn.Module) -> None:
        if self._stack:
            self._stack.pop()
        self._mark()

    def _mark(self) -> None:
        """Record from which node on the graph belongs to the module on top of the stack."""
        if is_backward_running():
            return  # nodes made during recompute are discarded
        number, span = (
            next_sequence_number(),
            (self._here(), self._microbatch, self._forward_module_number),
        )
        if self._starts[-1] == number:
            self._spans[-1] = span
        else:
            self._starts.append(number)
            self._spans.append(span)

    def _inside_unit(self, method: Callable[..., Any], reducing: bool) -> Callable[..., Any]:
        """An FSDP method on the parameters of one module, tracked under that module's name."""

        def entered(group: FSDPParamGroup, *args: Any, **kwargs: Any) -> Any:
            before = self._unit, self._reducing
            self._unit, self._reducing = self._names.get(id(group.modules[0]), ""), reducing
            try:
                result = method(group, *args, **kwargs)
            finally:
                self._unit, self._reducing = before
            self._claim(group)
            return result

        return entered

    def _claim(self, group: FSDPParamGroup) -> None:
        """Tag gathered parameters, and from now on their gradients, so that they do not count as activations."""
        for sharded in group.fsdp_params:
            gathered = gathered_parameter(sharded)
            if gathered is not None and id(gathered) not in self._hooked:
                self._hooked.add(id(gathered))
                self._live.tag([gathered], "gathered")
                if gathered.requires_grad:
                    gathered.register_hook(self._claim_gradient)
            if sharded.unsharded_accumulated_grad is not None:
                self._live.tag([sharded.unsharded_accumulated_grad], "gradients")

    def _claim_gradient(self, gradient: Tensor) -> None:
        self._live.tag([gradient], "gradients")
