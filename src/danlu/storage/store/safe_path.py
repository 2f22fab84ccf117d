"""Validation of file names in a store or in an index: relative, plain, and never outside their folder."""

from pathlib import Path

Buffer = bytes | bytearray | memoryview

MAX_PATH_BYTES = 700
"""Bytes of a path in UTF-8: an object key has at most 1024, prefix included."""
MAX_NAME_BYTES = 200
"""Bytes of one name: file systems allow 255, and a temporary file has `TEMP_MARK` in its name."""
TEMP_MARK = ".danlu-unfinished-"
"""Part of the name of a file that is being written; not allowed in a path, never listed."""


class UnsafePathError(ValueError):
    """A path that could leave its store, or that some kind of store cannot hold."""


def check_path(path: str) -> str:
    """Return `path` if it names a file inside a store, and raise `UnsafePathError` otherwise.

    Paths come from manifests, and a manifest may be corrupt or hostile: `../../etc/passwd` must not be a file of a
    checkpoint. Relative paths with "/" between non-empty parts are allowed.
    """
    if problem := _path_problem(path):
        shown = repr(path if len(path) <= 80 else path[:80] + "…")
        raise UnsafePathError(f"the path {shown} {problem}; a store holds relative paths such as 'step-100/data.bin'")
    return path


def sibling_file(index: Path, name: object) -> Path:
    """The file in the folder of `index` that it names; raises `UnsafePathError` for a name that could lead elsewhere.

    Only the name is checked: a link in the folder is its owner's choice, and is followed. Hugging Face's cache consists
    of such links.
    """
    problem = "is not a string"
    if isinstance(name, str):
        problem = _path_problem(name) or ("is in another folder" if "/" in name else "")
    if problem:
        shown = repr(name)[:80]
        raise UnsafePathError(
            f"{index} must name files beside it, but names {shown}, which {problem}; get it from a source you trust"
        )
    return index.parent / str(name)


def byte_view(data: Buffer) -> memoryview:
    """A buffer as a flat view of its bytes, without a copy; a strided one is an error."""
    view = memoryview(data)
    if not view.c_contiguous:
        raise ValueError(f"a buffer must be contiguous, but has strides {view.strides} for shape {view.shape}")
    return view.cast("B") if view.nbytes else memoryview(b"")


def short_read_error(name: str, path: str, offset: int, wanted: int, size: int) -> EOFError:
    """The error for a read beyond the end of a file."""
    return EOFError(f"{name}: {path} has {size} bytes, but bytes {offset} to {offset + wanted} were asked for")


def _path_problem(path: str) -> str:
    try:
        encoded = path.encode("utf-8")
    except UnicodeEncodeError:
        return "cannot be encoded in UTF-8"
    if not path:
        return "is empty"
    if len(encoded) > MAX_PATH_BYTES:
        return f"has {len(encoded)} bytes, more than {MAX_PATH_BYTES}"
    if path.startswith("/"):
        return "is absolute"
    if "\\" in path:
        return "contains a backslash"
    if any(ord(character) < 32 or ord(character) == 127 for character in path):
        return "contains a control character"
    if TEMP_MARK in path:
        return f"contains {TEMP_MARK!r}, the mark of files being written"
    parts = path.split("/")
    if "" in parts:
        return "has an empty part"
    if "." in parts or ".." in parts:
        return "has a part that is '.' or '..'"
    longest = max(parts, key=lambda part: len(part.encode()))
    if len(longest.encode()) > MAX_NAME_BYTES:
        return f"has a part of {len(longest.encode())} bytes, more than {MAX_NAME_BYTES}"
    return ""
