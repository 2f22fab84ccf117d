"""Live bytes while a program runs, real or fake: every allocation and release in order, and what each was for."""

import weakref
from array import array
from collections.abc import Iterable
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
        self._known: dict[int, tuple[weakref.ref[UntypedStorage], int]] = {}
        self._sizes: list[int] = []
        self._claims = bytearray()
        self._entries = tuple(array("q") for _ in range(4))
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
        """Forget the past: what is alive now is the first entry of a new book."""
        self.at = 0
        self._entries = tuple(array("q") for _ in range(4))
        for _, number in self._known.values():
            self._enter(number, self._sizes[number])

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

    def entries(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Every entry since the start: change of bytes by kind (a column each, in the order of `KINDS`), `at`, `context`."""
        numbers, changes, at, contexts = (np.array(column, dtype=np.int64) for column in self._entries)
        by_kind = np.zeros((len(changes), len(KINDS)), dtype=np.int64)
        claims = np.frombuffer(bytes(self._claims), dtype=np.uint8)
        by_kind[np.arange(len(changes)), _COLUMN[claims[numbers]]] = changes
        return by_kind, at, contexts

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
            for column, value in zip(self._entries, (number, change, self.at, self.context), strict=True):
                column.append(value)
