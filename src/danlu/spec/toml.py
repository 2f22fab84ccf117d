"""TOML in, with the line of every key, and TOML out."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from danlu.spec.description import Description

KeyPath = tuple[str | int, ...]

_NAME = r"""(?:[\w-]+|"(?:\\.|[^"\\])*"|'[^']*')"""
_DOTTED = rf"{_NAME}(?:\s*\.\s*{_NAME})*"
_HEADER = re.compile(rf"^\s*(\[\[?)\s*({_DOTTED})\s*\]\]?\s*(?:#.*)?$")
_KEY = re.compile(rf"^\s*({_DOTTED})\s*=")
_TOKEN = re.compile(r"""\"{3}|'{3}|"(?:\\.|[^"\\])*"|'[^']*'|#.*|[\[\]{}]""")
_CLOSING = {'"' * 3: re.compile(r'(?:\\.|[^\\])*?"{3,5}'), "'" * 3: re.compile(r".*?'{3,5}")}
"""Up to the end of a multi-line string; one or two quotes may stand right before its delimiter."""


@dataclass(frozen=True)
class Document:
    """A parsed TOML file that remembers where its keys stand."""

    path: Path
    values: dict[str, Any]
    lines: Mapping[KeyPath, int]

    def line(self, key: KeyPath) -> int:
        """Line of `key`, or of the nearest table around it that the file has; 1 if it has none."""
        while key and key not in self.lines:
            key = key[:-1]
        return self.lines.get(key, 1)


def read(path: Path) -> Document:
    """Read a TOML file; raises `tomllib.TOMLDecodeError` on bad syntax."""
    text = path.read_text(encoding="utf-8")
    return Document(path, tomllib.loads(text), key_lines(text))


def key_lines(text: str) -> dict[KeyPath, int]:
    """Line number (from 1) of every table and key in valid TOML.

    The standard library's parser forgets positions, so this walks the lines beside it. A value
    that runs over several lines belongs to the line of its key; a table that is only implied by a
    longer name stands where it is first named.
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
    """The names of a dotted key, unquoted by the parser itself."""
    parts: KeyPath = ()
    values: Any = tomllib.loads(f"{dotted} = 0")
    while isinstance(values, dict):
        ((name, values),) = values.items()
        parts += (name,)
    return parts


def _descend(parts: KeyPath, arrays: dict[KeyPath, int], is_array: bool) -> KeyPath:
    """The path of a table header, with the index of the newest element behind every array of tables."""
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


def dumps(description: Description) -> str:
    """Write a description as TOML; fields that hold nothing are left out."""
    return tomli_w.dumps(description.model_dump(mode="json", exclude_none=True), multiline_strings=True)
