"""The record of a step: every operator and collective, and every byte that lives meanwhile."""

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dispatch import OpDispatcher
from torch.utils._python_dispatch import TorchDispatchMode

from danlu.comm.record import Call, recorded_call
from danlu.framework.operators import Signature, Trait, signature, tensors, traffic, trait
from danlu.framework.whereabouts import Whereabouts, without_layer
from danlu.memory.live import LiveBytes
from danlu.spec.trace import Phase

_DEVICE = torch.ops.prim.device.default


class OperatorKey(NamedTuple):
    """What calls of an operator have in common when they are alike."""

    name: str
    phase: Phase
    module: str
    """Without the number of its layer."""
    inputs: tuple[Signature, ...]
    outputs: tuple[Signature, ...]
    flops: float
    bytes: int


@dataclass
class Record:
    """What was called in a step. The optimiser's part is kept in order: it works on all layers at once."""

    operators: Counter[OperatorKey] = field(default_factory=Counter)
    calls: list[Call] = field(default_factory=list)
    optimiser_operators: list[OperatorKey] = field(default_factory=list)
    optimiser_calls: list[Call] = field(default_factory=list)


class StepRecorder(TorchDispatchMode):
    """Sees every operator on this rank's own tensors, and keeps the book of live bytes.

    One mode for all of it: each mode costs every operator a turn through Python. Operators on DTensors are let
    through, so that what they do to the local tensors is seen instead; what DTensor tries out on the way, to learn
    how a result will be sharded, it does only once, and it is left out. So are views, and what only allocates.
    """

    def __init__(self, live: LiveBytes) -> None:
        super().__init__()
        self.live = live
        self.record = Record()
        self._where: Whereabouts | None = None
        self._places: list[tuple[Phase, str]] = []
        self._trying = 0
        self._traits: dict[Any, Trait] = {}
        self._stack = ExitStack()

    def start(self, where: Whereabouts) -> None:
        """Record from now on; until then only living tensors are noted."""
        self._where = where
        where.note()
        self.live.restart()

    def __enter__(self) -> "StepRecorder":
        self._stack.enter_context(self.live)
        try_out = OpDispatcher._propagate_op_sharding_dispatch_slow_path

        def unseen(dispatcher: OpDispatcher, *args: Any) -> Any:
            self._trying += 1
            try:
                return try_out(dispatcher, *args)
            finally:
                self._trying -= 1

        OpDispatcher._propagate_op_sharding_dispatch_slow_path = unseen  # type: ignore[method-assign,assignment]
        self._stack.callback(setattr, OpDispatcher, "_propagate_op_sharding_dispatch_slow_path", try_out)
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
        context = where.note()
        if known.collective:
            call = recorded_call(func, args)
            if call is not None:
                (self.record.optimiser_calls if where.optimising else self.record.calls).append(call)
            if known.in_place:
                self.live.claim(tensors(args), "communication")
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if known.counted:
            inputs, outputs, moved = traffic(known, args, kwargs, result)
            flops = known.flops(args, kwargs, result) if known.flops else 0.0
            signatures = tuple(map(signature, inputs)), tuple(map(signature, outputs))
            key = OperatorKey(known.name, *self._place(where, context), *signatures, flops, moved)
            if where.optimising:
                self.record.optimiser_operators.append(key)
            else:
                self.record.operators[key] += 1
            self.live.at += 1
        return result

    def _place(self, where: Whereabouts, context: int) -> tuple[Phase, str]:
        for phase, module, _ in where.contexts[len(self._places) :]:
            self._places.append((phase, without_layer(module)))
        return self._places[context]
