"""The documents of one file: JSON lines, plain or gzipped, or any text; and what is skipped."""

import gzip
import io
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from danlu.spec import Problem, SpecError
from danlu.spec.problem import format_value, problem_at
from danlu.storage.data.chat_template import ChatTemplate, ConversationError, DocumentText

MAX_DOCUMENT_BYTES = 256 << 20
"""Bytes; an entire document is held in memory, and a longer one is nearly always a corpus in one file."""

UNREADABLE = "unreadable"
_MAX_EXAMPLES = 5
_FIX_HINT = "fix it, or skip (and count) such documents with --skip-bad"


@dataclass(frozen=True)
class SourceFile:
    """A file as it was found."""

    path: Path
    bytes: int
    mtime_ns: int
    """When it was last written, in nanoseconds."""
    skip_if_bad: bool
    """A bad file is skipped and counted without --skip-bad: the user cannot fix files of this source."""

    @property
    def is_jsonl(self) -> bool:
        """Whether it has one document per line, and is not one document."""
        return self.path.name.endswith((".jsonl", ".jsonl.gz"))


class OnSkip(Protocol):
    """Called for a skipped document or file with the reason, and with the problem if it is bad."""

    def __call__(self, file: SourceFile | None, reason: str, problem: Problem | None = None) -> None:
        """Count it, or raise."""
        ...


class SkipCounter:
    """Number of skipped documents and files, by reason; a bad one is an error unless `skip_bad`."""

    def __init__(
        self, skip_bad: bool, counts: Mapping[str, int] | None = None, examples: tuple[Problem, ...] = ()
    ) -> None:
        """Continue from `counts`."""
        self.counts: Mapping[str, int] = dict(counts or {})
        """Never changed in place, so that a position can keep its value at that point."""
        self.examples = examples
        """The first few bad ones."""
        self._skip_bad = skip_bad

    def __call__(self, file: SourceFile | None, reason: str, problem: Problem | None = None) -> None:
        """Count one more; raise if it is bad and bad ones are not skipped."""
        if problem is not None and not (self._skip_bad or (file is not None and file.skip_if_bad)):
            raise SpecError([problem])
        self.counts = {**self.counts, reason: self.counts.get(reason, 0) + 1}
        if problem is not None and len(self.examples) < _MAX_EXAMPLES:
            self.examples += (problem,)


class _BadLineError(Exception):
    """A line without a document."""

    def __init__(self, reason: str, key: str, message: str, suggestion: str = _FIX_HINT) -> None:
        super().__init__(message)
        self.reason, self.key, self.message, self.suggestion = reason, key, message, suggestion


@dataclass(frozen=True)
class DocumentFormat:
    """What a JSON line holds: a text in a field, or with a chat template the messages of a conversation."""

    field: str = "text"
    template: ChatTemplate | None = None


