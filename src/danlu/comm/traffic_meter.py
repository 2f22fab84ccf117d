"""What this rank sends over every level of the network, and how long its all-to-alls are under way.

Bytes are those of collectives that reach the library, by what its rings and its sends to each rank pass on: a
collective that goes through the memory of a host sends none, and one by levels what the collective of each level does.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from danlu.comm.collective_call import collective_operation, input_position
from danlu.comm.rank_layout import LevelSpan, common_level
from danlu.cost.collectives import wire_bytes
from danlu.torch_compat import intercept_collectives, on_completion, tree_leaves, work_of

_COUNTED = ("allreduce_", "_allgather_base_", "_reduce_scatter_base_", "alltoall_base_", "broadcast_", "send")
_EXCHANGES = ("alltoall_base_",)


class StepTraffic(NamedTuple):
    """What one rank, or all of them, sent in a step."""

    all_to_all_seconds: float = 0.0
    """In which an all-to-all was under way; 0 where a chip's collectives end out of sight."""
    sent: tuple[float, ...] = ()
    """Bytes over every level of the network, innermost first; none where the network is not known."""


class TrafficMeter:
    """Measures from now on, until `close`; one at a time in a process."""

    def __init__(self, rank: int, levels: Sequence[LevelSpan], members_of: Callable[[ProcessGroup], list[int]]) -> None:
        self.rank, self.levels, self._members_of = rank, levels, members_of
        self._sent = [0.0] * len(levels)
        self._groups: dict[str, _GroupLevels] = {}
        self._clock = _BusyClock()
        self._inside = threading.local()
        intercept_collectives("count", _COUNTED if levels else (), self._count if levels else None)
        intercept_collectives("time", _COUNTED, self._time)

    def pop(self) -> StepTraffic:
        """What was measured since the last call."""
        sent, self._sent = tuple(self._sent), [0.0] * len(self.levels)
        return StepTraffic(self._clock.pop(), sent)

    def close(self) -> None:
        """Measure nothing more."""
        intercept_collectives("count", (), None)
        intercept_collectives("time", (), None)

    def _time(self, operator: str, args: tuple[Any, ...], pass_on: Callable[[], Any]) -> Any:
        """Time an all-to-all that is called, but none of which another collective consists."""
        if operator not in _COUNTED or getattr(self._inside, "call", False):
            return pass_on()
        exchanges = operator in _EXCHANGES and isinstance(args[0], Tensor) and args[0].device.type == "cpu"
        self._inside.call = True
        if exchanges:
            self._clock.begin()
        try:
            result = pass_on()
        except BaseException:
            if exchanges:
                self._clock.end()
            raise
        finally:
            self._inside.call = False
        if exchanges:
            work = work_of(result)
            if work is None:
                self._clock.end()
            else:
                on_completion(work, self._clock.end)
        return result

    def _count(self, operator: str, args: tuple[Any, ...], pass_on: Callable[[], Any]) -> Any:
        if operator in _COUNTED:
            self._add(operator, args)
        return pass_on()

    def _add(self, operator: str, args: tuple[Any, ...]) -> None:
        name = f"c10d::{operator}"
        operation = collective_operation(name)
        group = ProcessGroup.unbox(next(arg for arg in args if isinstance(arg, torch.ScriptObject)))
        where = self._groups.get(group.group_name)
        if where is None:
            where = _GroupLevels(self.rank, self._members_of(group), self.levels)
            self._groups[group.group_name] = where
        if operation is None or where.size == 1:
            return
        tensors = [leaf for leaf in tree_leaves(args[input_position(name)]) if isinstance(leaf, Tensor)]
        payload = float(sum(tensor.nbytes for tensor in tensors))
        if operation == "send":
            self._sent[where.level_of[args[2]]] += payload
        elif operation == "all_to_all":
            self._add_exchange(where, payload, tensors[0].shape[0], args[4])
        else:
            self._sent[where.level_of[where.next]] += wire_bytes(operation, where.size, payload)

    def _add_exchange(self, where: "_GroupLevels", payload: float, rows: int, splits: Sequence[int]) -> None:
        """Bytes to every other rank, in equal parts if there are no splits."""
        of_row = payload / rows if rows else 0.0
        for member, level in enumerate(where.level_of):
            if member != where.index:
                self._sent[level] += of_row * splits[member] if splits else payload / where.size


class _GroupLevels:
    """Which level of the network lies between this rank and each of a group."""

    def __init__(self, rank: int, members: Sequence[int], levels: Sequence[LevelSpan]) -> None:
        self.size, self.index = len(members), members.index(rank)
        self.next = (self.index + 1) % self.size
        """To whom this rank sends in a ring."""
        self.level_of = [common_level(rank, member, levels) for member in members]


class _BusyClock:
    """How long at least one of several things is under way; they may begin and end in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way, self._since, self._seconds = 0, 0.0, 0.0

    def begin(self) -> None:
        with self._lock:
            if not self._under_way:
                self._since = time.perf_counter()
            self._under_way += 1

    def end(self) -> None:
        with self._lock:
            self._under_way -= 1
            if not self._under_way:
                self._seconds += time.perf_counter() - self._since

    def pop(self) -> float:
        """Seconds since the last call."""
        with self._lock:
            now = time.perf_counter()
            if self._under_way:
                self._seconds += now - self._since
                self._since = now
            seconds, self._seconds = self._seconds, 0.0
        return seconds
