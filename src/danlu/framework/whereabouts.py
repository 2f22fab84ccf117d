"""Where a step is: phase, module and microbatch of whatever runs, forward, backward and computed again."""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.checkpoint import checkpoint

from danlu.memory.live import LiveBytes
from danlu.memory.timeline import Context

_LEAF = (1 << 64) - 1
"""Sequence number of the nodes that add up gradients; they belong to whatever ran before them."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def without_layer(module: str) -> str:
    """A module's name with the numbers of layers wiped out: layers that are alike share it."""
    return _NUMBER.sub("*", module)


def layers_named(module: str) -> Iterator[int]:
    """The layer numbers in a module's name."""
    return (int(found[0]) for found in _NUMBER.finditer(module))


def renumbered(module: str, layer: int) -> str:
    """A module's name in another layer."""
    return _NUMBER.sub(str(layer), module, count=1)


class Whereabouts:
    """Follows a program through its modules.

    In the forward pass a stack of modules tells where it is. Every node of the autograd graph carries a number that
    grows as the graph does, so the numbers at which modules were entered and left tell later, in the backward pass,
    which module made the node that runs, and for which microbatch.
    """

    def __init__(self, parts: Iterable[nn.Module], live: LiveBytes) -> None:
        self.contexts: list[Context] = []
        """Every context met so far; `context` is an index into it."""
        self.optimising = False
        self._numbers: dict[Context, int] = {}
        self._layers: dict[str, int] = {}
        self._live = live
        self._names: dict[int, str] = {}
        self._roots: dict[int, int] = {}
        """Microbatches that every part has begun."""
        self._parts: dict[int, int] = {}
        for number, part in enumerate(parts, start=1):
            self._parts[id(part)] = number
            self._names |= {id(module): name for name, module in part.named_modules()}
            self._roots[id(part)] = 0
            self._follow_recompute(part)
        self._stack: list[str] = []
        self._microbatch: int | None = None
        self._part = 0
        """The part that runs, counted from 1; 0 if none does."""
        self._forward_part = 0
        self._starts: list[int] = [0]
        self._stretches: list[tuple[str, int | None, int]] = [("", None, 0)]
        self._last: tuple[str, int | None] = ("", None)
        self._unit: str | None = None
        self._reducing = False
        self._going_back = False
        self._hooked: set[int] = set()

    def note(self) -> int:
        """Write into the book what runs now; its number in `contexts`."""
        phase, module, microbatch = self._now()
        layer = self._layer(module)
        self._live.layer = layer if layer >= 0 else -1 - self._part
        number = self._live.context = self._number((phase, module if self._unit is None else self._unit, microbatch))
        return number

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follow modules, and the units that FSDP gathers, as long as this is open."""
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

    def inside(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` as a place of its own, though it is no module."""

        def entered(*args: Any, **kwargs: Any) -> Any:
            depth = len(self._stack)
            self._stack.append(name)
            self._mark()
            try:
                return function(*args, **kwargs)
            finally:
                # Recompute stops in the middle, by an exception, as soon as it has what it needs.
                del self._stack[depth:]
                self._mark()

        return entered

    def going_back(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` as a backward pass, also where it does something by itself between autograd's nodes."""

        def entered(*args: Any, **kwargs: Any) -> Any:
            self._going_back, self._last = True, ("", None)
            try:
                return function(*args, **kwargs)
            finally:
                self._going_back = False

        return entered

    def claim_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Tell the gradients that the backward pass left from activations."""
        self._live.claim((each.grad for each in parameters if each.grad is not None), "gradients")

    def _now(self) -> Context:
        if self.optimising:
            self._part = 0
            return "optimiser", "", None
        if torch._C._current_graph_task_id() == -1:
            if self._unit is not None and not self._stack:
                # A pipeline's schedule gathers and reduces by itself, before and after its passes.
                return "backward" if self._reducing else "forward", self._unit, None
            if self._going_back:
                return "backward", *self._last
            self._part = self._forward_part
            return "forward", self._here(), self._microbatch
        node = torch._C._current_autograd_node()
        if node is not None and (number := node._sequence_nr()) != _LEAF:
            module, microbatch, self._part = self._stretches[bisect_right(self._starts, number) - 1]
            self._last = module, microbatch
        else:
            module, microbatch = self._last
        if self._stack:
            return "recompute", self._stack[-1], microbatch
        return "backward", module, microbatch

    def _number(self, context: Context) -> int:
        number = self._numbers.get(context)
        if number is None:
            number = self._numbers[context] = len(self.contexts)
            self.contexts.append(context)
        return number

    def _layer(self, module: str) -> int:
        """Number of the layer that a module belongs to, or -1."""
        layer = self._layers.get(module)
        if layer is None:
            layer = self._layers[module] = next(layers_named(module), -1)
        return layer

    def _here(self) -> str:
        return self._stack[-1] if self._stack else ""

    def _enter(self, module: nn.Module) -> None:
        key = id(module)
        if key in self._roots and not self._stack:
            self._microbatch = self._roots[key]
            self._roots[key] += 1
            self._forward_part = self._parts[key]
        self._stack.append(self._names.get(key, self._here()))
        self._mark()

    def _leave(self, module: nn.Module) -> None:
        if self._stack:
            self._stack.pop()
        self._mark()

    def _mark(self) -> None:
        """Note from which node on the graph belongs to the module on top of the stack."""
        if torch._C._current_graph_task_id() != -1:
            return  # nodes made while computing again are thrown away
        number, stretch = torch._C._autograd._get_sequence_nr(), (self._here(), self._microbatch, self._forward_part)
        if self._starts[-1] == number:
            self._stretches[-1] = stretch
        else:
            self._starts.append(number)
            self._stretches.append(stretch)

    def _follow_recompute(self, part: nn.Module) -> None:
        """Stand inside the regions that are computed again: the second time their module itself is not called."""
        for name, module in part.named_modules():
            for attribute, value in list(vars(module).items()):
                if isinstance(value, partial) and value.func is checkpoint:
                    function, *rest = value.args
                    followed = partial(checkpoint, self.inside(name, function), *rest, **value.keywords)
                    setattr(module, attribute, followed)

    def _inside_unit(self, method: Callable[..., Any], reducing: bool) -> Callable[..., Any]:
        """A method of FSDP's for the parameters of one module, done in the name of that module."""

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
        """Tell gathered parameters, and from now on their gradients, from activations."""
        for sharded in group.fsdp_params:
            gathered = getattr(sharded, "_unsharded_param", None)
            if gathered is not None and id(gathered) not in self._hooked:
                self._hooked.add(id(gathered))
                self._live.claim([gathered], "gathered")
                if gathered.requires_grad:
                    gathered.register_hook(self._claim_gradient)
            if sharded.unsharded_accumulated_grad is not None:
                self._live.claim([sharded.unsharded_accumulated_grad], "gradients")

    def _claim_gradient(self, gradient: Tensor) -> None:
        self._live.claim([gradient], "gradients")