class DocumentReader:
    """The texts of a file, or of the lines that begin in a byte range of it, each with its line number."""

    def __init__(
        self,
        file: SourceFile,
        form: DocumentFormat,
        on_skip: OnSkip,
        *,
        first: int = 0,
        start: int = 0,
        end: int | None = None,
    ) -> None:
        """Skip lines before `first`. Lines are counted from byte `start` on, and read if they begin before `end`.

        Only a file of plain JSON lines can be read by byte range.
        """
        self.bytes_read = start
        """Bytes of the file read so far."""
        self.lines_read = 0
        """Lines read so far."""
        self._file, self._format, self._on_skip = file, form, on_skip
        self._first, self._start, self._end = first, start, end

    def __iter__(self) -> Iterator[tuple[int, DocumentText]]:
        """Each text with its line number; 0 where the file is one document."""
        try:
            yield from self._read_jsonl() if self._file.is_jsonl else self._read_text_file()
        except OSError as error:
            message = f"cannot be read: {error.strerror or error}"
            self._on_skip(self._file, UNREADABLE, problem_at(self._file.path, 1, "file", message, _FIX_HINT))

    def _read_text_file(self) -> Iterator[tuple[int, DocumentText]]:
        """The file as one document."""
        path, size = self._file.path, self._file.bytes
        if self._format.template is not None:
            message = "is a text, but conversations are JSON lines (.jsonl, .jsonl.gz)"
            raise SpecError([problem_at(path, 1, "file", message, "omit it, or build it without --chat")])
        if size > MAX_DOCUMENT_BYTES:
            message = f"is one document of {size} bytes, but {MAX_DOCUMENT_BYTES} is the maximum"
            raise SpecError([problem_at(path, 1, "file", message, "write it as JSON lines, one document per line")])
        raw = path.read_bytes()
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            line = raw.count(b"\n", 0, error.start) + 1
            problem = problem_at(path, line, "file", f"is not UTF-8: {error.reason} at byte {error.start}", _FIX_HINT)
            self._on_skip(self._file, "not UTF-8", problem)
            return
        if text:
            yield 0, DocumentText(text)
        else:
            self._on_skip(self._file, "empty")

    def _read_jsonl(self) -> Iterator[tuple[int, DocumentText]]:
        """One document per line, in the requested field; blank lines are ignored."""
        with self._file.path.open("rb") as raw:
            try:
                _seek_to_line_start(raw, self._start)
                for line in self._lines(raw):
                    if self.lines_read >= self._first and not line.isspace():
                        yield from ((self.lines_read, text) for text in self._parse_line(line))
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                message = f"is broken gzip from here on: {error}"
                problem = problem_at(self._file.path, self.lines_read + 1, "file", message, _FIX_HINT)
                self._on_skip(self._file, "broken gzip", problem)

    def _lines(self, raw: BinaryIO) -> Iterator[bytes]:
        """Lines, decompressed; one that is too long is an error, since where the next begins is unknown."""
        compressed = self._file.path.name.endswith(".gz")
        stream = io.BufferedReader(gzip.GzipFile(fileobj=raw)) if compressed else raw
        while (self._end is None or raw.tell() < self._end) and (line := stream.readline(MAX_DOCUMENT_BYTES)):
            self.lines_read += 1
            self.bytes_read = raw.tell()
            if len(line) == MAX_DOCUMENT_BYTES:
                message = f"is {MAX_DOCUMENT_BYTES} bytes or longer"
                raise SpecError([problem_at(self._file.path, self.lines_read, "line", message, "split the document")])
            yield line

    def _parse_line(self, line: bytes) -> Iterator[DocumentText]:
        try:
            document = _parse_document(line, self._format)
        except _BadLineError as bad:
            problem = problem_at(self._file.path, self.lines_read, bad.key, bad.message, bad.suggestion)
            self._on_skip(self._file, bad.reason, problem)
            return
        if document.text:
            yield document
        else:
            self._on_skip(self._file, "empty")


def _seek_to_line_start(raw: BinaryIO, start: int) -> None:
    """Seek to the first line that begins at or after byte `start`."""
    if start:
        raw.seek(start - 1)
        while (passed := raw.readline(1 << 20)) and not passed.endswith(b"\n"):
            pass


def _parse_document(line: bytes, form: DocumentFormat) -> DocumentText:
    """The document of a JSON line."""
    field = form.field
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise _BadLineError("bad JSON", "line", f"is not JSON: {error}") from None
    if not isinstance(record, dict):
        raise _BadLineError(
            "bad JSON", "line", f"is {format_value(record)}, but must be an object with the field `{field}`"
        )
    if field not in record:
        suggestion = f"the line has: {', '.join(record) or 'nothing'}; choose one with --field, or {_FIX_HINT}"
        if "messages" in record:
            suggestion = f"conversations in `messages` are built with --chat; {suggestion}"
        raise _BadLineError("no field", field, "is missing", suggestion)
    if form.template is not None:
        try:
            return form.template.render(record, field)
        except ConversationError as bad:
            raise _BadLineError(bad.reason, field, bad.message, bad.suggestion) from None
    text = record[field]
    if not isinstance(text, str):
        raise _BadLineError("not a text", field, f"is {format_value(text)}, but must be a text")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _BadLineError(
            "not Unicode", field, "contains an unpaired UTF-16 surrogate, which is not a character"
        ) from None
    return DocumentText(text)
