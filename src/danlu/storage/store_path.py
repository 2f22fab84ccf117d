"""Names of files in a store: relative, plain, and the same on every kind of store."""

Buffer = bytes | bytearray | memoryview

LONGEST_PATH = 700
"""Bytes of a path in UTF-8: an object store's key ends at 1024, and its prefix counts too."""
LONGEST_PART = 200
"""Bytes of one name: file systems end at 255, and a file being written carries a mark."""
UNFINISHED = ".danlu-unfinished-"
"""Mark in the name of a file that is being written; no path may hold it, no listing shows it."""


class UnsafePathError(ValueError):
    """A path that could lead out of its store, or that some kind of store cannot hold."""


def safe(path: str) -> str:
    """Return `path` if it names a file inside a store, and raise `UnsafePathError` otherwise.

    Paths come out of manifests, and a manifest may be damaged or hostile: `../../etc/passwd` must not be a file of a
    checkpoint. Allowed are relative paths with "/" between non-empty parts.
    """
    if problem := _problem(path):
        shown = repr(path if len(path) <= 80 else path[:80] + "…")
        raise UnsafePathError(f"the path {shown} {problem}; a store holds relative paths such as 'step-100/data.bin'")
    return path


def plain(data: Buffer) -> memoryview:
    """A buffer as a flat view of its bytes; no copy is made, so a strided one is an error."""
    view = memoryview(data)
    if not view.c_contiguous:
        raise ValueError(f"a buffer must be contiguous, but has strides {view.strides} for shape {view.shape}")
    return view.cast("B") if view.nbytes else memoryview(b"")


def shortage(name: str, path: str, offset: int, wanted: int, size: int) -> EOFError:
    """The error for bytes that a file does not have."""
    return EOFError(f"{name}: {path} has {size} bytes, but bytes {offset} to {offset + wanted} were asked for")


def _problem(path: str) -> str:
    try:
        encoded = path.encode("utf-8")
    except UnicodeEncodeError:
        return "cannot be written in UTF-8"
    if not path:
        return "is empty"
    if len(encoded) > LONGEST_PATH:
        return f"has {len(encoded)} bytes, more than {LONGEST_PATH}"
    if path.startswith("/"):
        return "is absolute"
    if "\\" in path:
        return "holds a backslash"
    if any(ord(character) < 32 or ord(character) == 127 for character in path):
        return "holds a control character"
    if UNFINISHED in path:
        return f"holds {UNFINISHED!r}, the mark of files being written"
    parts = path.split("/")
    if "" in parts:
        return "has an empty part"
    if "." in parts or ".." in parts:
        return "has a part that is '.' or '..'"
    longest = max(parts, key=lambda part: len(part.encode()))
    if len(longest.encode()) > LONGEST_PART:
        return f"has a part of {len(longest.encode())} bytes, more than {LONGEST_PART}"
    return ""
