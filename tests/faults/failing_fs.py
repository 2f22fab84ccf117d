"""A file system that passes everything on to a folder, and fails or dawdles where it is told to.

    python failing_fs.py SOURCE MOUNTPOINT RULES

Every line of the file RULES is an operation (`write` or `fsync`), what happens to it (`EIO`, `ENOSPC` or seconds to
wait), and a piece of the paths it happens to. The file is read at every operation, so rules come and go.
"""

import errno
import os
import sys
import time
from pathlib import Path
from typing import Any

from fuse import FUSE, FuseOSError, Operations

_STAT = ("st_mode", "st_size", "st_uid", "st_gid", "st_mtime", "st_atime", "st_ctime", "st_nlink")
_STATVFS = ("f_bavail", "f_bfree", "f_blocks", "f_bsize", "f_favail", "f_ffree", "f_files", "f_flag", "f_frsize")


class FailingFolder(Operations):  # type: ignore[misc]
    """A folder seen through the kernel, with faults."""

    def __init__(self, source: Path, rules: Path) -> None:
        self._source, self._rules = str(source), rules

    def _place(self, path: str) -> str:
        return self._source + path

    def _meet(self, operation: str, path: str) -> None:
        """Let happen what the rules say."""
        for line in self._rules.read_text(encoding="utf-8").splitlines():
            which, what, where = line.split()
            if which == operation and where in path:
                if what in ("EIO", "ENOSPC"):
                    raise FuseOSError(getattr(errno, what))
                time.sleep(float(what))

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        found = os.lstat(self._place(path))
        return {key: getattr(found, key) for key in _STAT}

    def statfs(self, path: str) -> dict[str, Any]:
        found = os.statvfs(self._place(path))
        return {key: getattr(found, key) for key in _STATVFS}

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(self._place(path))]  # noqa: PTH208

    def open(self, path: str, flags: int) -> int:
        return os.open(self._place(path), flags)

    def create(self, path: str, mode: int, fi: object = None) -> int:
        return os.open(self._place(path), os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        self._meet("write", path)
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        os.truncate(self._place(path), length)

    def fsync(self, path: str, datasync: int, fh: int) -> None:
        self._meet("fsync", path)
        os.fsync(fh)

    def fsyncdir(self, path: str, datasync: int, fh: int) -> None:
        self._meet("fsync", path)

    def release(self, path: str, fh: int) -> None:
        os.close(fh)

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(self._place(path), mode)  # noqa: PTH102

    def rmdir(self, path: str) -> None:
        os.rmdir(self._place(path))  # noqa: PTH106

    def unlink(self, path: str) -> None:
        os.unlink(self._place(path))  # noqa: PTH108

    def rename(self, old: str, new: str) -> None:
        os.rename(self._place(old), self._place(new))  # noqa: PTH104

    def link(self, target: str, source: str) -> None:
        os.link(self._place(source), self._place(target))


if __name__ == "__main__":
    FUSE(FailingFolder(Path(sys.argv[1]), Path(sys.argv[3])), sys.argv[2], foreground=True, big_writes=True)
