"""The sources of a build cut into pieces, so that many machines read and tokenise them, and joined again in order.

A worker knows its piece alone: it counts lines from where the piece begins and notes what it left out, without
judging it. The one process that joins the pieces adds the lines before, and decides what is an error. So the result,
and what the user is told, is that of a build in one process.
"""

import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from danlu.spec import Problem, SpecError
from danlu.spec.problem import problem_at
from danlu.storage.file_texts import UNREADABLE, FileTexts, SourceFile
from danlu.storage.index import on_disk, token_dtype
from danlu.storage.packing import Packed, batches, pack
from danlu.storage.source import Document, Documents, Place
from danlu.storage.tokenizer import Tokenizer

LARGEST_PIECE = 16 << 20
SMALLEST_PIECE = 1 << 20
"""Bytes of source. Larger pieces cost less to hand out, smaller ones keep all machines busy to the end."""

_FATAL = ""  # in place of a reason: the build cannot go on, whatever may be left out
_PIECES = 256


class Stretch(NamedTuple):
    """The lines that begin between two bytes of a file, or a whole file."""

    file: int
    """Number of the file in the order of the sources."""
    path: str
    bytes: int
    changed: int
    first: int
    start: int
    end: int | None
    before: int
    """Bytes of the sources before this file."""


Row = dict[str, Any]
"""A group of documents as it travels from a worker: plain numbers, bytes and JSON."""


