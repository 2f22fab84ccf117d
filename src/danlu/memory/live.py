"""Live bytes while a program runs, real or fake: every allocation and release in order, and what each was for."""

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

from danlu.spec.trace import KINDS, Kind

_CLAIMS: tuple[Kind, ...] = ("activations", "communication", "gradients", "gathered", "optimiser", "parameters")
"""From the weakest claim on a storage to the strongest: a buffer of a collective that becomes a gradient is one."""
_STRENGTH = {kind: strength for strength, kind in enumerate(_CLAIMS)}
_COLUMN = np.array([KINDS.index(kind) for kind in _CLAIMS])
_ACTIVATIONS, _GATHERED = _STRENGTH["activations"], _STRENGTH["gathered"]


@dataclass(frozen=True)
class Entries:
    """The book of live bytes as arrays, a row an entry."""

    changes: NDArray[np.int64]
    """Bytes that came or went, a column for every kind, in the order of `KINDS`."""
    at: NDArray[np.int64]
    """Operators that ran before."""
    context: NDArray[np.int64]
    layer: NDArray[np.int64]
    """Layer that ran; outside layers -1, less the number of the model's part from 1."""


class LiveBytes:
    """A book of every tensor storage that is alive, and of every byte that came or went.

    Storages are entered with `see`; their end is noticed by itself. FSDP frees and refills the storages of gathered
    parameters in place, which is seen by standing in the way of `UntypedStorage.resize_` while the book is open.
    What a storage is for is often known only later (a product of two matrices turns out to be a gradient), so kinds
    belong to storages, not to entries, and hold for a storage's whole life.
    """

    def __init__(self) -> None:
        self.at = 0
        """Operators that ran so far; written beside every entry."""
        self.context = 0
        """What runs now, as a number that the owner of the book understands; written beside every entry."""
        self.layer = -1
        """Number of the layer that runs now, or below 0 for something else; written beside every entry."""
        self._known: dict[int, tuple[weakref.ref[UntypedStorage], int]] = {}
        self._sizes: list[int] = []
        self._claims = bytearray()
        self._entries = tuple(array("q") for _ in range(5))
        self._start = 0
        self._resize = UntypedStorage.resize_

    def __enter__(self) -> "LiveBytes":
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

    def restart(self) -> None:
        """Forget the past: what is alive now makes the first entries of a new book."""
        self.at = 0
        self._entries = tuple(array("q") for _ in range(5))
        for _, number in self._known.values():
            self._enter(number, self._sizes[number])
        self._start = len(self._entries[0])

    def see(self, tensor: Tensor) -> int:
        """Enter the storage of a tensor, if it is new; its number in the book."""
        storage = tensor.untyped_storage()
        known = self._known.get(id(storage))
        return known[1] if known is not None else self._begin(storage)

    def claim(self, tensors: Iterable[Tensor], kind: Kind) -> None:
        """Say what tensors are for; a stronger claim than this one stays."""
        strength = _STRENGTH[kind]
        for tensor in tensors:
            number = self.see(tensor._local_tensor if isinstance(tensor, DTensor) else tensor)
            if self._claims[number] < strength:
                self._claims[number] = strength

    def entries(self) -> Entries:
        """Every entry since the start; what was alive then is the first."""
        numbers, changes, at, context, layer = (np.array(column, dtype=np.int64) for column in self._entries)
        by_kind = np.zeros((len(changes), len(KINDS)), dtype=np.int64)
        claims = np.frombuffer(bytes(self._claims), dtype=np.uint8)
        by_kind[np.arange(len(changes)), _COLUMN[claims[numbers]]] = changes
        # What only rises, or only falls, with nothing in between is one entry; so is what was alive at the start.
        same = np.column_stack([at, context, layer, changes > 0])
        begins = np.append(True, (np.diff(same, axis=0) != 0).any(axis=1))
        begins[1 : self._start] = False
        begins[self._start : self._start + 1] = True
        rows = np.flatnonzero(begins)
        return Entries(np.add.reduceat(by_kind, rows), at[rows], context[rows], layer[rows])

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
            for column, value in zip(self._entries, (number, change, self.at, self.context, self.layer), strict=True):
                column.append(value)
