"""A store in this process's memory: for dry runs and tests, and for what need not outlive the process."""

import threading
from collections.abc import Iterable

from danlu.storage.store.safe_path import Buffer, byte_view, check_path, short_read_error


class MemoryStore:
    """Files in a dictionary, with the rules of a folder: a name is a file or a folder, never both."""

    def __init__(self, name: str) -> None:
        self.name = f"memory://{name}"
        self._files: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def write(self, path: str, parts: Iterable[Buffer]) -> None:
        """Create or replace a file."""
        check_path(path)
        content = b"".join(byte_view(part) for part in parts)
        with self._lock:
            self._check_no_conflict(path)
            self._files[path] = content

    def create(self, path: str, data: Buffer) -> None:
        """Create a file; FileExistsError if there is one."""
        check_path(path)
        content = bytes(byte_view(data))
        with self._lock:
            if path in self._files or self._inside(path):
                raise FileExistsError(f"{self.name}: {path} already exists")
            self._check_no_conflict(path)
            self._files[path] = content

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Bytes of a file from `offset`."""
        content = self._content(path)
        wanted = max(0, len(content) - offset) if length is None else length
        if offset + wanted > len(content):
            raise short_read_error(self.name, path, offset, wanted, len(content))
        return content[offset : offset + wanted]

    def read_into(self, path: str, offset: int, into: memoryview) -> None:
        """Fill `into` from `offset`."""
        target = byte_view(into)
        target[:] = self.read(path, offset, len(target))

    def size(self, path: str) -> int:
        """Bytes in a file."""
        return len(self._content(path))

    def _inside(self, folder: str) -> list[str]:
        return [path for path in self._files if path.startswith(f"{folder}/")]

    def list(self, folder: str = "") -> list[str]:
        """Names directly inside a folder."""
        start = f"{check_path(folder)}/" if folder else ""
        with self._lock:
            return sorted({path[len(start) :].split("/")[0] for path in self._files if path.startswith(start)})

    def remove(self, path: str) -> None:
        """Remove a file or a folder."""
        check_path(path)
        with self._lock:
            for gone in [path, *self._inside(path)]:
                self._files.pop(gone, None)

    def remove_except(self, folder: str, keep: str) -> None:
        """Remove the files of a folder except those with the prefix `keep`."""
        for name in self.list(folder):
            if not name.startswith(keep):
                self.remove(f"{folder}/{name}")

    def free_bytes(self) -> int | None:
        """Unknown: what one process may use depends on the others."""
        return None

    def _content(self, path: str) -> bytes:
        check_path(path)
        with self._lock:
            if path in self._files:
                return self._files[path]
        raise FileNotFoundError(f"{self.name}: there is no file {path}")

    def _check_no_conflict(self, path: str) -> None:
        if self._inside(path):
            raise IsADirectoryError(f"{self.name}: {path} is a folder")
        parts = path.split("/")
        for count in range(1, len(parts)):
            if (above := "/".join(parts[:count])) in self._files:
                raise NotADirectoryError(f"{self.name}: {above} is a file, so {path} cannot be in it")


_stores: dict[str, MemoryStore] = {}
_stores_lock = threading.Lock()


def get_memory_store(name: str) -> MemoryStore:
    """The store in memory of this name, created at first use."""
    if not name:
        raise ValueError("a store in memory must have a name: memory://name")
    with _stores_lock:
        return _stores.setdefault(name, MemoryStore(name))
