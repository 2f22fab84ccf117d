"""Buffers in this host's shared memory: filled by a save, drained in the background, readable by every process here."""

import fcntl
import mmap
import os
import re
import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path

_PAGE = 4096
_FORGOTTEN = 86400.0  # seconds
_OURS = re.compile(r"danlu-[0-9]+/[0-9a-f]{16}")
"""How folders of runs are called in memory; beside any other nothing is removed."""


class Slot:
    """A buffer in shared memory: it outlives the process that filled it, and is there before it is needed.

    Its pages are taken when it is made, so that the first save is as quick as the others. What a process that died left
    in a buffer of this name stays readable where it was published.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.size = -(-max(size, 1) // _PAGE) * _PAGE
        self.published: Path | None = None
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # A new file: that of a dead process may be published and must not change. It is named once it is locked.
        unnamed = path.with_suffix(".new")
        unnamed.unlink(missing_ok=True)
        self._descriptor = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            unnamed.rename(path)
            os.posix_fallocate(self._descriptor, 0, self.size)  # here, not at a page fault, a full memory shows itself
            self._map = mmap.mmap(self._descriptor, self.size, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        except BaseException:
            os.close(self._descriptor)
            path.unlink(missing_ok=True)
            raise
        self.view = memoryview(self._map)

    def publish(self, path: Path) -> None:
        """Give what is in the buffer a name, under which any process of this host reads it without a copy."""
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.unlink(missing_ok=True)
        path.hardlink_to(self.path)
        self.published = path

    def withdraw(self) -> None:
        """Take the name back, before the buffer is filled again."""
        if self.published is not None:
            self.published.unlink(missing_ok=True)
            with suppress(OSError):  # other ranks of this host may have theirs in it
                self.published.parent.rmdir()
            self.published = None

    def close(self) -> None:
        """Let go of the memory and remove it."""
        self.withdraw()
        with suppress(BufferError):  # an upload that failed may hold a part of it; the memory goes when that does
            self.view.release()
            self._map.close()
        os.close(self._descriptor)
        self.path.unlink(missing_ok=True)


class Slots:
    """A few buffers of one rank, as large as its saves."""

    def __init__(self, folder: Path, rank: int, count: int) -> None:
        self.count = count
        self._folder = folder
        self._paths = [folder / f"{rank:06d}-{number}" for number in range(count)]
        self._all: list[Slot] = []
        self._free: list[Slot] = []
        self._lock = threading.Lock()

    @property
    def exhausted(self) -> bool:
        """Whether every buffer is still being drained."""
        with self._lock:
            return len(self._all) == self.count and not self._free

    def make(self, size: int) -> None:
        """Make all of them now; what processes that died have left on this host goes first, for its memory.

        Of other runs too, if it is a day old: whoever wanted to go on from it quickly would have done so.
        """
        for left in self._folder.glob("step-*"):
            shutil.rmtree(left, ignore_errors=True)  # every rank of the host does so, some a moment later
        for left in self._folder.glob("[0-9]*-[0-9]"):
            _remove_if_dead(left)
        if _OURS.fullmatch(f"{self._folder.parent.name}/{self._folder.name}"):
            _forget_the_dead(self._folder)
        with self._lock:
            while len(self._all) < self.count:
                self._free.append(self._new(size))

    def take(self, size: int) -> Slot:
        """A free buffer of at least this size; ask `exhausted` first."""
        with self._lock:
            slot = self._free.pop(0) if self._free else None  # the one that was filled longest ago
            if slot is not None and slot.size >= size:
                return slot
            if slot is not None:
                self._all.remove(slot)
                slot.close()
            return self._new(size)

    def give_back(self, slot: Slot) -> None:
        """It is drained; what it holds stays readable until it is taken again."""
        with self._lock:
            self._free.append(slot)

    def close(self) -> None:
        """Remove them."""
        with self._lock:
            for slot in self._all:
                slot.close()
            self._all, self._free = [], []

    def _new(self, size: int) -> Slot:
        taken = {slot.path for slot in self._all}
        slot = Slot(next(path for path in self._paths if path not in taken), size)
        self._all.append(slot)
        return slot


def _forget_the_dead(mine: Path) -> None:
    """Remove the memory of other runs, none of whose processes has been on this host for a day."""
    for other in mine.parent.glob("[0-9a-f]" * 16):
        if other == mine or not other.is_dir() or time.time() - other.stat().st_mtime < _FORGOTTEN:
            continue
        for slot in other.glob("[0-9]*-[0-9]"):
            _remove_if_dead(slot)
        if not any(other.glob("[0-9]*-[0-9]")):
            shutil.rmtree(other, ignore_errors=True)


def _remove_if_dead(slot: Path) -> None:
    """Remove the buffer of a process that is gone, whatever its rank was: its lock went with it."""
    try:
        descriptor = os.open(slot, os.O_RDWR)
    except FileNotFoundError:
        return  # another rank of this host was quicker
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        slot.unlink(missing_ok=True)
    except BlockingIOError:
        return  # it is in use
    finally:
        os.close(descriptor)
