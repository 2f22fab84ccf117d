"""Memory that processes of one host share: what happens when one is gone, and when there is none to be had."""

import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest

from danlu.comm import shared_memory
from danlu.comm.shared_memory import HostPeerError, SharedMemory, SharedMemoryError, host_identity
from danlu.torch_compat import FileStore

TIMEOUT = timedelta(seconds=20)


def share(folder: Path, index: int, timeout: timedelta = TIMEOUT) -> SharedMemory:
    return SharedMemory.share(FileStore(str(folder / "store"), 2), index, 2, 4096, timeout)


def in_another_process(act: Callable[[], object]) -> int:
    """Exits without a word, as a killed process does."""
    child = os.fork()
    if child == 0:
        try:
            act()
        finally:
            os._exit(0)
    return child


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests share memory at the same time."""
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path)


def files() -> list[Path]:
    return list(shared_memory.FOLDER.glob("danlu-shared-*"))


def test_what_one_writes_before_the_barrier_the_other_reads_after_it(tmp_path: Path) -> None:
    def write() -> None:
        memory = share(tmp_path, 1)
        for turn in range(1000):
            memory.payload[turn] = turn % 251
            memory.barrier()

    child = in_another_process(write)
    memory = share(tmp_path, 0)
    assert files() == []  # removed as soon as both have it
    for turn in range(1000):
        memory.barrier()
        assert memory.payload[turn] == turn % 251
    os.waitpid(child, 0)


@pytest.fixture
def many_open_files() -> Iterator[None]:
    """As many as `select` can tell apart."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(2048, hard)), hard))
    with ExitStack() as files:
        while files.enter_context(Path(os.devnull).open()).fileno() < 1024:
            pass
        yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_open_files")
def test_a_process_that_is_gone_is_seen(tmp_path: Path) -> None:
    child = in_another_process(lambda: share(tmp_path, 1))
    memory = share(tmp_path, 0)
    began = time.monotonic()
    with pytest.raises(HostPeerError, match="rank 1 of the 2 of this group, all on this host, is gone"):
        memory.barrier()
    assert time.monotonic() - began < 2
    os.waitpid(child, 0)


def test_a_process_that_does_not_come_is_waited_for_until_the_timeout(tmp_path: Path) -> None:
    def sleep() -> None:
        share(tmp_path, 1)
        time.sleep(3)

    child = in_another_process(sleep)
    memory = share(tmp_path, 0, timedelta(seconds=0.5))
    with pytest.raises(HostPeerError, match="timed out: not all of the 2 ranks"):
        memory.barrier()
    os.waitpid(child, 0)


def test_no_room_is_told_to_all_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    told = tmp_path / "told"

    def other() -> None:
        try:
            share(tmp_path, 1)
        except SharedMemoryError as error:
            told.write_text(str(error))

    child = in_another_process(other)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SharedMemoryError, match=r"rank 0 of 2 on this host: .*No space left on device"):
        share(tmp_path, 0)
    os.waitpid(child, 0)
    assert "No space left on device" in told.read_text()
    assert files() == []


def test_without_the_compiled_barrier_nothing_is_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = in_another_process(lambda: share(tmp_path, 1))
    monkeypatch.setattr("danlu.native.build.library_path", lambda name: tmp_path / "none.so")
    with pytest.raises(SharedMemoryError, match="was not compiled"):
        share(tmp_path, 0)
    os.waitpid(child, 0)


def test_this_process_is_on_its_own_host() -> None:
    assert host_identity() == host_identity() != ""
