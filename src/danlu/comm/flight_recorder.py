"""The flight recorder: every collective of this process, whoever called it, in its `FlightWriter`.

Collectives of every backend pass c10d's operators on their way: those of torch.distributed, FSDP, DTensor, pipelining
and compiled graphs. A kernel of ours stands in front of each, and passes the call on.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from danlu.comm.flight_record import FlightWriter
from danlu.comm.world import ranks_of
from danlu.torch_compat import intercept_collectives, work_of

HEARTBEAT_SECONDS = 0.05
_MAX_PENDING = 16
"""Collectives in flight whose end is looked for; of more, the oldest is looked at once more and then no longer."""
_OPERATIONS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "send": "send",
    "recv_": "receive",
    "recv_any_source_": "receive",
    "barrier": "barrier",
    "monitored_barrier_": "barrier",
}
OBSERVED_OPERATORS = tuple(_OPERATIONS)
_PEER_ARGUMENT = {"send": 2, "recv_": 2}


class FlightRecorder:
    """Records collectives from now on, until `close`; one at a time in a process."""

    def __init__(self, writer: FlightWriter) -> None:
        self.writer = writer
        self._pending: deque[tuple[int, Work]] = deque()
        self._lock = threading.Lock()
        self._over = threading.Event()
        intercept_collectives("observe", OBSERVED_OPERATORS, self._record)
        self._thread = threading.Thread(target=self._beat, name="danlu-flight", daemon=True)
        self._thread.start()

    def enter_phase(self, phase: str, step: int) -> None:
        """This rank is now at `phase` of the step after `step`."""
        self.writer.enter_phase(phase, step)

    def begin_world(self) -> None:
        """What was recorded so far was of another world, whose groups are no more."""
        with self._lock:
            self._pending.clear()
        self.writer.begin_world()

    def close(self) -> None:
        """Record nothing more.

        The thread is waited for: one that comes back from torch's C++ code while Python ends aborts the process.
        """
        intercept_collectives("observe", (), None)
        self._over.set()
        self._thread.join()
        self._pending.clear()

    def _record(self, operator: str, args: tuple[Any, ...], pass_on: Callable[[], Any]) -> Any:
        ticket = self._enter(operator, args)
        result = pass_on()
        self._entered(ticket, work_of(result))
        return result

    def _enter(self, operator: str, args: tuple[Any, ...]) -> int:
        """Before a call: what it is."""
        unboxed = ProcessGroup.unbox(next(arg for arg in args if isinstance(arg, torch.ScriptObject)))
        name = unboxed.group_name
        if not self.writer.knows(name):
            axes = unboxed.group_desc.removeprefix("mesh_").replace("default_pg", "world")
            self.writer.describe(name, axes, ranks_of(unboxed))
        peer = args[_PEER_ARGUMENT[operator]] if operator in _PEER_ARGUMENT else None
        return self.writer.enter(_OPERATIONS[operator], name, _input_bytes(args), peer)

    def _entered(self, ticket: int, work: Work | None) -> None:
        """After a call, which returns before the collective is over."""
        if work is None:
            return
        with self._lock:
            self._pending.append((ticket, work))
            if len(self._pending) > _MAX_PENDING:
                self._leave_if_over(*self._pending.popleft())

    def _beat(self) -> None:
        while not self._over.wait(HEARTBEAT_SECONDS):
            self.writer.beat()
            with self._lock:
                while self._pending and self._leave_if_over(*self._pending[0]):
                    self._pending.popleft()  # those after one that goes on are found next time

    def _leave_if_over(self, ticket: int, work: Work) -> bool:
        if over := work.is_completed():
            self.writer.leave(ticket)
        return over


def _input_bytes(args: tuple[Any, ...]) -> int:
    """Bytes of the smallest tensor argument: this rank's part, where output and input are both given."""
    return min((size for arg in args if (size := _bytes(arg))), default=0)


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(map(_bytes, value)) if isinstance(value, list | tuple) else 0
