"""Documents out of files: JSON lines, plain or gzipped, and text files of any kind."""

import gzip
import hashlib
import io
import json
import platform
import sysconfig
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import BinaryIO

from danlu.spec import Problem, SpecError
from danlu.spec.problem import problem_at, shown

PYTHON_STDLIB = "python-stdlib"
LARGEST_DOCUMENT = 256 << 20
"""Bytes; a document is held in memory whole, and a longer one is nearly always a corpus in one file."""

_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_EXAMPLES = 5
_MEND = "mend it, or leave such documents out (and counted) with --skip-bad"


@dataclass(frozen=True)
class _File:
    path: Path
    bytes: int
    changed: int
    """When it was last written, in nanoseconds."""
    spare: bool
    """A bad file of this source is left out and counted without being asked: it is not the user's to mend."""


@dataclass(frozen=True)
class Document:
    """A text, and where the reader stood when it came to it: enough to come to it again."""

    text: str
    file: int
    """Number of its file in the order of the sources."""
    line: int
    """Line of its file; 0 where the file is one document."""
    left_out: Mapping[str, int]
    """What was left out before it."""
    examples: tuple[Problem, ...]


@dataclass(frozen=True)
class Place:
    """Where to go on reading, and what was left out before."""

    file: int = 0
    line: int = 0
    left_out: Mapping[str, int] | None = None
    examples: tuple[Problem, ...] = ()


class _BadLineError(Exception):
    """A line that holds no document."""

    def __init__(self, reason: str, key: str, message: str, suggestion: str = _MEND) -> None:
        super().__init__(message)
        self.reason, self.key, self.message, self.suggestion = reason, key, message, suggestion


class Documents:
    """The documents of some sources, in one fixed order; counts what it leaves out."""

    def __init__(
        self, sources: Sequence[str], *, field: str = "text", skip_bad: bool = False, place: Place | None = None
    ) -> None:
        """Read from `place` on, or from the start."""
        self.left_out: dict[str, int] = {}
        """Documents and files left out, by reason; never changed in place, so that a document can hold it as it was."""
        self.examples: tuple[Problem, ...] = ()
        """The first few of the bad ones."""
        self.done = 0
        """Bytes of the source files read so far."""
        self._field = field
        self._skip_bad = skip_bad
        self._files = self._find(sources)
        self._place = place or Place()
        if self._place.left_out is not None:
            self.left_out, self.examples = dict(self._place.left_out), self._place.examples
        self.bytes = sum(file.bytes for file in self._files)
        """Bytes of all source files."""

    @property
    def identity(self) -> str:
        """A hash of which files these are and when they were last written."""
        digest = hashlib.sha256()
        for file in self._files:
            digest.update(f"{file.path}\0{file.bytes}\0{file.changed}\n".encode())
        return digest.hexdigest()

    def __iter__(self) -> Iterator[Document]:
        before = 0
        for number, file in enumerate(self._files):
            self.done = before
            if number >= self._place.file:
                for line, text in self._texts(file, before, self._place.line if number == self._place.file else 0):
                    yield Document(text, number, line, self.left_out, self.examples)
            before += file.bytes
        self.done = self.bytes

    def _texts(self, file: _File, before: int, first: int) -> Iterator[tuple[int, str]]:
        try:
            lines = file.path.name.endswith((".jsonl", ".jsonl.gz"))
            yield from self._json_lines(file, before, first) if lines else self._text(file)
        except OSError as error:
            problem = problem_at(file.path, 1, "file", f"cannot be read: {error.strerror or error}", _MEND)
            self._bad("unreadable", problem, file.spare)

    def _find(self, sources: Sequence[str]) -> list[_File]:
        """Every file of the sources: they in the order given, the files of a folder sorted by name."""
        missing = [source for source in sources if source != PYTHON_STDLIB and not Path(source).exists()]
        if missing:
            raise SpecError([_missing(Path(source)) for source in missing])
        files: list[_File] = []
        for source in sources:
            if source == PYTHON_STDLIB:
                files += [_file(path, spare=True) for path in _standard_library()]
            else:
                root = Path(source)
                paths = self._walk(root) if root.is_dir() else [root]
                files += [_file(path, spare=False) for path in paths]
        return files

    def _walk(self, folder: Path) -> Iterator[Path]:
        for path in sorted(folder.iterdir(), key=lambda path: path.name):
            if path.name.startswith("."):
                self._leave_out("hidden")
            elif path.is_dir():
                if path.is_symlink():  # it may lead back to where we are
                    self._leave_out("linked folder")
                else:
                    yield from self._walk(path)
            elif path.is_file():
                yield path
            else:
                self._leave_out("not a file")

    def _text(self, file: _File) -> Iterator[tuple[int, str]]:
        """A whole file as one document."""
        if file.bytes > LARGEST_DOCUMENT:
            message = f"is one document of {file.bytes} bytes, but {LARGEST_DOCUMENT} is the most"
            raise SpecError([problem_at(file.path, 1, "file", message, "write it as JSON lines, one document a line")])
        raw = file.path.read_bytes()
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            line = raw.count(b"\n", 0, error.start) + 1
            problem = problem_at(file.path, line, "file", f"is not UTF-8: {error.reason} at byte {error.start}", _MEND)
            self._bad("not UTF-8", problem, file.spare)
            return
        if text:
            yield 0, text
        else:
            self._leave_out("empty")

    def _json_lines(self, file: _File, before: int, first: int) -> Iterator[tuple[int, str]]:
        """A document a line from line `first` on, in the field asked for; a blank line holds nothing."""
        number = 0
        with file.path.open("rb") as raw:
            try:
                for number, line in enumerate(_lines(raw, file.path), start=1):
                    self.done = before + raw.tell()
                    if number >= first and not line.isspace():
                        yield from ((number, text) for text in self._document(line, file.path, number))
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                problem = problem_at(file.path, number + 1, "file", f"is broken gzip from here on: {error}", _MEND)
                self._bad("broken gzip", problem)

    def _document(self, line: bytes, path: Path, number: int) -> Iterator[str]:
        try:
            text = _field_text(line, self._field)
        except _BadLineError as bad:
            self._bad(bad.reason, problem_at(path, number, bad.key, bad.message, bad.suggestion))
            return
        if text:
            yield text
        else:
            self._leave_out("empty")

    def _bad(self, reason: str, problem: Problem, spare: bool = False) -> None:
        if not (spare or self._skip_bad):
            raise SpecError([problem])
        self._leave_out(reason)
        if len(self.examples) < _EXAMPLES:
            self.examples += (problem,)

    def _leave_out(self, reason: str) -> None:
        self.left_out = self.left_out | {reason: self.left_out.get(reason, 0) + 1}


