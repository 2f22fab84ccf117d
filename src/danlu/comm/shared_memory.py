"""Memory that the ranks of one host share, and a barrier between them.

A file of the host's memory (`/dev/shm`) that is removed as soon as all ranks have mapped it: nothing is left behind,
however they end. Its pages are allocated before it is used, so that a full `/dev/shm` is an error at the start and not
a signal in mid-step.
"""

import ctypes
import mmap
import os
import select
import tempfile
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Self

from danlu.native import NativeUnavailableError, load_library
from danlu.torch_compat import Store

FOLDER = Path("/dev/shm")
_BARRIER_BYTES = 4096
_SLICE = 0.1
"""Seconds between two looks at whether the others are alive."""
_SPINS = 2000
"""Looks before a rank sleeps, some 20 µs: sleeping and being woken takes longer."""
_PASSED, _BROKEN = 0, 1


def host_identity() -> str:
    """The same on all ranks that share memory and a network: a host, or a container of one."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not boot.exists():
        return str(os.getpid())  # an operating system that is not asked: shares with nobody
    namespaces = (Path(f"/proc/self/ns/{each}").stat().st_ino for each in ("net", "mnt"))
    return "-".join([boot.read_text().strip(), *map(str, namespaces)])


class SharedMemoryError(RuntimeError):
    """Memory cannot be shared with the other ranks of this host; the message says why."""


class HostPeerError(RuntimeError):
    """Another rank of this host is gone, or does something else."""


class SharedMemory:
    """`payload` bytes that `size` ranks of one host share, and a barrier; this rank is the `index`-th of them."""

    def __init__(self, path: Path, index: int, size: int, payload: int, timeout: timedelta) -> None:
        self.index, self.size, self.timeout = index, size, timeout
        total = _BARRIER_BYTES + payload
        with path.open("r+b") as file:
            if index == 0:
                os.posix_fallocate(file.fileno(), 0, total)
            self._mapping = mmap.mmap(file.fileno(), total)
        self.payload = memoryview(self._mapping)[_BARRIER_BYTES:]
        self._library = load_library("host_barrier")
        self._barrier = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(self._mapping)))
        # Ranks that share a core must let each other run.
        self._spins = ctypes.c_uint32(_SPINS if len(os.sched_getaffinity(0)) >= size else 0)
        self._milliseconds = ctypes.c_uint32(int(1000 * _SLICE))
        self._size = ctypes.c_uint32(size)
        self._peers: dict[int, int] = {}
        """Ranks by a handle of their process."""
        self._ended = select.poll()  # unlike select() also for handles from 1024 on

    @classmethod
    def share(cls, store: Store, index: int, size: int, payload: int, timeout: timedelta) -> Self:
        """What the ranks that use this store share; raises `SharedMemoryError` on all of them or on none."""
        mine = _create(store) if index == 0 else Path(os.fsdecode(store.get("path")))
        shared, reason = None, ""
        try:
            if index and store.get("first"):  # not mapped before it has its size
                raise SharedMemoryError("the first rank could not share memory")
            shared = cls(mine, index, size, payload, timeout)
        except (OSError, SharedMemoryError, NativeUnavailableError) as error:
            reason = f"rank {index} of {size} on this host: {error}"
        if index == 0:
            store.set("first", reason)
        store.set(f"reason-{index}", reason)
        store.set(f"pid-{index}", str(os.getpid()))
        reasons = [found for each in range(size) if (found := os.fsdecode(store.get(f"reason-{each}")))]
        if index == 0:
            mine.unlink(missing_ok=True)
        if reasons or shared is None:
            raise SharedMemoryError(reasons[0])
        for peer in range(size):
            if peer != index:
                with suppress(OSError):  # in another container: only the timeout tells that it is gone
                    shared._watch(peer, int(store.get(f"pid-{peer}")))
        return shared

    def _watch(self, peer: int, process: int) -> None:
        handle = os.pidfd_open(process)
        self._peers[handle] = peer
        self._ended.register(handle, select.POLLIN)

    def barrier(self) -> None:
        """Wait until every rank is here; what they wrote before can be read after."""
        turn = ctypes.c_uint32(self._library.danlu_barrier_arrive(self._barrier, self._size))
        state = self._library.danlu_barrier_wait(self._barrier, turn, self._spins, self._milliseconds)
        if state == _PASSED:
            return
        began = time.monotonic()
        while state != _PASSED:
            if state == _BROKEN:
                raise HostPeerError("interrupted: another rank of this host is gone, or ended a collective")
            if gone := [self._peers[handle] for handle, _ in self._ended.poll(0)]:
                self.interrupt()
                raise HostPeerError(f"rank {gone[0]} of the {self.size} of this group, all on this host, is gone")
            if time.monotonic() - began > self.timeout.total_seconds():
                self.interrupt()
                raise HostPeerError(
                    f"timed out: not all of the {self.size} ranks of this group, all on this host, came within "
                    f"{self.timeout.total_seconds():.0f} s"
                )
            state = self._library.danlu_barrier_wait(self._barrier, turn, ctypes.c_uint32(0), self._milliseconds)

    def interrupt(self) -> None:
        """End this and every later barrier of all ranks with an error; from any thread."""
        self._library.danlu_barrier_break(self._barrier)

    def close(self) -> None:
        """Let go of the other ranks; the memory goes with its last view."""
        for handle in self._peers:
            self._ended.unregister(handle)
            os.close(handle)
        self._peers.clear()


def _create(store: Store) -> Path:
    """An empty file that only this user can open; where it is stands in the store."""
    folder = FOLDER if os.access(FOLDER, os.W_OK) else Path(tempfile.gettempdir())
    descriptor, path = tempfile.mkstemp(prefix="danlu-shared-", dir=folder)
    os.close(descriptor)
    store.set("path", path)
    return Path(path)
