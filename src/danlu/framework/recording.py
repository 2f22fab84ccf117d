"""The record of a step: every operator and collective, and every byte that lives meanwhile."""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode

from danlu.comm.record import Call, recorded_call
from danlu.framework.operators import Signature, Trait, signature, tensors, traffic, trait
from danlu.framework.whereabouts import Whereabouts
from danlu.memory.live import LiveBytes

_DEVICE = torch.ops.prim.device.default
_LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class OperatorKey:
    """What calls of an operator have in common when they are alike."""

    name: str
    context: int
    """Phase, module with its own layer number, and microbatch, as `Whereabouts` numbers them."""
    inputs: tuple[Signature, ...]
    outputs: tuple[Signature, ...]
    flops: float
    bytes: int


@dataclass
class Record:
    """What was seen of a step."""

    operators: Counter[OperatorKey] = field(default_factory=Counter)
    calls: list[Call] = field(default_factory=list)


class StepRecorder(TorchDispatchMode):
    """Sees every operator on this rank's own tensors, and keeps the book of live bytes.

    One mode for all of it: each mode costs every operator a turn through Python. Operators on DTensors are let
    through, so that what they do to the local tensors is seen instead; what DTensor tries out on the way, to learn
    the shape of a result, is not part of the step and left out.
    """

    def __init__(self, live: LiveBytes) -> None:
        super().__init__()
        self.live = live
        self.record = Record()
        self._where: Whereabouts | None = None
        self._trying = 0
        self._traits: dict[Any, Trait] = {}
        self._stack = ExitStack()

    def start(self, where: Whereabouts) -> None:
        """Record from now on; until then only living tensors are noted."""
        self._where = where
        self.record = Record()
        self.live.context = where.context
        self.live.restart()

    def __enter__(self) -> "StepRecorder":
        self._stack.enter_context(self.live)
        try_out = ShardingPropagator._propagate_tensor_meta_non_cached

        def unseen(propagator: ShardingPropagator, schema: Any) -> Any:
            self._trying += 1
            try:
                return try_out(propagator, schema)
            finally:
                self._trying -= 1

        ShardingPropagator._propagate_tensor_meta_non_cached = unseen  # type: ignore[method-assign]
        self._stack.callback(setattr, ShardingPropagator, "_propagate_tensor_meta_non_cached", try_out)
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._stack.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device  # asked for at every turn; the answer needs no dispatch
        if DTensor in types:
            return NotImplemented
        known = self._traits.get(func)
        if known is None:
            known = self._traits[func] = trait(func)
        kwargs = kwargs or {}
        if known.quiet or self._trying:
            return func(*args, **kwargs)
        if self._where is None:
            result = func(*args, **kwargs)
        else:
            result = self._recorded(self._where, known, func, args, kwargs)
        for tensor in tensors(result):
            self.live.see(tensor)
        return result

    def _recorded(
        self, where: Whereabouts, known: Trait, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        context = self.live.context = where.context
        if known.collective:
            if (call := recorded_call(func, args)) is not None:
                self.record.calls.append(call)
            if known.in_place:
                self.live.claim(tensors(args), "communication")
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if known.counted:
            inputs, outputs, moved = traffic(known, args, kwargs, result)
            flops = known.flops(args, kwargs, result) if known.flops else 0.0
            key = OperatorKey(
                known.name, context, tuple(map(signature, inputs)), tuple(map(signature, outputs)), flops, moved
            )
            self.record.operators[key] += 1
            self.live.at += 1
        return result


def without_layer(module: str) -> str:
    """A module's name with the numbers of layers wiped out: layers that are alike share it."""
    return _LAYER.sub("*", module)


def layers_named(module: str) -> Iterator[int]:
    """The layer numbers in a module's name."""
    return (int(number) for number in _LAYER.findall(module))