def cut(documents: Documents, piece_bytes: int | None = None) -> Iterator[list[Stretch]]:
    """What is left to read of the sources, in pieces of about `piece_bytes`; small files share one."""
    size = piece_bytes or min(max(documents.bytes // _PIECES, SMALLEST_PIECE), LARGEST_PIECE)
    piece: list[Stretch] = []
    held = 0
    for stretch, length in _stretches(documents, size):
        piece.append(stretch)
        held += length
        if held >= size:
            yield piece
            piece, held = [], 0
    if piece:
        yield piece


def lines_before(documents: Documents) -> int:
    """Lines of the file where a build goes on that lie before the first piece."""
    place = documents.place
    return place.line - 1 if place.line and _can_be_cut(documents.files[place.file]) else 0


def _stretches(documents: Documents, size: int) -> Iterator[tuple[Stretch, int]]:
    """Each stretch with its length in bytes."""
    before, place = 0, documents.place
    for number, file in enumerate(documents.files):
        if number >= place.file:
            known = (number, str(file.path.absolute()), file.bytes, file.changed)
            first = place.line if number == place.file else 0
            if not _can_be_cut(file):
                yield Stretch(*known, first, 0, None, before), file.bytes
            else:
                begin = _offset_of_line(file.path, first) if first else 0
                for start in range(begin, max(file.bytes, begin + 1), size):
                    end = start + size if start + size < file.bytes else None
                    yield Stretch(*known, 0, start, end, before), (end or file.bytes) - start
        before += file.bytes


def _can_be_cut(file: SourceFile) -> bool:
    return file.path.name.endswith(".jsonl")


def _offset_of_line(path: Path, line: int) -> int:
    with path.open("rb") as file:
        for _ in range(line - 1):
            file.readline()
        return file.tell()


def pack_piece(piece: Sequence[Stretch], field: str, tokenizer: Tokenizer) -> Iterator[Row]:
    """On a worker: the documents of a piece, read and tokenised, as rows in their order; the last one says so."""
    reading = _Reading(piece, field)
    for batch in batches(reading):
        packed = pack(batch, tokenizer)
        yield _row(reading, packed.places, packed.tokens.astype(_dtype(tokenizer)).tobytes(), packed.ends.tobytes())
    yield _row(reading, [], b"", b"", last=True)


class _Reading:
    """The documents of a piece, with notes of what lies between them."""

    def __init__(self, piece: Sequence[Stretch], field: str) -> None:
        self.notes: list[tuple[int, int, str, str]] = []
        """Of what was left out: after which document of the group, in which file, why, and the problem as JSON."""
        self.read = 0
        self.done = 0
        self.lines = 0
        self.file = -1
        self._piece, self._field = piece, field

    def __iter__(self) -> Iterator[Document]:
        for stretch in self._piece:
            self.file = stretch.file
            if problem := _other_file(stretch):
                self._note(None, _FATAL, problem)
                return
            file = SourceFile(Path(stretch.path), stretch.bytes, stretch.changed, spare=False)
            texts = FileTexts(file, self._field, self._note, first=stretch.first, start=stretch.start, end=stretch.end)
            try:
                for line, text in texts:
                    self.done = stretch.before + texts.position
                    self.read += 1
                    yield Document(text, Place(stretch.file, line))
            except SpecError as error:
                self._note(file, _FATAL, error.problems[0])
                return
            self.lines = texts.lines
            self.done = stretch.before + (stretch.bytes if stretch.end is None else stretch.end)

    def take_notes(self) -> list[tuple[int, int, str, str]]:
        """The notes since they were last taken."""
        notes, self.notes, self.read = self.notes, [], 0
        return notes

    def _note(self, file: SourceFile | None, reason: str, problem: Problem | None = None) -> None:
        self.notes.append((self.read, self.file, reason, problem.model_dump_json() if problem else ""))


def _other_file(stretch: Stretch) -> Problem | None:
    """What is wrong if this machine does not see the file that the build began with."""
    path = Path(stretch.path)
    hint = "the sources must lie on a file system that all machines of the Ray cluster see at this path"
    try:
        stat = path.stat()
    except OSError as error:
        return problem_at(path, 1, "file", f"cannot be seen on {platform.node()}: {error.strerror}", hint)
    if (stat.st_size, stat.st_mtime_ns) != (stretch.bytes, stretch.changed):
        message = f"is another file on {platform.node()}, or has changed since the build began"
        return problem_at(path, 1, "file", message, hint)
    return None


def _row(reading: _Reading, places: Sequence[Place], tokens: bytes, ends: bytes, last: bool = False) -> Row:
    where = np.array([(place.file, place.line) for place in places], dtype=np.int64)
    return {
        "places": where.tobytes(),
        "tokens": tokens,
        "ends": ends,
        "notes": json.dumps(reading.take_notes()),
        "done": reading.done,
        "last": last,
        "file": reading.file,
        "lines": reading.lines,
        "made_by": made_by(),
        "machine": platform.node(),
    }


@cache
def made_by() -> str:
    """The programs that decide the tokens."""
    return ", ".join(f"{package} {_version(package)}" for package in ("danlu", "tokenizers"))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "that is not installed"


class Joined:
    """Rows of all pieces in order, back into groups of documents."""

    def __init__(self, documents: Documents, tokenizer: Tokenizer) -> None:
        self._documents, self._tokenizer = documents, tokenizer
        self._file, self._lines = documents.place.file, lines_before(documents)
        self._dropped = -1
        """A file that could not be read further, whose other pieces do not count."""

    def groups(self, row: Mapping[str, Any]) -> Iterator[Packed]:
        """The documents of the next row; raises what a build in one process would."""
        if row["made_by"] != made_by():
            message = f"has {row['made_by']}, but this machine {made_by()}: the tokens could differ"
            hint = "install one version on all machines of the Ray cluster"
            raise SpecError([problem_at(Path(row["machine"]), 1, "ray", message, hint)])
        where = np.frombuffer(row["places"], dtype=np.int64).reshape(-1, 2)
        notes = json.loads(row["notes"])
        places: list[Place] = []
        kept: list[int] = []
        for number, (file, line) in enumerate(where.tolist()):
            while notes and notes[0][0] <= number:
                self._judge(*notes.pop(0)[1:])
            if file != self._dropped:
                places.append(self._documents.place_of(file, line + self._before(file) if line else 0))
                kept.append(number)
        for note in notes:
            self._judge(*note[1:])
        self._documents.done = int(row["done"])
        if places:
            yield self._group(row, places, kept)
        if row["last"]:
            self._lines = self._before(int(row["file"])) + int(row["lines"])
            self._file = int(row["file"])

    def _group(self, row: Mapping[str, Any], places: list[Place], kept: list[int]) -> Packed:
        tokens = np.frombuffer(row["tokens"], dtype=_dtype(self._tokenizer))
        ends = np.frombuffer(row["ends"], dtype=np.int64)
        if len(kept) < len(ends):
            starts = np.concatenate([[0], ends[:-1]])
            tokens = np.concatenate([tokens[starts[number] : ends[number]] for number in kept])
            ends = np.cumsum((ends - starts)[kept])
        return Packed(places, tokens, ends)

    def _before(self, file: int) -> int:
        """Lines of the file in the pieces before this one."""
        return self._lines if file == self._file else 0

    def _judge(self, file: int, reason: str, said: str) -> None:
        if file == self._dropped:
            return
        problem = self._placed(file, Problem.model_validate_json(said)) if said else None
        if problem is not None and reason == _FATAL:
            raise SpecError([problem])
        if reason == UNREADABLE:
            self._dropped = file
        self._documents.left_out(self._documents.files[file], reason, problem)

    def _placed(self, file: int, problem: Problem) -> Problem:
        """A problem of a worker with the path that the user gave, and the line in the file instead of the piece."""
        before = 0 if problem.key == "file" else self._before(file)  # that is of the file as a whole
        path = str(self._documents.files[file].path)
        return problem.model_copy(update={"file": path, "line": problem.line + before})


def _dtype(tokenizer: Tokenizer) -> np.dtype[Any]:
    return on_disk(token_dtype(tokenizer.vocabulary))
