"""A store that tries again what fails, and lets no more bytes through in a second than it may."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from danlu.storage.store import Buffer, Store
from danlu.storage.store_path import plain

FIRST_PAUSE = 1.0
"""Seconds before the first of several further tries; each pause is four times the one before."""
_PACED_PIECE = 8 << 20
_FINAL = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
T = TypeVar("T")


class PersistentStore:
    """Another store, asked `retries` times more where it fails in a way that may pass.

    A file that is created only once is not tried again: after an error nobody knows whether it is there.
    """

    def __init__(
        self,
        store: Store,
        retries: int = 0,
        bandwidth: float = 0.0,
        stop: Callable[[], bool] = lambda: False,
        tell: Callable[[str], None] = lambda line: None,
        pause: float = FIRST_PAUSE,
    ) -> None:
        """`bandwidth` is in bytes a second, 0 for no limit; `stop` ends the tries, `tell` is told of each."""
        self.store = store
        self._retries, self._bandwidth, self._pause = retries, bandwidth, pause
        self._stop, self._tell = stop, tell

    @property
    def name(self) -> str:
        """That of the other store."""
        return self.store.name

    def write(self, path: str, parts: Iterable[Buffer]) -> None:
        """Make or replace a file; parts that can be had only once are written in one try."""
        if isinstance(parts, list):
            self._try(path, lambda: self.store.write(path, self._paced(parts)))
        else:
            self.store.write(path, self._paced(parts))

    def create(self, path: str, data: Buffer) -> None:
        """Make a file if there is none; FileExistsError otherwise."""
        self.store.create(path, data)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Bytes of a file from `offset`."""
        return self._try(path, lambda: self.store.read(path, offset, length))

    def read_into(self, path: str, offset: int, into: memoryview) -> None:
        """Fill `into` from `offset`."""
        self._try(path, lambda: self.store.read_into(path, offset, into))

    def size(self, path: str) -> int:
        """Bytes in a file."""
        return self._try(path, lambda: self.store.size(path))

    def list(self, folder: str = "") -> list[str]:
        """Names directly inside a folder."""
        return self._try(folder, lambda: self.store.list(folder))

    def remove(self, path: str) -> None:
        """Take away a file or a folder."""
        self._try(path, lambda: self.store.remove(path))

    def sweep(self, folder: str, keep: str) -> None:
        """Take away all that is directly inside a folder and does not begin with `keep`."""
        self._try(folder, lambda: self.store.sweep(folder, keep))

    def free(self) -> int | None:
        """Bytes that may still be written, or None where nobody can tell."""
        return self.store.free()

    def _try(self, path: str, act: Callable[[], T]) -> T:
        pause = self._pause
        for left in range(self._retries, -1, -1):
            try:
                return act()
            except _FINAL:
                raise
            except OSError as error:
                if not left or self._stop():
                    raise
                more = f"trying again in {pause:g} s, {left} times more"
                self._tell(f"{self.name}/{path}: {type(error).__name__}: {error}; {more}")
            time.sleep(pause)
            pause *= 4
        raise AssertionError("the last try returns or raises")

    def _paced(self, parts: Iterable[Buffer]) -> Iterable[Buffer]:
        """The parts, no sooner than they may go; a list stays one where there is no limit: a store sees its length."""
        return self._in_time(parts) if self._bandwidth else parts

    def _in_time(self, parts: Iterable[Buffer]) -> Iterator[memoryview]:
        began, done = time.perf_counter(), 0
        for part in parts:
            whole = plain(part)
            for start in range(0, len(whole), _PACED_PIECE):
                piece = whole[start : start + _PACED_PIECE]
                ahead = done / self._bandwidth - (time.perf_counter() - began)
                if ahead > 0:
                    time.sleep(ahead)
                yield piece
                done += len(piece)
