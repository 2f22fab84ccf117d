"""Disks that refuse, fail or keep a record, and memory at any place: what the tests of stores are made of."""

import errno
import mmap
import os
from pathlib import Path

import numpy as np

from danlu.storage.store.safe_path import TEMP_MARK
from danlu.storage.store.syscalls import Syscalls


class RefusesDirect(Syscalls):
    """A file system that does not know O_DIRECT: at opening, or only when a block comes."""

    def __init__(self, *, at_open: bool) -> None:
        self.at_open = at_open

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        if flags & os.O_DIRECT and (self.at_open or not flags & os.O_CREAT):
            raise OSError(errno.EINVAL, "Invalid argument")
        return super().open(path, flags, mode)

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        if self._is_direct(descriptor):
            raise OSError(errno.EINVAL, "Invalid argument")
        return super().pwrite(descriptor, data, offset)

    @staticmethod
    def _is_direct(descriptor: int) -> bool:
        flags = Path(f"/proc/self/fdinfo/{descriptor}").read_text().split("flags:")[1].split()[0]
        return bool(int(flags, 8) & os.O_DIRECT)


class Recorder(Syscalls):
    """Writes down the calls that change the disk, in order."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._names: dict[int, str] = {}

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        descriptor = super().open(path, flags, mode)
        self._names[descriptor] = path
        return descriptor

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        self.seen.append(f"data {self._short(self._names[descriptor])}")
        return super().pwrite(descriptor, data, offset)

    def fsync(self, descriptor: int) -> None:
        self.seen.append(f"sync {self._short(self._names[descriptor])}")
        super().fsync(descriptor)

    def rename(self, source: str, target: str) -> None:
        self.seen.append(f"rename {self._short(source)} {self._short(target)}")
        super().rename(source, target)

    def link(self, source: str, target: str) -> None:
        self.seen.append(f"link {self._short(source)} {self._short(target)}")
        super().link(source, target)

    def unlink(self, path: str) -> None:
        self.seen.append(f"unlink {self._short(path)}")
        super().unlink(path)

    def mkdir(self, path: str) -> None:
        self.seen.append(f"mkdir {self._short(path)}")
        super().mkdir(path)

    @staticmethod
    def _short(path: str) -> str:
        name = Path(path).name
        return "new" if TEMP_MARK in name else name


class FailsAt(Syscalls):
    """Fails at the nth call of one kind."""

    def __init__(self, method: str, code: int, nth: int = 1) -> None:
        self.left = nth
        real = getattr(super(), method)

        def failing(*arguments: object) -> object:
            self.left -= 1
            if not self.left:
                raise OSError(code, os.strerror(code))
            return real(*arguments)

        setattr(self, method, failing)


def page_aligned(content: bytes) -> memoryview:
    view = memoryview(mmap.mmap(-1, len(content)))
    view[:] = content
    return view


def shifted(content: bytes, by: int = 1) -> memoryview:
    return page_aligned(bytes(by) + content)[by:]


def noise(length: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(length)
