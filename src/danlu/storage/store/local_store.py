"""A store in a folder: every write is durable, content and name, before it returns."""

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

from danlu.spec.byte_format import format_bytes
from danlu.storage.store.direct_io import ALIGNMENT, DirectWriter, read_direct, read_up_to, write_all
from danlu.storage.store.safe_path import TEMP_MARK, Buffer, byte_view, check_path, short_read_error
from danlu.storage.store.syscalls import Syscalls

DIRECT_IO_MIN_BYTES = 4 << 20
"""Bytes from which reads and writes bypass the page cache."""

_FALLOCATE_UNSUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
_HARD_LINKS_UNSUPPORTED = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class LocalStore:
    """Files below a folder on a disk, or on a file system that many machines share.

    A file is written under a temporary name, fsynced and renamed, and its folder is fsynced: at whatever moment the
    power fails, each name has its old content or its new one. Symbolic links below the folder are refused; the check
    is made at the moment of the call, so the folder must not be writable to people you do not trust.
    """

    def __init__(self, folder: Path, calls: Syscalls | None = None) -> None:
        """Use `folder`, created at the first write; all system calls go through `calls`."""
        self._calls = calls or Syscalls()
        self._root = self._calls.realpath(str(folder))
        if self._root == "/":
            raise ValueError("a store cannot be the root of the file system; give a folder in it")
        self.name = self._root
        self._direct_io_refusal = ""
        self._direct_io_ok = False
        self._durable_dirs: set[str] = set()
        self._lock = threading.Lock()

    def write(self, path: str, parts: Iterable[Buffer]) -> None:
        """Create or replace a file, durably."""
        with self._atomic_replace(path) as unfinished:
            if isinstance(parts, Collection):
                pieces = [byte_view(part) for part in parts]
                total: int | None = sum(map(len, pieces))
                self._write_file(unfinished, pieces, total, total or 0)
            else:
                stream = (byte_view(part) for part in parts)
                ahead: list[memoryview] = []
                while sum(map(len, ahead)) < DIRECT_IO_MIN_BYTES and (part := next(stream, None)) is not None:
                    ahead.append(part)
                self._write_file(unfinished, chain(ahead, stream), None, sum(map(len, ahead)))

    def create(self, path: str, data: Buffer) -> None:
        """Create a file durably; FileExistsError if there is one."""
        target, unfinished = self._prepare_write(path)
        with self._remove_temp_after(unfinished):
            self._write_file(unfinished, [byte_view(data)], memoryview(data).nbytes, 0)
            # Names that other processes gave here may be visible but not durable yet; a file that declares them
            # complete must not be durable first.
            self._sync_folder(os.path.dirname(target))  # noqa: PTH120
            try:
                self._calls.link(unfinished, target)
            except FileExistsError:
                raise FileExistsError(f"{self.name}: {path} already exists") from None
            except OSError as error:
                if error.errno in _HARD_LINKS_UNSUPPORTED:
                    message = (
                        f"{self._filesystem_type()} has no hard links, which an exclusive {path} needs; use another"
                    )
                    raise OSError(error.errno, f"{self.name}: {message} file system") from error
                raise
        self._sync_folder(os.path.dirname(target))  # noqa: PTH120

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Bytes of a file from `offset`."""
        with self._open_file(path) as (descriptor, size):
            wanted = max(0, size - offset) if length is None else length
            if offset + wanted > size:
                raise short_read_error(self.name, path, offset, wanted, size)
            content = bytearray(wanted)
            got = read_up_to(self._calls, descriptor, memoryview(content), offset)
        if got < wanted:
            raise short_read_error(self.name, path, offset, wanted, offset + got)
        return bytes(content)

    def read_into(self, path: str, offset: int, into: memoryview) -> None:
        """Fill `into` from `offset`."""
        target = byte_view(into)
        got = self._read_direct(path, offset, target)
        if got is None:
            with self._open_file(path) as (descriptor, size):
                if offset + len(target) > size:
                    raise short_read_error(self.name, path, offset, len(target), size)
                got = read_up_to(self._calls, descriptor, target, offset)
        if got < len(target):
            raise short_read_error(self.name, path, offset, len(target), offset + got)

    def size(self, path: str) -> int:
        """Bytes in a file."""
        with self._open_file(path) as (_, size):
            return size

    def list(self, folder: str = "") -> list[str]:
        """Names directly inside a folder."""
        absolute = self._absolute_path(folder) if folder else self._root
        try:
            return sorted(name for name in self._calls.listdir(absolute) if TEMP_MARK not in name)
        except FileNotFoundError:
            return []

    def remove(self, path: str) -> None:
        """Remove a file or a folder, durably."""
        absolute = self._absolute_path(path)
        try:
            self._remove(absolute)
        except (FileNotFoundError, NotADirectoryError):
            pass  # another process may have removed it and exited: fsync all the same
        finally:
            with self._lock:
                self._durable_dirs.clear()
        with suppress(FileNotFoundError, NotADirectoryError):
            self._sync_folder(os.path.dirname(absolute))  # noqa: PTH120

    def remove_except(self, folder: str, keep: str) -> None:
        """Remove the files of a folder except those with the prefix `keep`; half-written files too."""
        absolute = self._absolute_path(folder)
        try:
            names = self._calls.listdir(absolute)
        except FileNotFoundError:
            return
        for name in sorted(names):
            if not name.startswith(keep):
                with suppress(FileNotFoundError):
                    self._remove(f"{absolute}/{name}")
        self._sync_folder(absolute)

    def free_bytes(self) -> int | None:
        """Bytes an unprivileged user may still write to this disk."""
        existing = self._root
        while True:
            try:
                room = self._calls.statvfs(existing)
            except FileNotFoundError:
                existing = os.path.dirname(existing)  # noqa: PTH120
            else:
                return room.f_bavail * room.f_frsize

    # --- names

    def _absolute_path(self, path: str) -> str:
        """The absolute path of a file; an error if it contains a symbolic link."""
        absolute = f"{self._root}/{check_path(path)}"
        real = self._calls.realpath(absolute)
        if real != absolute:
            raise PermissionError(
                f"{self.name}: {path} passes through a symbolic link (to {real}); a store follows none"
            )
        return absolute

    def _prepare_write(self, path: str) -> tuple[str, str]:
        """Final and temporary path of a file; its folders are created, durably."""
        target = self._absolute_path(path)
        folder, _, name = target.rpartition("/")
        self._ensure_dir_durable(folder)
        return target, f"{folder}/{name}{TEMP_MARK}{os.getpid()}-{secrets.token_hex(4)}"

    def _ensure_dir_durable(self, folder: str) -> None:
        """Create a folder and its parents, and fsync the parent of each.

        One that another process has just created may not be durable yet, so a folder seen for the first time is
        fsynced too.
        """
        exists = self._is_folder(folder)
        with self._lock:
            is_durable = folder in self._durable_dirs
        is_inside = folder == self._root or folder.startswith(f"{self._root}/")
        if exists and (is_durable or not is_inside):
            return
        parent = os.path.dirname(folder)  # noqa: PTH120
        self._ensure_dir_durable(parent)
        if not exists:
            try:
                self._calls.mkdir(folder)
            except (FileExistsError, NotADirectoryError):
                if not self._is_folder(folder):
                    raise NotADirectoryError(f"{self.name}: {folder} is not a folder") from None
        self._sync_folder(parent)
        with self._lock:
            self._durable_dirs.add(folder)

    def _is_folder(self, absolute: str) -> bool:
        try:
            return stat.S_ISDIR(self._calls.lstat(absolute).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _remove(self, absolute: str) -> None:
        if not stat.S_ISDIR(self._calls.lstat(absolute).st_mode):
            self._calls.unlink(absolute)
            return
        for name in sorted(self._calls.listdir(absolute)):
            self._remove(f"{absolute}/{name}")
        self._calls.rmdir(absolute)

    def _sync_folder(self, folder: str) -> None:
        descriptor = self._calls.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._calls.fsync(descriptor)
        finally:
            self._calls.close(descriptor)

    # --- writing

    @contextmanager
    def _atomic_replace(self, path: str) -> Iterator[str]:
        """A temporary name to write a file under; renamed to `path` when complete."""
        target, unfinished = self._prepare_write(path)
        try:
            yield unfinished
            try:
                self._calls.rename(unfinished, target)
            except IsADirectoryError:
                raise IsADirectoryError(f"{self.name}: {path} is a folder") from None
        except BaseException as error:
            self._remove_temp(unfinished, error)
            raise
        self._sync_folder(os.path.dirname(target))  # noqa: PTH120

    @contextmanager
    def _remove_temp_after(self, unfinished: str) -> Iterator[None]:
        """Remove the temporary name of a file, whether or not it got its final one."""
        try:
            yield
        except BaseException as error:
            self._remove_temp(unfinished, error)
            raise
        self._calls.unlink(unfinished)

    def _remove_temp(self, unfinished: str, error: BaseException) -> None:
        try:
            self._calls.unlink(unfinished)
        except FileNotFoundError:
            return
        except OSError as second:
            error.add_note(f"and {unfinished} could not be removed: {second}")

    def _write_file(self, absolute: str, parts: Iterable[memoryview], total: int | None, known: int) -> None:
        """Write a new file and fsync it; of at least `known` bytes, and of `total` if that is known."""
        if known >= DIRECT_IO_MIN_BYTES and self._write_file_direct(absolute, parts, total):
            return
        descriptor = self._calls.open(absolute, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
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

    def _write_file_direct(self, absolute: str, parts: Iterable[memoryview], total: int | None) -> bool:
        """The same with O_DIRECT; False, and no file left, if the file system does not support it."""
        if self._direct_io_refusal:
            return False
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        try:
            descriptor = self._calls.open(absolute, flags | os.O_DIRECT)
        except OSError as error:
            self._disable_direct_io(error)
            self._remove_temp(absolute, error)  # some systems create the file before they refuse the flag
            return False
        try:
            if not self._direct_io_works(descriptor):
                self._calls.unlink(absolute)
                return False
            DirectWriter(
                self._calls, descriptor, lambda offset, length: self._allocate(descriptor, offset, length), total
            ).write(parts)
            self._calls.fsync(descriptor)
        finally:
            self._calls.close(descriptor)
        return True

    def _direct_io_works(self, descriptor: int) -> bool:
        """Whether direct writes work: a file system may accept the flag and refuse the first block."""
        if not self._direct_io_ok:
            try:
                DirectWriter(self._calls, descriptor, lambda _offset, _length: None, None).write(
                    [memoryview(bytes(ALIGNMENT))]
                )
            except OSError as error:
                self._disable_direct_io(error)
                return False
            self._direct_io_ok = True
        return True

    def _allocate(self, descriptor: int, offset: int, length: int) -> None:
        """Preallocate space before anything is written, so that a full disk fails now."""
        try:
            self._calls.fallocate(descriptor, offset, length)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise self._disk_full_error(length) from error
            if error.errno not in _FALLOCATE_UNSUPPORTED:
                raise
            if (free := self.free_bytes()) is not None and free < length:
                raise self._disk_full_error(length) from None

    def _disk_full_error(self, length: int) -> OSError:
        free = self.free_bytes()
        room = "unknown free space" if free is None else f"{format_bytes(free)} free"
        message = f"{self.name} has {room}, but {format_bytes(length)} are needed; remove old files or use another"
        return OSError(errno.ENOSPC, f"{message} disk")

    # --- reading

    @contextmanager
    def _open_file(self, path: str, flags: int = 0) -> Iterator[tuple[int, int]]:
        """A file's descriptor and its size."""
        absolute = self._absolute_path(path)
        try:
            descriptor = self._calls.open(absolute, os.O_RDONLY | os.O_NOFOLLOW | flags)
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(f"{self.name}: there is no file {path}") from None
        try:
            status = self._calls.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise FileNotFoundError(f"{self.name}: {path} is not a file")
            yield descriptor, status.st_size
        finally:
            self._calls.close(descriptor)

    def _read_direct(self, path: str, offset: int, target: memoryview) -> int | None:
        """Read with O_DIRECT; None if that is not worth it or not possible."""
        if len(target) < DIRECT_IO_MIN_BYTES or self._direct_io_refusal:
            return None
        try:
            with self._open_file(path, os.O_DIRECT) as (descriptor, size):
                if offset + len(target) > size:
                    raise short_read_error(self.name, path, offset, len(target), size)
                return read_direct(self._calls, descriptor, offset, target)
        except OSError as error:
            self._disable_direct_io(error)
            return None

    def _disable_direct_io(self, error: OSError) -> None:
        """Remember, and warn once, that the page cache must be used; any other error is raised."""
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise error
        self._direct_io_refusal = f"{self._filesystem_type()} refuses O_DIRECT ({error.strerror})"
        cost = "large files go through the page cache: about twice the time, and memory as large as the file"
        warnings.warn(f"{self.name}: {self._direct_io_refusal}; {cost}", RuntimeWarning, stacklevel=2)

    def _filesystem_type(self) -> str:
        """File system type of this store, as the kernel names it."""
        best, kind = "", "this file system"
        for line in Path("/proc/self/mounts").read_text("utf-8", "replace").splitlines():
            mount, name = line.split(" ")[1:3]
            inside = self._root == mount or self._root.startswith(mount.rstrip("/") + "/")
            if inside and len(mount) >= len(best):
                best, kind = mount, name
        return kind
