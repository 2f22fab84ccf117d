"""The sources of a build in splits, so that many machines read and tokenize them, and merged again in order.

A worker knows only its split: it counts lines from where the split begins and records what it skipped, without deciding
whether it is an error. The one process that merges the splits adds the lines before, and decides that. So the result,
and what is reported, is that of a build in one process.
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
from danlu.storage.data.dataset_index import disk_dtype, word_dtype
from danlu.storage.data.document_reader import UNREADABLE, DocumentFormat, DocumentReader, SourceFile
from danlu.storage.data.documents import DocumentPosition, DocumentStream, SourceDocument
from danlu.storage.data.tokenization import TokenizedBatch, batch_documents, tokenize_batch
from danlu.storage.data.tokenizer import Tokenizer

MAX_SPLIT_BYTES = 16 << 20
MIN_SPLIT_BYTES = 1 << 20
"""Bytes of source. Larger splits have less overhead, smaller ones keep all machines busy to the end."""

_FATAL_REASON = ""  # fatal: cannot be skipped
_TARGET_SPLITS = 256


class FileSplit(NamedTuple):
    """The lines that begin in a byte range of a file, or the entire file."""

    file: int
    """Number of the file in the order of the sources."""
    path: str
    bytes: int
    mtime_ns: int
    first_line: int
    start_byte: int
    end_byte: int | None
    bytes_before: int
    """Bytes of the sources before this file."""


Row = dict[str, Any]
"""A batch of documents as a worker returns it: plain numbers, bytes and JSON."""


def make_splits(documents: DocumentStream, split_bytes: int | None = None) -> Iterator[list[FileSplit]]:
    """What is left to read of the sources, in splits of about `split_bytes`; small files share one."""
    size = split_bytes or min(max(documents.total_bytes // _TARGET_SPLITS, MIN_SPLIT_BYTES), MAX_SPLIT_BYTES)
    split: list[FileSplit] = []
    held = 0
    for file_split, length in _file_splits(documents, size):
        split.append(file_split)
        held += length
        if held >= size:
            yield split
            split, held = [], 0
    if split:
        yield split


def lines_before(documents: DocumentStream) -> int:
    """Lines before the first split, in the file where a build resumes."""
    position = documents.start_position
    return position.line - 1 if position.line and _is_splittable(documents.files[position.file]) else 0


def _file_splits(documents: DocumentStream, size: int) -> Iterator[tuple[FileSplit, int]]:
    """Each file split with its length in bytes."""
    before, position = 0, documents.start_position
    for number, file in enumerate(documents.files):
        if number >= position.file:
            known = (number, str(file.path.absolute()), file.bytes, file.mtime_ns)
            first = position.line if number == position.file else 0
            if not _is_splittable(file):
                yield FileSplit(*known, first, 0, None, before), file.bytes
            else:
                begin = _offset_of_line(file.path, first) if first else 0
                for start in range(begin, max(file.bytes, begin + 1), size):
                    end = start + size if start + size < file.bytes else None
                    yield FileSplit(*known, 0, start, end, before), (end or file.bytes) - start
        before += file.bytes


def _is_splittable(file: SourceFile) -> bool:
    return file.path.name.endswith(".jsonl")


def _offset_of_line(path: Path, line: int) -> int:
    with path.open("rb") as file:
        for _ in range(line - 1):
            file.readline()
        return file.tell()


def tokenize_split(split: Sequence[FileSplit], form: DocumentFormat, tokenizer: Tokenizer) -> Iterator[Row]:
    """On a worker: the documents of a split, tokenized, as rows in order; the last row is marked."""
    reader = _SplitReader(split, form)
    for batch in batch_documents(reader):
        tokenized = tokenize_batch(batch, tokenizer)
        tokens = tokenized.tokens.astype(_dtype(tokenizer, form)).tobytes()
        yield _row(reader, tokenized.locations, tokens, tokenized.ends.tobytes())
    yield _row(reader, [], b"", b"", last=True)


class _SplitReader:
    """The documents of a split, and a record of what was skipped between them."""

    def __init__(self, split: Sequence[FileSplit], form: DocumentFormat) -> None:
        self.skips: list[tuple[int, int, str, str]] = []
        """For each skip: after which document of the batch, in which file, why, and the problem as JSON."""
        self.documents_read = 0
        self.bytes_done = 0
        self.lines = 0
        self.file = -1
        self._split, self._format = split, form

    def __iter__(self) -> Iterator[SourceDocument]:
        for file_split in self._split:
            self.file = file_split.file
            if problem := _changed_file_problem(file_split):
                self._record_skip(None, _FATAL_REASON, problem)
                return
            file = SourceFile(Path(file_split.path), file_split.bytes, file_split.mtime_ns, skip_if_bad=False)
            texts = DocumentReader(
                file,
                self._format,
                self._record_skip,
                first=file_split.first_line,
                start=file_split.start_byte,
                end=file_split.end_byte,
            )
            try:
                for line, text in texts:
                    self.bytes_done = file_split.bytes_before + texts.bytes_read
                    self.documents_read += 1
                    yield SourceDocument(text, DocumentPosition(file_split.file, line))
            except SpecError as error:
                self._record_skip(file, _FATAL_REASON, error.problems[0])
                return
            self.lines = texts.lines_read
            self.bytes_done = file_split.bytes_before + (
                file_split.bytes if file_split.end_byte is None else file_split.end_byte
            )

    def pop_skips(self) -> list[tuple[int, int, str, str]]:
        """The skips since the last call."""
        skips, self.skips, self.documents_read = self.skips, [], 0
        return skips

    def _record_skip(self, file: SourceFile | None, reason: str, problem: Problem | None = None) -> None:
        self.skips.append((self.documents_read, self.file, reason, problem.model_dump_json() if problem else ""))


def _changed_file_problem(file_split: FileSplit) -> Problem | None:
    """A problem if this machine does not see the file that the build began with."""
    path = Path(file_split.path)
    hint = "the sources must be on a file system that all nodes of the Ray cluster mount at this path"
    try:
        stat = path.stat()
    except OSError as error:
        return problem_at(path, 1, "file", f"cannot be seen on {platform.node()}: {error.strerror}", hint)
    if (stat.st_size, stat.st_mtime_ns) != (file_split.bytes, file_split.mtime_ns):
        message = f"is another file on {platform.node()}, or has changed since the build began"
        return problem_at(path, 1, "file", message, hint)
    return None


def _row(
    reader: _SplitReader, positions: Sequence[DocumentPosition], tokens: bytes, ends: bytes, last: bool = False
) -> Row:
    where = np.array([(position.file, position.line) for position in positions], dtype=np.int64)
    return {
        "positions": where.tobytes(),
        "tokens": tokens,
        "ends": ends,
        "skips": json.dumps(reader.pop_skips()),
        "done": reader.bytes_done,
        "last": last,
        "file": reader.file,
        "lines": reader.lines,
        "made_by": package_versions(),
        "machine": platform.node(),
    }


@cache
def package_versions() -> str:
    """Versions of the packages that decide the tokens."""
    return ", ".join(f"{package} {_version(package)}" for package in ("danlu", "tokenizers"))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "that is not installed"


class SplitMerger:
    """Merges the rows of all splits, in order, into batches of documents."""

    def __init__(self, documents: DocumentStream, tokenizer: Tokenizer) -> None:
        self._documents, self._tokenizer = documents, tokenizer
        self._file, self._lines = documents.start_position.file, lines_before(documents)
        self._unreadable_file = -1
        """A file that could not be read further, whose other splits are ignored."""

    def merge(self, row: Mapping[str, Any]) -> Iterator[TokenizedBatch]:
        """The documents of the next row; raises what a build in one process would."""
        if row["made_by"] != package_versions():
            message = f"has {row['made_by']}, but this machine {package_versions()}: the tokens could differ"
            hint = "install the same version on all nodes of the Ray cluster"
            raise SpecError([problem_at(Path(row["machine"]), 1, "ray", message, hint)])
        where = np.frombuffer(row["positions"], dtype=np.int64).reshape(-1, 2)
        skips = json.loads(row["skips"])
        positions: list[DocumentPosition] = []
        kept: list[int] = []
        for number, (file, line) in enumerate(where.tolist()):
            while skips and skips[0][0] <= number:
                self._handle_skip(*skips.pop(0)[1:])
            if file != self._unreadable_file:
                positions.append(self._documents.position_of(file, line + self._lines_before(file) if line else 0))
                kept.append(number)
        for skip in skips:
            self._handle_skip(*skip[1:])
        self._documents.bytes_done = int(row["done"])
        if positions:
            yield self._batch(row, positions, kept)
        if row["last"]:
            self._lines = self._lines_before(int(row["file"])) + int(row["lines"])
            self._file = int(row["file"])

    def _batch(self, row: Mapping[str, Any], positions: list[DocumentPosition], kept: list[int]) -> TokenizedBatch:
        tokens = np.frombuffer(row["tokens"], dtype=_dtype(self._tokenizer, self._documents.form))
        ends = np.frombuffer(row["ends"], dtype=np.int64)
        if len(kept) < len(ends):
            starts = np.concatenate([[0], ends[:-1]])
            tokens = np.concatenate([tokens[starts[number] : ends[number]] for number in kept])
            ends = np.cumsum((ends - starts)[kept])
        return TokenizedBatch(positions, tokens, ends)

    def _lines_before(self, file: int) -> int:
        """Lines of the file in the splits before this one."""
        return self._lines if file == self._file else 0

    def _handle_skip(self, file: int, reason: str, problem_json: str) -> None:
        if file == self._unreadable_file:
            return
        problem = self._absolute_problem(file, Problem.model_validate_json(problem_json)) if problem_json else None
        if problem is not None and reason == _FATAL_REASON:
            raise SpecError([problem])
        if reason == UNREADABLE:
            self._unreadable_file = file
        self._documents.skipped(self._documents.files[file], reason, problem)

    def _absolute_problem(self, file: int, problem: Problem) -> Problem:
        """A worker's problem with the path that the user gave, and the line in the file instead of the split."""
        before = 0 if problem.key == "file" else self._lines_before(file)  # that concerns the entire file
        path = str(self._documents.files[file].path)
        return problem.model_copy(update={"file": path, "line": problem.line + before})


def _dtype(tokenizer: Tokenizer, form: DocumentFormat) -> np.dtype[Any]:
    return disk_dtype(word_dtype(tokenizer.vocabulary, marked=form.template is not None))
