"""Reads files into memory: only regular ones of a sensible size, never one that would block on a writer."""

import json
import os
import stat
from pathlib import Path
from typing import Any

from danlu.spec.problem import Problem, SpecError, problem_at

MAX_TEXT_BYTES = 1 << 20
"""Maximum size of a recipe, a plan or a cluster. A probed cluster with every curve has less than a tenth of it."""
MAX_JSON_BYTES = 32 << 20
"""Maximum size of a JSON file from other tools, such as the index of a model with 100,000 tensors."""
MAX_NESTING = 50
"""Maximum nesting of tables and arrays."""


def read_bytes(path: Path, limit: int) -> bytes:
    """The bytes of a file; `SpecError` if it is a pipe, a device or a folder, cannot be read, or is too large."""
    try:
        # Without O_NONBLOCK, opening a FIFO waits for a writer that may never come.
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            read = _read(path, opened, limit)
        finally:
            os.close(opened)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # a ValueError if the path contains a NUL
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise SpecError([_problem(path, f"cannot be read: {reason}", "check its path and its permissions")]) from None
    if len(read) > limit:
        raise SpecError([_too_large(path, limit, len(read))])
    return read


def _read(path: Path, opened: int, limit: int) -> bytes:
    found = os.fstat(opened)
    if not stat.S_ISREG(found.st_mode):
        raise SpecError([_problem(path, f"is {_kind(found.st_mode)}", "name a regular file")])
    if found.st_size > limit:
        raise SpecError([_too_large(path, limit, found.st_size)])
    with os.fdopen(opened, "rb", closefd=False) as file:
        return file.read(limit + 1)


def read_text(path: Path, limit: int = MAX_TEXT_BYTES) -> str:
    """The text of a UTF-8 file, without a byte order mark; otherwise as `read_bytes`."""
    try:
        return read_bytes(path, limit).decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        message = f"is not text in UTF-8: {error.reason}"
        raise SpecError([problem_at(path, line, "file", message, "save it as UTF-8")]) from None


def read_json(path: Path, limit: int = MAX_JSON_BYTES) -> Any:
    """The value of a JSON file; `SpecError` if it is not JSON or is nested too deeply."""
    return parse_json(read_text(path, limit), path)


def parse_json(text: str, path: Path) -> Any:
    """The value of a JSON text from the file `path`."""
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        hint = "get the file again: it may be truncated"
        raise SpecError([problem_at(path, error.lineno, "syntax", f"is not JSON: {error.msg}", hint)]) from None
    except RecursionError:
        raise SpecError([nesting_problem(path)]) from None
    except ValueError as error:  # a number with more digits than Python parses
        message = f"is not JSON that can be read: {str(error).partition(';')[0]}"
        raise SpecError([problem_at(path, 1, "syntax", message, "write smaller numbers")]) from None
    if is_too_nested(values):
        raise SpecError([nesting_problem(path)])
    return values


def is_too_nested(values: Any) -> bool:
    """Whether tables and arrays are nested deeper than `MAX_NESTING`; checked without recursion."""
    level = [values]
    for _ in range(MAX_NESTING):
        level = [inner for value in level if isinstance(value, dict | list) for inner in _inside(value)]
        if not level:
            return False
    return any(isinstance(value, dict | list) for value in level)


def _inside(value: dict[str, Any] | list[Any]) -> list[Any]:
    return [inner for inner in (value.values() if isinstance(value, dict) else value) if isinstance(inner, dict | list)]


def nesting_problem(path: Path) -> Problem:
    """The problem of a file that is nested too deeply."""
    message = f"nests tables or arrays more than {MAX_NESTING} deep"
    return problem_at(path, 1, "syntax", message, "no setting needs more than a few")


def _problem(path: Path, message: str, suggestion: str) -> Problem:
    return problem_at(path, 1, "file", message, suggestion)


def _too_large(path: Path, limit: int, size: int) -> Problem:
    message = f"has {size:,} bytes, but must have at most {limit:,}"
    return _problem(path, message, "is it the file that was meant?")


def _kind(mode: int) -> str:
    names = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return names.get(stat.S_IFMT(mode), "a device")
