"""Records a step: every operator and collective, and all changes of live bytes."""

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from danlu.comm.collective_call import CollectiveCall, parse_collective
from danlu.dryrun.live_memory import LiveMemoryTracker
from danlu.dryrun.module_tracker import ModuleTracker, mask_layer_numbers
from danlu.dryrun.operator_info import (
    OperatorInfo,
    Signature,
    iter_tensors,
    operator_info,
    operator_traffic,
    tensor_signature,
)
from danlu.parallel.ring_attention import DECOMPOSITIONS
from danlu.spec.trace import Phase
from danlu.torch_compat import FakeTensor, TorchDispatchMode, around_sharding_propagation

_DEVICE = torch.ops.prim.device.default


class OperatorKey(NamedTuple):
    """What equal calls of an operator have in common."""

    name: str
    phase: Phase
    module: str
    """Without its layer index."""
    inputs: tuple[Signature, ...]
    outputs: tuple[Signature, ...]
    flops: float
    bytes: int


@dataclass
class OperatorLog:
    """What was called in a step. The optimizer phase is kept in order: it works on all layers at once."""

    operators: Counter[OperatorKey] = field(default_factory=Counter)
    collectives: list[CollectiveCall] = field(default_factory=list)
    optimizer_operators: list[OperatorKey] = field(default_factory=list)
    optimizer_collectives: list[CollectiveCall] = field(default_factory=list)


class StepRecorder(TorchDispatchMode):
    """Records every operator on this rank's local tensors, and feeds the memory tracker.

    One mode for everything: each mode costs every operator a call into Python. Operators on DTensors are passed on, so
    that their operators on local tensors are recorded instead; DTensor's sharding propagation runs operators too, only
    once, and is skipped. So are views, and what only allocates.
    """

    def __init__(self, live: LiveMemoryTracker) -> None:
        super().__init__()
        self.live = live
        self.record = OperatorLog()
        self._tracker: ModuleTracker | None = None
        self._masked_contexts: list[tuple[Phase, str]] = []
        self._propagating = 0
        self._infos: dict[Any, OperatorInfo] = {}
        self._stack = ExitStack()

    def start_recording(self, tracker: ModuleTracker) -> None:
        """Record from now on; until then only live tensors are tracked."""
        self._tracker = tracker
        tracker.record_context()
        self.live.reset()

    def __enter__(self) -> "StepRecorder":
        self._stack.enter_context(self.live)
        self._stack.enter_context(around_sharding_propagation(self._begin_propagation, self._end_propagation))
        super().__enter__()
        return self

    def _begin_propagation(self) -> None:
        self._propagating += 1

    def _end_propagation(self) -> None:
        self._propagating -= 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._stack.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device  # asked for very often; the answer needs no dispatch
        if DTensor in types:
            return NotImplemented
        info = self._infos.get(func)
        if info is None:
            info = self._infos[func] = operator_info(func)
        kwargs = kwargs or {}
        if func in DECOMPOSITIONS:
            super().__enter__()  # records what the operator consists of, not the operator
            try:
                return DECOMPOSITIONS[func](*args, **kwargs)
            finally:
                super().__exit__(None, None, None)
        if info.is_noop or self._propagating:
            return func(*args, **kwargs)
        if self._tracker is None:
            result = func(*args, **kwargs)
        else:
            result = self._recorded(self._tracker, info, func, args, kwargs)
        for tensor in iter_tensors(result):
            self.live.track(tensor)
        return result

    def _recorded(
        self, tracker: ModuleTracker, info: OperatorInfo, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        context = tracker.record_context()
        if info.collective:
            call = parse_collective(func, args)
            if call is not None:
                (self.record.optimizer_collectives if tracker.in_optimizer else self.record.collectives).append(call)
            if info.in_place:
                self.live.tag(iter_tensors(args), "communication")
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if info.is_counted:
            inputs, outputs, moved = operator_traffic(info, args, kwargs, result)
            flops = info.flops(args, kwargs, result) if info.flops else 0.0
            signatures = tuple(map(tensor_signature, inputs)), tuple(map(tensor_signature, outputs))
            key = OperatorKey(info.name, *self._masked_context(tracker, context), *signatures, flops, moved)
            if tracker.in_optimizer:
                self.record.optimizer_operators.append(key)
            else:
                self.record.operators[key] += 1
            self.live.operator_index += 1
        return result

    def _masked_context(self, tracker: ModuleTracker, context: int) -> tuple[Phase, str]:
        for phase, module, _ in tracker.contexts[len(self._masked_contexts) :]:
            self._masked_contexts.append((phase, mask_layer_numbers(module)))
        return self._masked_contexts[context]
