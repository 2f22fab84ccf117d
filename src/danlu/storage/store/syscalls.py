"""The system calls of a local store, in one object, so that tests can record, interrupt or fail them."""

import ctypes
import errno
import os
from collections.abc import Sequence

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class Syscalls:
    """The operating system itself; a subclass sees every call first and may refuse it.

    A `LocalStore` accesses the disk only through these methods, so a list of the calls is the complete history of its
    files. All paths are absolute. `lstat`, `listdir`, `realpath`, `statvfs`, `fstat` and `preadv` change nothing.
    """

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        """Open a file or folder and return its descriptor."""
        return os.open(path, flags, mode)

    def close(self, descriptor: int) -> None:
        """Close a descriptor."""
        os.close(descriptor)

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        """Write at an offset and return how many bytes were written."""
        return os.pwrite(descriptor, data, offset)

    def preadv(self, descriptor: int, into: Sequence[memoryview], offset: int) -> int:
        """Read at an offset and return how many bytes were read."""
        return os.preadv(descriptor, list(into), offset)

    def fallocate(self, descriptor: int, offset: int, length: int) -> None:
        """Allocate disk space, or fail: ENOSPC on a full disk, EOPNOTSUPP where it cannot be, as on NFS before 4.2.

        Not `os.posix_fallocate`: there the C library writes a byte into every block instead, or fails with EBADF.
        """
        while _libc.fallocate(descriptor, 0, offset, length):
            number = ctypes.get_errno()
            if number != errno.EINTR:
                raise OSError(number, os.strerror(number))

    def ftruncate(self, descriptor: int, length: int) -> None:
        """Set the length of a file."""
        os.ftruncate(descriptor, length)

    def fsync(self, descriptor: int) -> None:
        """Wait until a file's content, or a folder's entries, are on the disk."""
        os.fsync(descriptor)

    def rename(self, source: str, target: str) -> None:
        """Rename a file, replacing an existing one."""
        os.rename(source, target)  # noqa: PTH104 (a recorded call, not a Path)

    def link(self, source: str, target: str) -> None:
        """Create a hard link, only if the name is free."""
        os.link(source, target)

    def unlink(self, path: str) -> None:
        """Remove a file's name."""
        os.unlink(path)  # noqa: PTH108

    def mkdir(self, path: str) -> None:
        """Create a folder, only if it is absent."""
        os.mkdir(path)  # noqa: PTH102

    def rmdir(self, path: str) -> None:
        """Remove an empty folder."""
        os.rmdir(path)  # noqa: PTH106

    def lstat(self, path: str) -> os.stat_result:
        """Status of a path; links are not followed."""
        return os.lstat(path)

    def fstat(self, descriptor: int) -> os.stat_result:
        """Status of an open file."""
        return os.fstat(descriptor)

    def listdir(self, path: str) -> list[str]:
        """Names inside a folder, in any order."""
        return os.listdir(path)  # noqa: PTH208

    def realpath(self, path: str) -> str:
        """A path with every link in it resolved."""
        return os.path.realpath(path)

    def statvfs(self, path: str) -> os.statvfs_result:
        """Free and used space of the file system of a path."""
        return os.statvfs(path)
