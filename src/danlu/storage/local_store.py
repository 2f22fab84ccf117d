"""A store in a folder: every write is on the disk, under its name, before it returns."""

import errno
import os
import secrets
import stat
import threading
import warnings
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path

from danlu.storage.calls import Calls
from danlu.storage.direct import ALIGNMENT, DirectWriter, read_direct, read_some, write_all
from danlu.storage.store_path import UNFINISHED, Buffer, plain, safe, shortage

LARGE = 4 << 20
"""Bytes from which reads and writes go past the page cache."""

_NO_FALLOCATE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
_NO_LINK = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class LocalStore:
    """Files below a folder on a disk, or on a file system that many machines share.

    A file is written under another name, brought to the disk, renamed, and its folder brought to the disk: whatever
    moment the power fails, each name has its old content or its new one. Symbolic links below the folder are refused;
    what is checked is the moment of the call, so the folder must not be writable to people you do not trust.
    """

    def __init__(self, folder: Path, calls: Calls | None = None) -> None:
        """Use `folder`, which is made at the first write; `calls` stands between this store and the system."""
        self._calls = calls or Calls()
        self._root = self._calls.realpath(str(folder))
        if self._root == "/":
            raise ValueError("a store cannot be the whole file system; give a folder in it")
        self.name = self._root
        self._direct_refused = ""
        self._direct_proven = False
        self._settled: set[str] = set()
        self._lock = threading.Lock()

    def write(self, path: str, parts: Iterable[Buffer]) -> None:
        """Make or replace a file, durably."""
        with self._replacing(path) as unfinished:
            if isinstance(parts, Collection):
                pieces = [plain(part) for part in parts]
                total: int | None = sum(map(len, pieces))
                self._fill(unfinished, pieces, total, total or 0)
            else:
                stream = (plain(part) for part in parts)
                ahead: list[memoryview] = []
                while sum(map(len, ahead)) < LARGE and (part := next(stream, None)) is not None:
                    ahead.append(part)
                self._fill(unfinished, chain(ahead, stream), None, sum(map(len, ahead)))

    def create(self, path: str, data: Buffer) -> None:
        """Make a file if there is none, durably; FileExistsError otherwise."""
        target, unfinished = self._prepared(path)
        with self._removing(unfinished):
            self._fill(unfinished, [plain(data)], memoryview(data).nbytes, 0)
            # What others have named here may be seen and not yet be on the disk; a file that declares it whole must
            # not get there before it.
            self._sync_folder(os.path.dirname(target))  # noqa: PTH120
            try:
                self._calls.link(unfinished, target)
            except FileExistsError:
                raise FileExistsError(f"{self.name}: {path} is already there") from None
            except OSError as error:
                if error.errno in _NO_LINK:
                    message = f"{self._file_system()} has no hard links, which an exclusive {path} needs; use another"
                    raise OSError(error.errno, f"{self.name}: {message} file system") from error
                raise
        self._sync_folder(os.path.dirname(target))  # noqa: PTH120

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Bytes of a file from `offset`."""
        with self._reading(path) as (descriptor, size):
            wanted = max(0, size - offset) if length is None else length
            if offset + wanted > size:
                raise shortage(self.name, path, offset, wanted, size)
            content = bytearray(wanted)
            got = read_some(self._calls, descriptor, memoryview(content), offset)
        if got < wanted:
            raise shortage(self.name, path, offset, wanted, offset + got)
        return bytes(content)

    def read_into(self, path: str, offset: int, into: memoryview) -> None:
        """Fill `into` from `offset`."""
        target = plain(into)
        got = self._read_directly(path, offset, target)
        if got is None:
            with self._reading(path) as (descriptor, size):
                if offset + len(target) > size:
                    raise shortage(self.name, path, offset, len(target), size)
                got = read_some(self._calls, descriptor, target, offset)
        if got < len(target):
            raise shortage(self.name, path, offset, len(target), offset + got)

    def size(self, path: str) -> int:
        """Bytes in a file."""
        with self._reading(path) as (_, size):
            return size

    def list(self, folder: str = "") -> list[str]:
        """Names directly inside a folder."""
        place = self._place(folder) if folder else self._root
        try:
            return sorted(name for name in self._calls.listdir(place) if UNFINISHED not in name)
        except FileNotFoundError:
            return []

    def remove(self, path: str) -> None:
        """Take away a file or a folder; gone from the disk when this returns."""
        place = self._place(path)
        try:
            self._remove(place)
        except (FileNotFoundError, NotADirectoryError):
            pass  # perhaps another process took it away and ended; see that this is so on the disk
        finally:
            with self._lock:
                self._settled.clear()
        with suppress(FileNotFoundError, NotADirectoryError):
            self._sync_folder(os.path.dirname(place))  # noqa: PTH120

    def sweep(self, folder: str, keep: str) -> None:
        """Take away the files in a folder that do not begin with `keep`, those half written included."""
        place = self._place(folder)
        try:
            names = self._calls.listdir(place)
        except FileNotFoundError:
            return
        for name in sorted(names):
            if not name.startswith(keep):
                with suppress(FileNotFoundError):
                    self._remove(f"{place}/{name}")
        self._sync_folder(place)

    def free(self) -> int | None:
        """Bytes a plain user may still write to this disk."""
        existing = self._root
        while True:
            try:
                room = self._calls.statvfs(existing)
            except FileNotFoundError:
                existing = os.path.dirname(existing)  # noqa: PTH120
            else:
                return room.f_bavail * room.f_frsize

    # --- names

    def _place(self, path: str) -> str:
        """The absolute path of a file; an error if a link stands in the way."""
        place = f"{self._root}/{safe(path)}"
        real = self._calls.realpath(place)
        if real != place:
            raise PermissionError(f"{self.name}: {path} passes a symbolic link (to {real}); a store follows none")
        return place

    def _prepared(self, path: str) -> tuple[str, str]:
        """Where a file will stand and where it is written before; its folders are there, durably."""
        target = self._place(path)
        folder, _, name = target.rpartition("/")
        self._settle(folder)
        return target, f"{folder}/{name}{UNFINISHED}{os.getpid()}-{secrets.token_hex(4)}"

    def _settle(self, folder: str) -> None:
        """Make a folder and those above it, and see that each one's name is on the disk.

        One that somebody else has just made may not be there yet, so a folder met for the first time is brought to
        the disk too.
        """
        exists = self._is_folder(folder)
        with self._lock:
            settled = folder in self._settled
        ours = folder == self._root or folder.startswith(f"{self._root}/")
        if exists and (settled or not ours):
            return
        above = os.path.dirname(folder)  # noqa: PTH120
        self._settle(above)
        if not exists:
            try:
                self._calls.mkdir(folder)
            except (FileExistsError, NotADirectoryError):
                if not self._is_folder(folder):
                    raise NotADirectoryError(f"{self.name}: {folder} is no folder, so nothing can be in it") from None
        self._sync_folder(above)
        with self._lock:
            self._settled.add(folder)

    def _is_folder(self, place: str) -> bool:
        try:
            return stat.S_ISDIR(self._calls.lstat(place).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _remove(self, place: str) -> None:
        if not stat.S_ISDIR(self._calls.lstat(place).st_mode):
            self._calls.unlink(place)
            return
        for name in sorted(self._calls.listdir(place)):
            self._remove(f"{place}/{name}")
        self._calls.rmdir(place)

    def _sync_folder(self, folder: str) -> None:
        descriptor = self._calls.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._calls.fsync(descriptor)
        finally:
            self._calls.close(descriptor)

    # --- writing

    @contextmanager
    def _replacing(self, path: str) -> Iterator[str]:
        """A name to write a file under that becomes `path` when it is whole."""
        target, unfinished = self._prepared(path)
        try:
            yield unfinished
            try:
                self._calls.rename(unfinished, target)
            except IsADirectoryError:
                raise IsADirectoryError(f"{self.name}: {path} is a folder") from None
        except BaseException as error:
            self._clean(unfinished, error)
            raise
        self._sync_folder(os.path.dirname(target))  # noqa: PTH120

    @contextmanager
    def _removing(self, unfinished: str) -> Iterator[None]:
        """The name a file was written under goes, whether or not it has got its own."""
        try:
            yield
        except BaseException as error:
            self._clean(unfinished, error)
            raise
        self._calls.unlink(unfinished)

    def _clean(self, unfinished: str, error: BaseException) -> None:
        try:
            self._calls.unlink(unfinished)
        except FileNotFoundError:
            return
        except OSError as second:
            error.add_note(f"and {unfinished} could not be removed: {second}")

    def _fill(self, place: str, parts: Iterable[memoryview], total: int | None, known: int) -> None:
        """Write a new file and bring its content to the disk; `known` bytes at least, `total` if it is known."""
        if known >= LARGE and self._fill_directly(place, parts, total):
            return
        descriptor = self._calls.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
        try:
            if total:
                self._allocate(descriptor, 0, total)
            offset = 0
            for part in parts:
                write_all(self._calls, descriptor, part, offset)
                offset += len(part)
            self._calls.fsync(descriptor)
        finally:
            self._calls.close(descriptor)

    def _fill_directly(self, place: str, parts: Iterable[memoryview], total: int | None) -> bool:
        """The same past the page cache; False, and nothing left, where the file system does not do that."""
        if self._direct_refused:
            return False
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        try:
            descriptor = self._calls.open(place, flags | os.O_DIRECT)
        except OSError as error:
            self._refuse_direct(error)
            self._clean(place, error)  # some systems make the file before they refuse the flag
            return False
        try:
            if not self._proven(descriptor):
                self._calls.unlink(place)
                return False
            DirectWriter(
                self._calls, descriptor, lambda offset, length: self._allocate(descriptor, offset, length), total
            ).write(parts)
            self._calls.fsync(descriptor)
        finally:
            self._calls.close(descriptor)
        return True

    def _proven(self, descriptor: int) -> bool:
        """Whether direct writes work here: a file system may take the flag and refuse the first block."""
        if not self._direct_proven:
            try:
                DirectWriter(self._calls, descriptor, lambda _offset, _length: None, None).write(
                    [memoryview(bytes(ALIGNMENT))]
                )
            except OSError as error:
                self._refuse_direct(error)
                return False
            self._direct_proven = True
        return True

    def _allocate(self, descriptor: int, offset: int, length: int) -> None:
        """Take room on the disk before anything is written; a disk that is too full says so now."""
        try:
            self._calls.fallocate(descriptor, offset, length)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise self._full(length) from error
            if error.errno not in _NO_FALLOCATE:
                raise
            if (free := self.free()) is not None and free < length:
                raise self._full(length) from None

    def _full(self, length: int) -> OSError:
        message = f"{self.name} has {self.free()} bytes free, but {length} are needed; remove old files or use another"
        return OSError(errno.ENOSPC, f"{message} disk")

    # --- reading

    @contextmanager
    def _reading(self, path: str, flags: int = 0) -> Iterator[tuple[int, int]]:
        """A file's descriptor and its size."""
        place = self._place(path)
        try:
            descriptor = self._calls.open(place, os.O_RDONLY | os.O_NOFOLLOW | flags)
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(f"{self.name}: there is no file {path}") from None
        try:
            what = self._calls.fstat(descriptor)
            if not stat.S_ISREG(what.st_mode):
                raise FileNotFoundError(f"{self.name}: {path} is no file")
            yield descriptor, what.st_size
        finally:
            self._calls.close(descriptor)

    def _read_directly(self, path: str, offset: int, target: memoryview) -> int | None:
        """Read past the page cache; None where that is not worth it or not possible."""
        if len(target) < LARGE or self._direct_refused:
            return None
        try:
            with self._reading(path, os.O_DIRECT) as (descriptor, size):
                if offset + len(target) > size:
                    raise shortage(self.name, path, offset, len(target), size)
                return read_direct(self._calls, descriptor, offset, target)
        except OSError as error:
            self._refuse_direct(error)
            return None

    def _refuse_direct(self, error: OSError) -> None:
        """Remember, and tell once, that the page cache must be used; any other error goes on."""
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise error
        self._direct_refused = f"{self._file_system()} refuses O_DIRECT ({error.strerror})"
        cost = "large files go through the page cache: about twice the time, and memory as large as the file"
        warnings.warn(f"{self.name}: {self._direct_refused}; {cost}", RuntimeWarning, stacklevel=2)

    def _file_system(self) -> str:
        """The kind of file system under this store, as the kernel names it."""
        best, kind = "", "this file system"
        for line in Path("/proc/self/mounts").read_text("utf-8", "replace").splitlines():
            mount, name = line.split(" ")[1:3]
            inside = self._root == mount or self._root.startswith(mount.rstrip("/") + "/")
            if inside and len(mount) >= len(best):
                best, kind = mount, name
        return kind
