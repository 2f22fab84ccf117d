"""What is tried again, what is not, and how fast bytes may go."""

import time
from collections.abc import Iterable

import pytest

from danlu.storage.store.memory_store import MemoryStore
from danlu.storage.store.retrying_store import RetryingStore
from danlu.storage.store.safe_path import Buffer


class Failing(MemoryStore):
    """Refuses so many calls."""

    def __init__(self, times: int) -> None:
        super().__init__("failing")
        self.times, self.calls = times, 0

    def _fail(self) -> None:
        self.calls += 1
        if self.calls <= self.times:
            raise ConnectionError("the network is gone")

    def write(self, path: str, parts: Iterable[Buffer]) -> None:
        content = b"".join(parts)
        self._fail()
        super().write(path, [content])

    def create(self, path: str, data: Buffer) -> None:
        self._fail()
        super().create(path, data)

    def size(self, path: str) -> int:
        self._fail()
        return super().size(path)


def test_what_fails_is_tried_again_and_told() -> None:
    inner, told = Failing(2), list[str]()
    store = RetryingStore(inner, retries=2, on_retry=told.append, pause=0.001)
    store.write("a/b", [b"one", b"two"])
    assert inner.read("a/b") == b"onetwo" and inner.calls == 3
    assert told[0].endswith("the network is gone; retrying in 0.001 s, 2 retries left"), told
    assert told[1].endswith("retrying in 0.004 s, 1 retries left")


def test_after_the_last_try_the_error_is_the_callers() -> None:
    inner = Failing(9)
    with pytest.raises(ConnectionError):
        RetryingStore(inner, retries=3, pause=0.001).size("a")
    assert inner.calls == 4


def test_what_is_not_there_is_not_asked_for_again() -> None:
    inner = Failing(0)
    with pytest.raises(FileNotFoundError):
        RetryingStore(inner, retries=3, pause=9).size("a")
    assert inner.calls == 1


def test_a_stop_ends_the_tries() -> None:
    inner = Failing(9)
    with pytest.raises(ConnectionError):
        RetryingStore(inner, retries=3, stop=lambda: True, pause=9).size("a")
    assert inner.calls == 1


def test_what_may_be_there_after_an_error_is_not_created_twice() -> None:
    inner = Failing(1)
    with pytest.raises(ConnectionError):
        RetryingStore(inner, retries=3, pause=0.001).create("a", b"x")
    assert inner.calls == 1


def test_what_can_be_had_once_is_written_once() -> None:
    inner = Failing(1)
    with pytest.raises(ConnectionError):
        RetryingStore(inner, retries=3, pause=0.001).write("a", iter([b"x"]))
    assert inner.calls == 1


def test_no_more_bytes_a_second_than_allowed() -> None:
    inner = MemoryStore("paced")
    content = bytes(range(256)) * (20 << 12)  # 20 MiB, in pieces of 8
    began = time.perf_counter()
    RetryingStore(inner, bandwidth=50e6).write("a", [content])
    assert time.perf_counter() - began >= 16 * 2**20 / 50e6, "the third piece starts when two have had their time"
    assert inner.read("a") == content
    began = time.perf_counter()
    RetryingStore(inner, bandwidth=50e6).write("b", iter([content]))
    assert time.perf_counter() - began >= 16 * 2**20 / 50e6, "what can be had only once is no quicker"
