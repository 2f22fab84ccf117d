"""A store in this process's memory: for rehearsals and tests, and for what need not outlive the process."""

import threading
from collections.abc import Iterable

from danlu.storage.store_path import Buffer, plain, safe, shortage


class MemoryStore:
    """Files in a dictionary, with the rules of a folder: a name is a file or a folder, never both."""

    def __init__(self, name: str) -> None:
        self.name = f"memory://{name}"
        self._files: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def write(self, path: str, parts: Iterable[Buffer]) -> None:
        """Make or replace a file."""
        safe(path)
        content = b"".join(plain(part) for part in parts)
        with self._lock:
            self._refuse_clash(path)
            self._files[path] = content

    def create(self, path: str, data: Buffer) -> None:
        """Make a file if there is none; FileExistsError otherwise."""
        safe(path)
        content = bytes(plain(data))
        with self._lock:
            if path in self._files or self._inside(path):
                raise FileExistsError(f"{self.name}: {path} is already there")
            self._refuse_clash(path)
            self._files[path] = content

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Bytes of a file from `offset`."""
        content = self._content(path)
        wanted = max(0, len(content) - offset) if length is None else length
        if offset + wanted > len(content):
            raise shortage(self.name, path, offset, wanted, len(content))
        return content[offset : offset + wanted]

    def read_into(self, path: str, offset: int, into: memoryview) -> None:
        """Fill `into` from `offset`."""
        target = plain(into)
        target[:] = self.read(path, offset, len(target))

    def size(self, path: str) -> int:
        """Bytes in a file."""
        return len(self._content(path))

    def _inside(self, folder: str) -> list[str]:
        return [path for path in self._files if path.startswith(f"{folder}/")]

    def list(self, folder: str = "") -> list[str]:
        """Names directly inside a folder."""
        start = f"{safe(folder)}/" if folder else ""
        with self._lock:
            return sorted({path[len(start) :].split("/")[0] for path in self._files if path.startswith(start)})

    def remove(self, path: str) -> None:
        """Take away a file or a folder."""
        safe(path)
        with self._lock:
            for gone in [path, *self._inside(path)]:
                self._files.pop(gone, None)

    def sweep(self, folder: str, keep: str) -> None:
        """Take away the files in a folder that do not begin with `keep`."""
        for name in self.list(folder):
            if not name.startswith(keep):
                self.remove(f"{folder}/{name}")

    def free(self) -> int | None:
        """Not told: what one process may take depends on the others."""
        return None

    def _content(self, path: str) -> bytes:
        safe(path)
        with self._lock:
            if path in self._files:
                return self._files[path]
        raise FileNotFoundError(f"{self.name}: there is no file {path}")

    def _refuse_clash(self, path: str) -> None:
        if self._inside(path):
            raise IsADirectoryError(f"{self.name}: {path} is a folder")
        parts = path.split("/")
        for count in range(1, len(parts)):
            if (above := "/".join(parts[:count])) in self._files:
                raise NotADirectoryError(f"{self.name}: {above} is a file, so {path} cannot be in it")


_named: dict[str, MemoryStore] = {}
_naming = threading.Lock()


def memory_store(name: str) -> MemoryStore:
    """The store in memory that has this name, made when it is first asked for."""
    if not name:
        raise ValueError("a store in memory must have a name: memory://name")
    with _naming:
        return _named.setdefault(name, MemoryStore(name))
