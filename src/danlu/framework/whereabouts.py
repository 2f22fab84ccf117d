"""Where a step is: phase, module and microbatch of whatever runs, forward, backward and computed again."""

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
        self._live = live
        self._names: dict[int, str] = {}
        self._roots: dict[int, int] = {}
        """Microbatches that every part has begun."""
        for part in parts:
            self._names |= {id(module): name for name, module in part.named_modules()}
            self._roots[id(part)] = 0
            self._follow_recompute(part)
        self._stack: list[str] = []
        self._microbatch: int | None = None
        self._starts: list[int] = [0]
        self._stretches: list[tuple[str, int | None]] = [("", None)]
        self._last: tuple[str, int | None] = ("", None)
        self._unit: str | None = None
        self._hooked: set[int] = set()

    @property
    def context(self) -> int:
        """What runs now, as a number."""
        return self._number(self._now())

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
                setattr(FSDPParamGroup, name, self._inside_unit(original))
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

    def claim_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Tell the gradients that the backward pass left from activations."""
        self._live.claim((each.grad for each in parameters if each.grad is not None), "gradients")

    def _now(self) -> Context:
        if self.optimising:
            return "optimiser", "", None
        if torch._C._current_graph_task_id() == -1:
            return "forward", self._unit or self._here(), self._microbatch
        node = torch._C._current_autograd_node()
        if node is not None and (number := node._sequence_nr()) != _LEAF:
            self._last = self._stretches[bisect_right(self._starts, number) - 1]
        module, microbatch = self._last
        if self._stack:
            return "recompute", self._unit or self._stack[-1], microbatch
        return "backward", self._unit or module, microbatch

    def _number(self, context: Context) -> int:
        number = self._numbers.get(context)
        if number is None:
            number = self._numbers[context] = len(self.contexts)
            self.contexts.append(context)
        return number

    def _here(self) -> str:
        return self._stack[-1] if self._stack else ""

    def _enter(self, module: nn.Module) -> None:
        key = id(module)
        if key in self._roots and not self._stack:
            self._microbatch = self._roots[key]
            self._roots[key] += 1
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
        number, stretch = torch.autograd._get_sequence_nr(), (self._here(), self._microbatch)
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

    def _inside_unit(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """A method of FSDP's for the parameters of one module, done in the name of that module."""

        def entered(group: FSDPParamGroup, *args: Any, **kwargs: Any) -> Any:
            before, self._unit = self._unit, self._names.get(id(group.modules[0]), "")
            try:
                result = method(group, *args, **kwargs)
            finally:
                self._unit = before
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