def _file(path: Path, spare: bool) -> _File:
    stat = path.stat()
    return _File(path, stat.st_size, stat.st_mtime_ns, spare)


def source_name(source: str) -> str:
    """What the index records of a source."""
    return f"{PYTHON_STDLIB} {platform.python_version()}" if source == PYTHON_STDLIB else source


def _missing(path: Path) -> Problem:
    beside = [str(path.parent / entry.name) for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    close = get_close_matches(str(path), [*beside, PYTHON_STDLIB], n=1)
    suggestion = f"did you mean `{close[0]}`?" if close else f"a file, a folder, or `{PYTHON_STDLIB}`"
    return problem_at(path, 1, "source", "does not exist", suggestion)


def _standard_library() -> list[Path]:
    """Python's own modules, without what was installed beside them and without their tests."""
    root = Path(sysconfig.get_path("stdlib"))
    found = [path for path in root.rglob("*.py") if not _NOT_LIBRARY.intersection(path.relative_to(root).parts)]
    if not found:
        message = "has no .py files: this Python was installed without the sources of its library"
        raise SpecError([problem_at(root, 1, "source", message, "name files or folders of your own")])
    return sorted(found)


def _lines(raw: BinaryIO, path: Path) -> Iterator[bytes]:
    """Lines of a file, unpacked; one that would not fit in memory is an error, since what follows it is unknown."""
    stream = io.BufferedReader(gzip.GzipFile(fileobj=raw)) if path.name.endswith(".gz") else raw
    number = 0
    while line := stream.readline(LARGEST_DOCUMENT):
        number += 1
        if len(line) == LARGEST_DOCUMENT:
            message = f"is {LARGEST_DOCUMENT} bytes or longer"
            raise SpecError([problem_at(path, number, "line", message, "split the document")])
        yield line


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
