"""Where files are kept: a folder, an object store, or memory, behind one interface.

    store = open_store("s3://bucket/runs/a", {"endpoint": "https://s3.example.org"})
    store.write("step-100/data.bin", [header, tensor])
    store.create("step-100/manifest.json", manifest)  # only once: the second one to try gets FileExistsError

Nothing is tried twice: an error of a network or a disk reaches the caller, whose policy decides.
"""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Protocol, runtime_checkable
from urllib.parse import unquote, urlsplit

from danlu.storage.calls import Calls
from danlu.storage.local_store import LocalStore
from danlu.storage.memory_store import MemoryStore, memory_store
from danlu.storage.object_store import ObjectStore
from danlu.storage.store_path import LONGEST_PART, LONGEST_PATH, Buffer, UnsafePathError, safe

__all__ = [
    "LONGEST_PART",
    "LONGEST_PATH",
    "Buffer",
    "Calls",
    "LocalStore",
    "MemoryStore",
    "ObjectStore",
    "Store",
    "UnsafePathError",
    "open_store",
    "safe",
]


@runtime_checkable
class Store(Protocol):
    """Files under relative paths, each whole or absent.

    Every path is held against `safe` first. Methods may be called from several threads at once. A path is either a
    file or a folder; folders come with what is in them, and one whose last file was removed may still be listed.
    """

    @property
    def name(self) -> str:
        """What to call this store in messages: a folder, or `s3://bucket/prefix`."""
        ...

    def write(self, path: str, parts: Iterable[Buffer]) -> None:
        """Make a file of `parts`, one after the other; it is durable, content and name, when this returns.

        It takes the place of a file that is there, at once and whole: a reader or a crash sees the old one or the new
        one. Parts are written while later ones are still being asked for, so a part must not change before this
        returns. A list lets a full disk be found before the first byte is written; so do not make it a generator
        unless its parts must not all be in memory.
        """
        ...

    def create(self, path: str, data: Buffer) -> None:
        """Make a small file if there is none, or raise FileExistsError; of several at once exactly one succeeds.

        After any other error the file may or may not be there: read it to find out.
        """
        ...

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Bytes of a file from `offset`, all that follow unless `length` is given.

        FileNotFoundError if there is none, EOFError if it has fewer bytes. For much data `read_into` is quicker.
        """
        ...

    def read_into(self, path: str, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes of a file from `offset`, several reads at once; errors as in `read`.

        Quickest on a local disk when `into` lies at a multiple of 4096 in memory as `offset` does in the file.
        """
        ...

    def size(self, path: str) -> int:
        """Bytes in a file; FileNotFoundError if there is none."""
        ...

    def list(self, folder: str = "") -> list[str]:
        """Names directly inside a folder, sorted; a folder that is not there is empty."""
        ...

    def remove(self, path: str) -> None:
        """Take away a file, or a folder with all that is inside; one that is not there is no error.

        A folder goes file by file: where half a folder would mislead, remove the file that declares it whole first.
        """
        ...

    def sweep(self, folder: str, keep: str) -> None:
        """Take away all that is directly inside a folder and does not begin with `keep`, half-written files too.

        For what a process left that was killed: call it when nobody else writes there under other names.
        """
        ...

    def free(self) -> int | None:
        """Bytes that may still be written, or None where nobody can tell."""
        ...


def open_store(where: str, options: Mapping[str, str] | None = None) -> Store:
    """Open the store at `where`: a folder, `file:///folder`, `s3://bucket/prefix` or `memory://name`.

    Options are for `s3://`: `endpoint` (of a server that is not Amazon's), `region`, `part_bytes` (of a multipart
    upload, 64 MiB), and in seconds `connect_timeout`, `read_timeout` (of silence in an answer) and `request_timeout`
    (what a part may take on your network). Credentials are none of them: they are found where fsspec
    and the AWS tools look. A store in memory is the same one for everybody in this process who gives its name.
    """
    options = dict(options or {})
    scheme, separator, rest = where.partition("://")
    if separator and scheme == "s3":
        return ObjectStore.at(rest, options)
    if options:
        raise ValueError(f"{where} takes no options, but was given {', '.join(sorted(options))}; only s3:// has any")
    if not separator:
        return LocalStore(Path(where))
    if scheme == "file":
        return LocalStore(_folder_of(where))
    if scheme == "memory":
        return memory_store(rest)
    close = get_close_matches(scheme, ["s3", "file", "memory"], n=1)
    hint = f"; did you mean {close[0]}://?" if close else ""
    raise ValueError(f"{where}: a store is a folder, file://, s3:// or memory://, but not {scheme}://{hint}")


def _folder_of(address: str) -> Path:
    parts = urlsplit(address)
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise ValueError(f"{address} must be file:///folder, with three slashes and no host")
    return Path(unquote(parts.path))
