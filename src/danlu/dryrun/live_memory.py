"""Live bytes of real or fake tensors: every allocation and release in order, by memory kind."""

import weakref
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor

from danlu.spec.trace import MEMORY_KINDS, MemoryKind

_KIND_PRIORITY: tuple[MemoryKind, ...] = (
    "activations",
    "communication",
    "gradients",
    "gathered",
    "optimizer",
    "parameters",
)
"""From the weakest claim on a storage to the strongest: a collective's buffer that becomes a gradient is a gradient."""
_STRENGTH = {kind: strength for strength, kind in enumerate(_KIND_PRIORITY)}
_COLUMN = np.array([MEMORY_KINDS.index(kind) for kind in _KIND_PRIORITY])
_ACTIVATIONS, _GATHERED = _STRENGTH["activations"], _STRENGTH["gathered"]


@dataclass(frozen=True)
class MemoryChanges:
    """All changes of live bytes as arrays, one row each."""

    changes: NDArray[np.int64]
    """Bytes allocated (positive) or freed, a column for every kind, in the order of `MEMORY_KINDS`."""
    operator_index: NDArray[np.int64]
    """Operators that ran before."""
    context: NDArray[np.int64]
    layer: NDArray[np.int64]
    """Index of the layer that ran; outside of layers, -1 minus the number of the stage module, counted from 1."""


class LiveMemoryTracker:
    """Tracks every live storage, and every change of live bytes.

    `track` adds a storage; a weak reference reports its end. FSDP frees and refills the storages of gathered parameters
    in place, so `UntypedStorage.resize_` is patched while the tracker is entered. What a storage is for is often known
    only later (a matrix product turns out to be a gradient), so kinds belong to storages, not to changes, and hold from
    a storage's allocation to its release.
    """

    def __init__(self) -> None:
        self.operator_index = 0
        """Operators that ran so far; recorded with every change."""
        self.context = 0
        """What runs now, as an index into the owner's list of contexts; recorded with every change."""
        self.layer = -1
        """Index of the layer that runs now, or below 0 for something else; recorded with every change."""
        self._known: dict[int, tuple[weakref.ref[UntypedStorage], int]] = {}
        self._sizes: list[int] = []
        self._claims = bytearray()
        self._entries = tuple(array("q") for _ in range(5))
        self._start = 0
        self._resize = UntypedStorage.resize_

    def __enter__(self) -> "LiveMemoryTracker":
        live, resize = self, self._resize

        def watched(storage: UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            live._resized(storage)
            return result

        UntypedStorage.resize_ = watched  # type: ignore[method-assign,assignment]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def reset(self) -> None:
        """Start again: what is live now becomes the first changes."""
        self.operator_index = 0
        self._entries = tuple(array("q") for _ in range(5))
        for _, number in self._known.values():
            self._enter(number, self._sizes[number])
        self._start = len(self._entries[0])

    def track(self, tensor: Tensor) -> int:
        """Add the storage of a tensor, if it is new; returns its index."""
        storage = tensor.untyped_storage()
        known = self._known.get(id(storage))
        return known[1] if known is not None else self._begin(storage)

    def tag(self, tensors: Iterable[Tensor], kind: MemoryKind) -> None:
        """Set the kind of tensors, unless they have a stronger one."""
        strength = _STRENGTH[kind]
        for tensor in tensors:
            number = self.track(tensor._local_tensor if isinstance(tensor, DTensor) else tensor)
            if self._claims[number] < strength:
                self._claims[number] = strength

    def history(self) -> MemoryChanges:
        """Every change since `reset`; what was live then is the first row."""
        numbers, changes, at, context, layer = (np.array(column, dtype=np.int64) for column in self._entries)
        by_kind = np.zeros((len(changes), len(MEMORY_KINDS)), dtype=np.int64)
        claims = np.frombuffer(bytes(self._claims), dtype=np.uint8)
        by_kind[np.arange(len(changes)), _COLUMN[claims[numbers]]] = changes
        # Changes of one sign with nothing in between are one row; so is what was live at the start.
        same = np.column_stack([at, context, layer, changes > 0])
        begins = np.append(True, (np.diff(same, axis=0) != 0).any(axis=1))
        begins[1 : self._start] = False
        begins[self._start : self._start + 1] = True
        rows = np.flatnonzero(begins)
        return MemoryChanges(np.add.reduceat(by_kind, rows), at[rows], context[rows], layer[rows])

    def _begin(self, storage: UntypedStorage) -> int:
        number, key = len(self._sizes), id(storage)
        self._sizes.append(storage.nbytes())
        self._claims.append(_ACTIVATIONS)
        self._known[key] = (weakref.ref(storage, lambda _: self._end(key)), number)
        self._enter(number, self._sizes[number])
        return number

    def _resized(self, storage: UntypedStorage) -> None:
        known = self._known.get(id(storage))
        number = known[1] if known is not None else self._begin(storage)
        self._claims[number] = max(self._claims[number], _GATHERED)
        size = storage.nbytes()
        self._enter(number, size - self._sizes[number])
        self._sizes[number] = size

    def _end(self, key: int) -> None:
        _, number = self._known.pop(key)
        self._enter(number, -self._sizes[number])

    def _enter(self, number: int, change: int) -> None:
        if change:
            for column, value in zip(
                self._entries, (number, change, self.operator_index, self.context, self.layer), strict=True
            ):
                column.append(value)
