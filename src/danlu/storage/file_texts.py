"""The documents of one file: JSON lines, plain or gzipped, or a text of any kind; and what is left out of it."""

import gzip
import io
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from danlu.spec import Problem, SpecError
from danlu.spec.problem import problem_at, shown

LARGEST_DOCUMENT = 256 << 20
"""Bytes; a document is held in memory whole, and a longer one is nearly always a corpus in one file."""

UNREADABLE = "unreadable"
_EXAMPLES = 5
_MEND = "mend it, or leave such documents out (and counted) with --skip-bad"


@dataclass(frozen=True)
class SourceFile:
    """A file as it was found."""

    path: Path
    bytes: int
    changed: int
    """When it was last written, in nanoseconds."""
    spare: bool
    """A bad file of this source is left out and counted without being asked: it is not the user's to mend."""

    @property
    def holds_lines(self) -> bool:
        """Whether it is a document a line, and not one document."""
        return self.path.name.endswith((".jsonl", ".jsonl.gz"))


class OnLeftOut(Protocol):
    """Told of a document or a file that is left out: why, and what is wrong where something is."""

    def __call__(self, file: SourceFile | None, reason: str, problem: Problem | None = None) -> None:
        """Count it, or raise."""
        ...


class LeftOut:
    """How many documents and files were left out, by reason; a bad one is an error unless it was allowed for."""

    def __init__(
        self, skip_bad: bool, counts: Mapping[str, int] | None = None, examples: tuple[Problem, ...] = ()
    ) -> None:
        """Count on from `counts`."""
        self.counts: Mapping[str, int] = dict(counts or {})
        """Never changed in place, so that a place can hold it as it was."""
        self.examples = examples
        """The first few of the bad ones."""
        self._skip_bad = skip_bad

    def __call__(self, file: SourceFile | None, reason: str, problem: Problem | None = None) -> None:
        """Count one more; raise if it is bad and bad ones are not to be left out."""
        if problem is not None and not (self._skip_bad or (file is not None and file.spare)):
            raise SpecError([problem])
        self.counts = {**self.counts, reason: self.counts.get(reason, 0) + 1}
        if problem is not None and len(self.examples) < _EXAMPLES:
            self.examples += (problem,)


class _BadLineError(Exception):
    """A line that holds no document."""

    def __init__(self, reason: str, key: str, message: str, suggestion: str = _MEND) -> None:
        super().__init__(message)
        self.reason, self.key, self.message, self.suggestion = reason, key, message, suggestion


class FileTexts:
    """The texts of a file, or of the lines that begin in a stretch of it, each with its line."""

    def __init__(
        self,
        file: SourceFile,
        field: str,
        on_left_out: OnLeftOut,
        *,
        first: int = 0,
        start: int = 0,
        end: int | None = None,
    ) -> None:
        """Leave out lines before `first`. Lines are counted from byte `start` on, and read if they begin before `end`.

        Only a file of plain JSON lines has stretches.
        """
        self.position = start
        """Bytes of the file read so far."""
        self.lines = 0
        """Lines read so far."""
        self._file, self._field, self._left_out = file, field, on_left_out
        self._first, self._start, self._end = first, start, end

    def __iter__(self) -> Iterator[tuple[int, str]]:
        """Each text with its line; 0 where the file is one document."""
        try:
            yield from self._json_lines() if self._file.holds_lines else self._text()
        except OSError as error:
            message = f"cannot be read: {error.strerror or error}"
            self._left_out(self._file, UNREADABLE, problem_at(self._file.path, 1, "file", message, _MEND))

    def _text(self) -> Iterator[tuple[int, str]]:
        """A whole file as one document."""
        path, size = self._file.path, self._file.bytes
        if size > LARGEST_DOCUMENT:
            message = f"is one document of {size} bytes, but {LARGEST_DOCUMENT} is the most"
            raise SpecError([problem_at(path, 1, "file", message, "write it as JSON lines, one document a line")])
        raw = path.read_bytes()
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            line = raw.count(b"\n", 0, error.start) + 1
            problem = problem_at(path, line, "file", f"is not UTF-8: {error.reason} at byte {error.start}", _MEND)
            self._left_out(self._file, "not UTF-8", problem)
            return
        if text:
            yield 0, text
        else:
            self._left_out(self._file, "empty")

    def _json_lines(self) -> Iterator[tuple[int, str]]:
        """A document a line, in the field asked for; a blank line holds nothing."""
        with self._file.path.open("rb") as raw:
            try:
                _go_to_line(raw, self._start)
                for line in self._lines(raw):
                    if self.lines >= self._first and not line.isspace():
                        yield from ((self.lines, text) for text in self._document(line))
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                message = f"is broken gzip from here on: {error}"
                problem = problem_at(self._file.path, self.lines + 1, "file", message, _MEND)
                self._left_out(self._file, "broken gzip", problem)

    def _lines(self, raw: BinaryIO) -> Iterator[bytes]:
        """Lines, unpacked; one that would not fit in memory is an error, since what follows it is unknown."""
        packed = self._file.path.name.endswith(".gz")
        stream = io.BufferedReader(gzip.GzipFile(fileobj=raw)) if packed else raw
        while (self._end is None or raw.tell() < self._end) and (line := stream.readline(LARGEST_DOCUMENT)):
            self.lines += 1
            self.position = raw.tell()
            if len(line) == LARGEST_DOCUMENT:
                message = f"is {LARGEST_DOCUMENT} bytes or longer"
                raise SpecError([problem_at(self._file.path, self.lines, "line", message, "split the document")])
            yield line

    def _document(self, line: bytes) -> Iterator[str]:
        try:
            text = _field_text(line, self._field)
        except _BadLineError as bad:
            problem = problem_at(self._file.path, self.lines, bad.key, bad.message, bad.suggestion)
            self._left_out(self._file, bad.reason, problem)
            return
        if text:
            yield text
        else:
            self._left_out(self._file, "empty")


def _go_to_line(raw: BinaryIO, start: int) -> None:
    """Stand at the first line that begins at byte `start` or behind it."""
    if start:
        raw.seek(start - 1)
        while (passed := raw.readline(1 << 20)) and not passed.endswith(b"\n"):
            pass


def _field_text(line: bytes, field: str) -> str:
    """The text in a field of a JSON line."""
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise _BadLineError("bad JSON", "line", f"is not JSON: {error}") from None
    if not isinstance(record, dict):
        raise _BadLineError("bad JSON", "line", f"is {shown(record)}, but must be an object with the field `{field}`")
    if field not in record:
        suggestion = f"the line has: {', '.join(record) or 'nothing'}; name one with --field, or {_MEND}"
        raise _BadLineError("no field", field, "is missing", suggestion)
    text = record[field]
    if not isinstance(text, str):
        raise _BadLineError("not a text", field, f"is {shown(text)}, but must be a text")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _BadLineError("not Unicode", field, "holds half of a UTF-16 pair, which is not a character") from None
    return text
