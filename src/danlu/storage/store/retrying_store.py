"""A store that retries failed calls and limits write bandwidth."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from danlu.storage.store.base import PERMANENT_ERRORS, Store
from danlu.storage.store.safe_path import Buffer, byte_view

INITIAL_BACKOFF = 1.0
"""Seconds before the first retry; each pause is four times the one before."""
_THROTTLE_BYTES = 8 << 20
T = TypeVar("T")


class RetryingStore:
    """Another store, with up to `retries` retries of errors that may be transient.

    `create` is not retried: after an error it is unknown whether the file exists.
    """

    def __init__(
        self,
        store: Store,
        retries: int = 0,
        bandwidth: float = 0.0,
        stop: Callable[[], bool] = lambda: False,
        on_retry: Callable[[str], None] = lambda line: None,
        pause: float = INITIAL_BACKOFF,
    ) -> None:
        """`bandwidth` is in bytes per second, 0 for no limit; `stop` ends the retries, `on_retry` reports each."""
        self.store = store
        self._retries, self._bandwidth, self._pause = retries, bandwidth, pause
        self._stop, self._on_retry = stop, on_retry

    @property
    def name(self) -> str:
        """Name of the underlying store."""
        return self.store.name

    def write(self, path: str, parts: Iterable[Buffer]) -> None:
        """Create or replace a file; parts from a generator are written in one attempt."""
        if isinstance(parts, list):
            self._retry(path, lambda: self.store.write(path, self._throttle(parts)))
        else:
            self.store.write(path, self._throttle(parts))

    def create(self, path: str, data: Buffer) -> None:
        """Create a file; FileExistsError if there is one."""
        self.store.create(path, data)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Bytes of a file from `offset`."""
        return self._retry(path, lambda: self.store.read(path, offset, length))

    def read_into(self, path: str, offset: int, into: memoryview) -> None:
        """Fill `into` from `offset`."""
        self._retry(path, lambda: self.store.read_into(path, offset, into))

    def size(self, path: str) -> int:
        """Bytes in a file."""
        return self._retry(path, lambda: self.store.size(path))

    def list(self, folder: str = "") -> list[str]:
        """Names directly inside a folder."""
        return self._retry(folder, lambda: self.store.list(folder))

    def remove(self, path: str) -> None:
        """Remove a file or a folder."""
        self._retry(path, lambda: self.store.remove(path))

    def remove_except(self, folder: str, keep: str) -> None:
        """Remove all entries of a folder except those with the prefix `keep`."""
        self._retry(folder, lambda: self.store.remove_except(folder, keep))

    def free_bytes(self) -> int | None:
        """Bytes that may still be written, or None if unknown."""
        return self.store.free_bytes()

    def _retry(self, path: str, call: Callable[[], T]) -> T:
        pause = self._pause
        for left in range(self._retries, -1, -1):
            try:
                return call()
            except PERMANENT_ERRORS:
                raise
            except OSError as error:
                if not left or self._stop():
                    raise
                more = f"retrying in {pause:g} s, {left} retries left"
                self._on_retry(f"{self.name}/{path}: {type(error).__name__}: {error}; {more}")
            time.sleep(pause)
            pause *= 4
        raise AssertionError("the last attempt returns or raises")

    def _throttle(self, parts: Iterable[Buffer]) -> Iterable[Buffer]:
        """The parts at the limited rate; a list stays a list without a limit, so that the store sees its length."""
        return self._rate_limited(parts) if self._bandwidth else parts

    def _rate_limited(self, parts: Iterable[Buffer]) -> Iterator[memoryview]:
        began, done = time.perf_counter(), 0
        for part in parts:
            view = byte_view(part)
            for start in range(0, len(view), _THROTTLE_BYTES):
                piece = view[start : start + _THROTTLE_BYTES]
                ahead = done / self._bandwidth - (time.perf_counter() - began)
                if ahead > 0:
                    time.sleep(ahead)
                yield piece
                done += len(piece)
