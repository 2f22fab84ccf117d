"""One interface for a folder, an object store and memory.

    store = open_store("s3://bucket/runs/a", {"endpoint": "https://s3.example.org"})
    store.write("step-100/data.bin", [header, tensor])
    store.create("step-100/manifest.json", manifest)  # only once: the second caller gets FileExistsError

Nothing is retried here: network and disk errors reach the caller, which decides (see `retrying_store`).
"""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Protocol, runtime_checkable
from urllib.parse import unquote, urlsplit

from danlu.storage.store.local_store import LocalStore
from danlu.storage.store.memory_store import get_memory_store
from danlu.storage.store.s3_store import S3Store
from danlu.storage.store.safe_path import Buffer

PERMANENT_ERRORS = (
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
    EOFError,
)
"""Errors of a store that the same call gives again; any other OSError may be gone at the next attempt."""


@runtime_checkable
class Store(Protocol):
    """Files under relative paths, each complete or absent.

    Every path is checked with `check_path` first. Methods may be called from several threads at once. A path is either
    a file or a folder; folders are created with their files, and one whose last file was removed may still be listed.
    """

    @property
    def name(self) -> str:
        """Name for messages: a folder, or `s3://bucket/prefix`."""
        ...

    def write(self, path: str, parts: Iterable[Buffer]) -> None:
        """Write a file from `parts`, in order; content and name are durable when this returns.

        It replaces an existing file atomically: a reader or a crash sees the old one or the new one. Parts are written
        while later ones are still being produced, so a part must not change before this returns. With a list, a full
        disk is found before the first byte is written: pass a generator only if the parts must not all be in memory.
        """
        ...

    def create(self, path: str, data: Buffer) -> None:
        """Create a small file, or raise FileExistsError; of several callers at once exactly one succeeds.

        After any other error the file may or may not exist: read it to find out.
        """
        ...

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Bytes of a file from `offset`, to its end unless `length` is given.

        FileNotFoundError if there is none, EOFError if it has fewer bytes. For much data `read_into` is faster.
        """
        ...

    def read_into(self, path: str, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes of a file from `offset`, with concurrent reads; errors as in `read`.

        Fastest on a local disk when the address of `into` and `offset` are both multiples of 4096.
        """
        ...

    def size(self, path: str) -> int:
        """Bytes in a file; FileNotFoundError if there is none."""
        ...

    def list(self, folder: str = "") -> list[str]:
        """Names directly inside a folder, sorted; empty if there is no such folder."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file, or a folder and its content; a missing one is no error.

        A folder is removed file by file: if half a folder would mislead, first remove the file that declares it whole.
        """
        ...

    def remove_except(self, folder: str, keep: str) -> None:
        """Remove all entries of a folder except those with the prefix `keep`; half-written files too.

        Cleans up after a killed process: call it when no other process writes there under other names.
        """
        ...

    def free_bytes(self) -> int | None:
        """Bytes that may still be written, or None if unknown."""
        ...


def open_store(where: str, options: Mapping[str, str] | None = None) -> Store:
    """Open the store at `where`: a folder, `file:///folder`, `s3://bucket/prefix` or `memory://name`.

    Options are for `s3://`: `endpoint` (of a server that is not Amazon's), `region`, `part_bytes` (of a multipart
    upload, 64 MiB), and in seconds `connect_timeout`, `read_timeout` (of silence in a response) and `request_timeout`
    (of one part on your network). Credentials are no option: they are found where fsspec and the AWS tools look. A
    `memory://` store is the same one for all callers in this process that give its name.
    """
    options = dict(options or {})
    scheme, separator, rest = where.partition("://")
    if separator and scheme == "s3":
        return S3Store.from_address(rest, options)
    if options:
        raise ValueError(
            f"{where} takes no options, but was given {', '.join(sorted(options))}; only s3:// has options"
        )
    if not separator:
        return LocalStore(Path(where))
    if scheme == "file":
        return LocalStore(_path_of_file_url(where))
    if scheme == "memory":
        return get_memory_store(rest)
    close = get_close_matches(scheme, ["s3", "file", "memory"], n=1)
    hint = f"; did you mean {close[0]}://?" if close else ""
    raise ValueError(f"{where}: a store is a folder, file://, s3:// or memory://, but not {scheme}://{hint}")


def _path_of_file_url(address: str) -> Path:
    parts = urlsplit(address)
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise ValueError(f"{address} must be file:///folder, with three slashes and no host")
    return Path(unquote(parts.path))
