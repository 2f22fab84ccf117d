"""A file system that passes everything on to a folder and writes down every call that changes something, in one order.

    python recording_fs.py SOURCE MOUNTPOINT LOG

Any number of processes may work below MOUNTPOINT, each with whatever library it likes: the kernel tells of every call,
one after the other. LOG gets a line a call, as `history.read_log` reads it. A program says what it knows by now with
`os.setxattr(MOUNTPOINT, "user.mark", b"saved 10")`.
"""

import os
import sys
from pathlib import Path
from typing import Any

from fuse import FUSE, Operations
from history import History, Resize, Sync, Write, log_line

_STAT = ("st_mode", "st_size", "st_uid", "st_gid", "st_mtime", "st_atime", "st_ctime", "st_nlink")
_STATVFS = ("f_bavail", "f_bfree", "f_blocks", "f_bsize", "f_favail", "f_ffree", "f_files", "f_flag", "f_frsize")


class RecordingFolder(Operations):  # type: ignore[misc]
    """A folder seen through the kernel; calls come one at a time."""

    def __init__(self, source: Path, log: Path) -> None:
        self._history = History(source)
        self._source = self._history.top
        self._log = log.open("w", encoding="utf-8")
        self._open: dict[int, int] = {}

    def __call__(self, op: str, *arguments: Any) -> Any:
        found = super().__call__(op, *arguments)
        for each in self._history.ops:
            self._log.write(log_line(each, self._history) + "\n")
        self._history.ops.clear()
        self._log.flush()
        return found

    def _place(self, path: str) -> str:
        return (self._source + path).rstrip("/")

    def _opened(self, path: str, flags: int, mode: int = 0o666) -> int:
        descriptor = os.open(self._place(path), flags, mode)
        self._open[descriptor] = self._history.node(self._place(path))
        return descriptor

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        found = os.lstat(self._place(path))
        return {key: getattr(found, key) for key in _STAT}

    def statfs(self, path: str) -> dict[str, Any]:
        found = os.statvfs(self._place(path))
        return {key: getattr(found, key) for key in _STATVFS}

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(self._place(path))]  # noqa: PTH208

    def open(self, path: str, flags: int) -> int:
        return self._opened(path, flags & ~(os.O_TRUNC | os.O_DIRECT))  # the kernel tells of the truncation by itself

    def create(self, path: str, mode: int, fi: object = None) -> int:
        os.close(os.open(self._place(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
        self._history.named(self._place(path))
        return self._opened(path, os.O_RDWR)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        taken = os.pwrite(fh, data, offset)
        self._history.ops.append(Write(self._open[fh], offset, data[:taken]))
        return taken

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        os.truncate(self._place(path), length)
        self._history.ops.append(Resize(self._history.node(self._place(path)), length, grow=False))

    def fsync(self, path: str, datasync: int, fh: int) -> None:
        self._history.ops.append(Sync(self._open[fh]))  # what a crash leaves the model decides, not this machine's disk

    def fsyncdir(self, path: str, datasync: int, fh: int) -> None:
        self._history.ops.append(Sync(self._history.node(self._place(path))))

    def release(self, path: str, fh: int) -> None:
        del self._open[fh]
        os.close(fh)

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(self._place(path), mode)  # noqa: PTH102
        self._history.named(self._place(path), folder=True)

    def rmdir(self, path: str) -> None:
        os.rmdir(self._place(path))  # noqa: PTH106
        self._history.unnamed(self._place(path))

    def unlink(self, path: str) -> None:
        os.unlink(self._place(path))  # noqa: PTH108
        self._history.unnamed(self._place(path))

    def rename(self, old: str, new: str) -> None:
        os.rename(self._place(old), self._place(new))  # noqa: PTH104
        self._history.moved(self._place(old), self._place(new))

    def link(self, target: str, source: str) -> None:
        os.link(self._place(source), self._place(target))
        self._history.named(self._place(target), self._history.node(self._place(source)))

    def chmod(self, path: str, mode: int) -> None:
        os.chmod(self._place(path), mode)  # noqa: PTH101 - who may read is not in the model

    def setxattr(self, path: str, name: str, value: bytes, options: int, position: int = 0) -> None:
        what, step = value.decode().rsplit(" ", 1)
        self._history.mark(what, int(step))


if __name__ == "__main__":
    served = RecordingFolder(Path(sys.argv[1]), Path(sys.argv[3]))
    FUSE(served, sys.argv[2], foreground=True, nothreads=True, big_writes=True)
