"""Live bytes while a program runs, real or fake: what is held, and what was held at the peak."""

import weakref
from collections import Counter
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

OTHER = "activations and gradients"
GATHERED = "gathered parameters"
COMMUNICATION = "communication buffers"


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of every tensor storage that is alive, by what it is for.

    Storages are seen when an operator returns them; FSDP frees and refills the storages of gathered
    parameters in place, which is seen by standing in the way of `UntypedStorage.resize_`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self.peak_total = 0
        self._known: dict[int, tuple[weakref.ref[UntypedStorage], int, str]] = {}
        self._resize = UntypedStorage.resize_

    @property
    def total(self) -> int:
        """Bytes alive now."""
        return sum(self.now.values())

    def reset_peak(self) -> None:
        """Forget the peak so far: what is alive now is the new one."""
        self.peak_total, self.peak = self.total, self.now.copy()

    def mark(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Say what tensors are for."""
        for tensor in tensors:
            self._see(_local(tensor), kind)

    def __enter__(self) -> "LiveBytes":
        live, resize = self, self._resize

        def watched(storage: UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            live._count(storage, GATHERED)
            return result

        UntypedStorage.resize_ = watched  # type: ignore[method-assign,assignment]
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        talks = func.namespace in ("c10d", "_c10d_functional")
        for leaf in tree_leaves((args, result) if talks else result):
            if isinstance(leaf, Tensor):
                self._see(_local(leaf), COMMUNICATION if talks else None)
        return result

    def _see(self, tensor: Tensor, kind: str | None) -> None:
        storage = tensor.untyped_storage()
        known = self._known.get(id(storage))
        if known is None:
            self._count(storage, kind or OTHER)
        elif kind is not None and known[2] in (OTHER, COMMUNICATION):
            self._count(storage, kind)

    def _count(self, storage: UntypedStorage, kind: str) -> None:
        """Enter a storage, or its new size or purpose."""
        key, size = id(storage), storage.nbytes()
        if known := self._known.get(key):
            self.now[known[2]] -= known[1]
            reference = known[0]
        else:
            reference = weakref.ref(storage, lambda _: self._forget(key))
        self._known[key] = (reference, size, kind)
        self.now[kind] += size
        if (total := self.total) > self.peak_total:
            self.peak_total, self.peak = total, self.now.copy()

    def _forget(self, key: int) -> None:
        _, size, kind = self._known.pop(key)
        self.now[kind] -= size


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
