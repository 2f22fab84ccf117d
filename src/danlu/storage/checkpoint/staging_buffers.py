"""Buffers in this host's shared memory: filled by a save, uploaded in the background, readable by every process."""

import fcntl
import mmap
import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path

from danlu.storage.checkpoint.host_memory import make_private_folder, remove_dead_buffers, write_owner_file

_PAGE = 4096
_MAX_TRIES = 100


class StagingBuffer:
    """A buffer in shared memory: it outlives the process that filled it, and is allocated before it is needed.

    Its pages are populated when it is created, so that the first save is as fast as the others. What a dead process
    left in a buffer of this name stays readable where it was published.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.size = -(-max(size, 1) // _PAGE) * _PAGE
        self.published_path: Path | None = None
        self._descriptor = _create_locked_file(path)
        try:
            os.posix_fallocate(self._descriptor, 0, self.size)  # fails here if memory is full, not at a page fault
            self._map = mmap.mmap(self._descriptor, self.size, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        except BaseException:
            os.close(self._descriptor)
            path.unlink(missing_ok=True)
            raise
        self.view = memoryview(self._map)

    def publish(self, path: Path) -> None:
        """Link the buffer under a name, from which any process of this host reads it without a copy."""
        for left in reversed(range(_MAX_TRIES)):
            try:
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                path.unlink(missing_ok=True)
                path.hardlink_to(self.path)
            except (FileNotFoundError, FileExistsError):  # another rank removed the folder while it was still empty
                if not left:
                    raise
            else:
                break
        self.published_path = path

    def unpublish(self) -> None:
        """Remove the link, before the buffer is filled again."""
        if self.published_path is not None:
            self.published_path.unlink(missing_ok=True)
            with suppress(OSError):  # other ranks of this host may have files in it
                self.published_path.parent.rmdir()
            self.published_path = None

    def close(self) -> None:
        """Free the memory and remove the file."""
        self.unpublish()
        with suppress(BufferError):  # a failed upload may hold a view of it; the memory is freed with that
            self.view.release()
            self._map.close()
        os.close(self._descriptor)
        self.path.unlink(missing_ok=True)


class StagingBufferPool:
    """The staging buffers of one rank, as large as its saves."""

    def __init__(self, folder: Path, rank: int, count: int, owner: str = "") -> None:
        """In `folder`, whose owner file names `owner`: the store that is saved to."""
        self.count = count
        self._folder, self._owner = folder, owner
        self._paths = [folder / f"{rank:06d}-{number}" for number in range(count)]
        self._all: list[StagingBuffer] = []
        self._free: list[StagingBuffer] = []
        self._created = False
        self._lock = threading.Lock()

    @property
    def exhausted(self) -> bool:
        """Whether every buffer is still being uploaded."""
        with self._lock:
            return len(self._all) == self.count and not self._free

    def allocate(self, size: int) -> None:
        """Create all buffers now; what an earlier process of this run left on this host is removed first."""
        for left in self._folder.glob("step-*"):
            shutil.rmtree(left, ignore_errors=True)  # every rank of the host does this, some a moment later
        remove_dead_buffers(self._folder)
        with self._lock:
            while len(self._all) < self.count:
                self._free.append(self._new(size))

    def acquire(self, size: int) -> StagingBuffer:
        """A free buffer of at least this size; check `exhausted` first."""
        with self._lock:
            buffer = self._free.pop(0) if self._free else None  # the least recently filled one
            if buffer is not None and buffer.size >= size:
                return buffer
            if buffer is not None:
                self._all.remove(buffer)
                buffer.close()
            return self._new(size)

    def release(self, buffer: StagingBuffer) -> None:
        """Return an uploaded buffer; its content stays readable until it is acquired again."""
        with self._lock:
            self._free.append(buffer)

    def close(self) -> None:
        """Remove the buffers; the last process of the run on this host that does this leaves nothing behind."""
        with self._lock:
            closed, self._all, self._free = self._all, [], []
            for buffer in closed:
                buffer.close()
        if self._created:
            remove_dead_buffers(self._folder)

    def _new(self, size: int) -> StagingBuffer:
        self._created = True  # the folder exists, even if there is no memory for a buffer in it
        taken = {buffer.path for buffer in self._all}
        buffer = StagingBuffer(next(path for path in self._paths if path not in taken), size)
        self._all.append(buffer)
        if self._owner:
            write_owner_file(self._folder, self._owner)
        return buffer


def _create_locked_file(path: Path) -> int:
    """A new file, locked before it is renamed: that of a dead process may be published and must not change."""
    unnamed = path.with_suffix(".new")
    for left in reversed(range(_MAX_TRIES)):
        try:
            make_private_folder(path.parent)
            unnamed.unlink(missing_ok=True)
            descriptor = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                unnamed.rename(path)
            except BaseException:
                os.close(descriptor)
                raise
        except FileNotFoundError:  # an exiting process removed the folder while it was still empty
            if not left:
                raise
        else:
            return descriptor
    raise AssertionError("the last attempt returns or raises")
