"""The system calls a local store makes, in one object: what can be recorded, cut short or made to fail."""

import os
from collections.abc import Sequence


class Calls:
    """The operating system itself; a subclass sees every call before it happens and may refuse it.

    A `LocalStore` touches the disk through these methods and no other way, so a list of them is the whole history of
    its files. All take absolute paths. Methods that only look (`lstat`, `listdir`, `realpath`, `statvfs`, `fstat`,
    `preadv`) change nothing.
    """

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        """Open a file or folder and return its descriptor."""
        return os.open(path, flags, mode)

    def close(self, descriptor: int) -> None:
        """Give a descriptor back."""
        os.close(descriptor)

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        """Write at a place and return how many bytes were taken."""
        return os.pwrite(descriptor, data, offset)

    def preadv(self, descriptor: int, into: Sequence[memoryview], offset: int) -> int:
        """Read at a place and return how many bytes came."""
        return os.preadv(descriptor, list(into), offset)

    def fallocate(self, descriptor: int, offset: int, length: int) -> None:
        """Take room on the disk, or fail with ENOSPC."""
        os.posix_fallocate(descriptor, offset, length)

    def ftruncate(self, descriptor: int, length: int) -> None:
        """Set the length of a file."""
        os.ftruncate(descriptor, length)

    def fsync(self, descriptor: int) -> None:
        """Wait until a file's content, or a folder's names, are on the disk."""
        os.fsync(descriptor)

    def rename(self, source: str, target: str) -> None:
        """Give a file another name, in place of whatever file had it."""
        os.rename(source, target)  # noqa: PTH104 (a recorded call, not a Path)

    def link(self, source: str, target: str) -> None:
        """Give a file a second name, only if it is free."""
        os.link(source, target)

    def unlink(self, path: str) -> None:
        """Take a file's name away."""
        os.unlink(path)  # noqa: PTH108

    def mkdir(self, path: str) -> None:
        """Make a folder, only if it is absent."""
        os.mkdir(path)  # noqa: PTH102

    def rmdir(self, path: str) -> None:
        """Take an empty folder away."""
        os.rmdir(path)  # noqa: PTH106

    def lstat(self, path: str) -> os.stat_result:
        """What stands under a name, links not followed."""
        return os.lstat(path)

    def fstat(self, descriptor: int) -> os.stat_result:
        """What an open file is."""
        return os.fstat(descriptor)

    def listdir(self, path: str) -> list[str]:
        """Names inside a folder, in no order."""
        return os.listdir(path)  # noqa: PTH208

    def realpath(self, path: str) -> str:
        """A path with every link in it followed."""
        return os.path.realpath(path)

    def statvfs(self, path: str) -> os.statvfs_result:
        """How full the file system under a path is."""
        return os.statvfs(path)
