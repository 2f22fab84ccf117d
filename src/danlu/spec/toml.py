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

_HEADER = re.compile(r"^\s*(\[\[|\[)\s*(.+?)\s*\]\]?\s*(#.*)?$")
_KEY = re.compile(r"""^\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=""")
_PART = re.compile(r"""[\w-]+|"[^"]*"|'[^']*'""")
_STRING = re.compile(r'"(?:\\.|[^"\\])*"|\'[^\']*\'')
_LONG_STRING = re.compile(r'"""|\'\'\'')


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
    text = path.read_text()
    return Document(path, tomllib.loads(text), key_lines(text))


def key_lines(text: str) -> dict[KeyPath, int]:
    """Line number (from 1) of every table header and key in valid TOML.

    The standard library's parser forgets positions, so this walks the lines beside it. A value
    that runs over several lines belongs to the line of its key.
    """
    lines: dict[KeyPath, int] = {}
    arrays: dict[KeyPath, int] = {}
    table: KeyPath = ()
    depth = 0  # open brackets of a value that spans lines
    quote = ""  # delimiter of a multi-line string we are inside
    for number, line in enumerate(text.splitlines(), start=1):
        if not quote and not depth:
            if header := _HEADER.match(line):
                table = _descend(_parts(header[2]), arrays, header[1] == "[[")
                lines.setdefault(table, number)
                continue
            if key := _KEY.match(line):
                lines.setdefault(table + _parts(key[1]), number)
                line = line[key.end() :]
        depth, quote = _still_open(line, depth, quote)
    return lines


def _parts(dotted: str) -> KeyPath:
    return tuple(part.strip("\"'") for part in _PART.findall(dotted))


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
    return path + (arrays[path],) if path in arrays else path


def _still_open(line: str, depth: int, quote: str) -> tuple[int, str]:
    """Brackets and multi-line string still open after `line`."""
    while True:
        if quote:
            before, found, line = line.partition(quote)
            if not found:
                return depth, quote
            quote = ""
        opening = _LONG_STRING.search(line)
        plain = line[: opening.start()] if opening else line
        plain = _STRING.sub("", plain).split("#")[0]
        depth += sum(plain.count(c) for c in "[{") - sum(plain.count(c) for c in "]}")
        if not opening:
            return depth, ""
        quote, line = opening[0], line[opening.end() :]


def dumps(description: Description) -> str:
    """Write a description as TOML; fields that hold nothing are left out."""
    return tomli_w.dumps(description.model_dump(mode="json", exclude_none=True), multiline_strings=True)
