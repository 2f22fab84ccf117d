"""Reads TOML, with the line of every key, and writes TOML."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from danlu.spec.description import SpecModel
from danlu.spec.files import is_too_nested, nesting_problem, read_text
from danlu.spec.problem import SpecError, problem_at
from danlu.spec.quantity import IN_FILE

KeyPath = tuple[str | int, ...]

_SYNTAX = "see https://toml.io for the syntax"
_NAME = r"""(?:[\w-]+|"(?:\\.|[^"\\])*"|'[^']*')"""
_DOTTED = rf"{_NAME}(?:\s*\.\s*{_NAME})*"
_BARE = re.compile(r"[\w\s.-]+", re.ASCII)
_HEADER = re.compile(rf"^\s*(\[\[?)\s*({_DOTTED})\s*\]\]?\s*(?:#.*)?$")
_KEY = re.compile(rf"^\s*({_DOTTED})\s*=")
_TOKEN = re.compile(r"""\"{3}|'{3}|"(?:\\.|[^"\\])*"|'[^']*'|#.*|[\[\]{}]""")
_CLOSING = {'"' * 3: re.compile(r'(?:\\.|[^\\])*?"{3,5}'), "'" * 3: re.compile(r".*?'{3,5}")}
"""Up to the end of a multi-line string; one or two quotes may precede its delimiter."""


@dataclass(frozen=True)
class TomlDocument:
    """A parsed TOML file with the lines of its keys."""

    path: Path
    values: dict[str, Any]
    lines: Mapping[KeyPath, int]
    overrides: Mapping[KeyPath, int] = field(default_factory=dict)
    """Keys whose values come from the command line, with the number of the option."""

    def location(self, key: KeyPath) -> tuple[Path, int]:
        """File and line of `key`; the option and its number if it comes from the command line."""
        for length in range(len(key), 0, -1):
            if key[:length] in self.overrides:
                return Path("--set"), self.overrides[key[:length]]
        return self.path, self.line(key)

    def line(self, key: KeyPath) -> int:
        """Line of `key`, or of the nearest table around it that the file has; 1 if it has none."""
        while key and key not in self.lines:
            key = key[:-1]
        return self.lines.get(key, 1)


def read(path: Path) -> TomlDocument:
    """Read a TOML file; raises `FileNotFoundError` if there is none, `SpecError` if it is not TOML."""
    text = read_text(path)
    values = _parsed(path, text)
    if is_too_nested(values):
        raise SpecError([nesting_problem(path)])
    return TomlDocument(path, values, key_lines(text))


def _parsed(path: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message, _, position = str(error).partition(" (at ")
        line = int(position.split(",")[0][5:]) if position.startswith("line ") else text.count("\n") + 1
        raise SpecError([problem_at(path, line, "syntax", f"is not TOML: {message}", _SYNTAX)]) from None
    except RecursionError:
        raise SpecError([nesting_problem(path)]) from None
    except ValueError as error:  # a number with more digits than Python parses, a date that does not exist
        message = f"is not TOML that can be read: {str(error).partition(';')[0]}"
        raise SpecError([problem_at(path, 1, "syntax", message, _SYNTAX)]) from None


def key_lines(text: str) -> dict[KeyPath, int]:
    """Line number (from 1) of every table and key in valid TOML.

    The standard library's parser drops positions, so this scans the lines separately. A value over
    several lines belongs to the line of its key; a table that is only implied by a longer name is
    where it is first named.
    """
    lines: dict[KeyPath, int] = {}
    implied: dict[KeyPath, int] = {}
    arrays: dict[KeyPath, int] = {}
    table: KeyPath = ()
    depth = 0  # open brackets of a value that spans lines
    quote = ""  # delimiter of a multi-line string we are inside
    for number, line in enumerate(text.split("\n"), start=1):
        if not quote and not depth:
            if header := _HEADER.match(line.rstrip("\r")):
                table = _descend(_parts(header[2]), arrays, header[1] == "[[")
                _place(table, number, lines, implied)
                continue
            if key := _KEY.match(line):
                _place(table + _parts(key[1]), number, lines, implied)
                line = line[key.end() :]
        depth, quote = _still_open(line, depth, quote)
    return implied | lines


def _place(path: KeyPath, number: int, lines: dict[KeyPath, int], implied: dict[KeyPath, int]) -> None:
    lines.setdefault(path, number)
    for length in range(1, len(path)):
        implied.setdefault(path[:length], number)


def _parts(dotted: str) -> KeyPath:
    """The names of a dotted key, unquoted by the parser itself where they are quoted."""
    if _BARE.fullmatch(dotted):
        return tuple(part.strip() for part in dotted.split("."))
    parts: KeyPath = ()
    values: Any = tomllib.loads(f"{dotted} = 0")
    while isinstance(values, dict):
        ((name, values),) = values.items()
        parts += (name,)
    return parts


def _descend(parts: KeyPath, arrays: dict[KeyPath, int], is_array: bool) -> KeyPath:
    """The path of a table header, with the index of the newest element after every array of tables."""
    path: KeyPath = ()
    for part in parts[:-1]:
        path += (part,)
        if path in arrays:
            path += (arrays[path],)
    path += (parts[-1],)
    if is_array:
        arrays[path] = arrays.get(path, -1) + 1
        path += (arrays[path],)
    return path


def _still_open(line: str, depth: int, quote: str) -> tuple[int, str]:
    """Brackets and multi-line string still open after `line`."""
    position = 0
    while True:
        if quote:
            end = _CLOSING[quote].match(line, position)
            if not end:
                return depth, quote
            position, quote = end.end(), ""
        token = _TOKEN.search(line, position)
        if not token or token[0].startswith("#"):
            return depth, ""
        position = token.end()
        if token[0] in _CLOSING:
            quote = token[0]
        else:
            depth += (token[0] in "[{") - (token[0] in "]}")


def dumps(description: SpecModel) -> str:
    """Write a description as TOML, quantities with their units; fields that are None are omitted."""
    values = description.model_dump(mode="json", exclude_none=True, context={IN_FILE: True})
    return tomli_w.dumps(values, multiline_strings=True)
