"""Documents from files and folders, in one fixed order."""

import hashlib
import platform
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from danlu.spec import Problem, SpecError
from danlu.spec.problem import problem_at
from danlu.storage.data.chat_template import DocumentText
from danlu.storage.data.document_reader import DocumentFormat, DocumentReader, SkipCounter, SourceFile

PYTHON_STDLIB = "python-stdlib"
_EXCLUDED_DIRS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class DocumentPosition:
    """Where a document is, and what was skipped before it: enough to resume from it."""

    file: int = 0
    """Number of its file in the order of the sources."""
    line: int = 0
    """Line of its file; 0 where the file is one document."""
    skipped: Mapping[str, int] | None = None
    """None at the start, before anything was read."""
    examples: tuple[Problem, ...] = ()


@dataclass(frozen=True)
class SourceDocument:
    """A text and its position."""

    text: DocumentText
    position: DocumentPosition


class DocumentStream:
    """The documents of some sources, in one fixed order; counts what it skips."""

    def __init__(
        self,
        sources: Sequence[str],
        *,
        form: DocumentFormat | None = None,
        skip_bad: bool = False,
        position: DocumentPosition | None = None,
    ) -> None:
        """Read from `position` on, or from the start; JSON lines have a `text` unless `form` says otherwise."""
        self.form = form or DocumentFormat()
        self.start_position = position or DocumentPosition()
        self.skipped = SkipCounter(skip_bad)
        """Documents and files skipped so far."""
        self.bytes_done = 0
        """Bytes of the source files read so far."""
        self.files = self._list_files(sources)
        """Every file of the sources, in order."""
        if self.start_position.skipped is not None:
            self.skipped = SkipCounter(skip_bad, self.start_position.skipped, self.start_position.examples)
        self.total_bytes = sum(file.bytes for file in self.files)
        """Bytes of all source files."""

    @property
    def sources_hash(self) -> str:
        """A hash of the files' names, sizes and modification times."""
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(f"{file.path}\0{file.bytes}\0{file.mtime_ns}\n".encode())
        return digest.hexdigest()

    def __iter__(self) -> Iterator[SourceDocument]:
        before = 0
        for number, file in enumerate(self.files):
            self.bytes_done = before
            if number >= self.start_position.file:
                first = self.start_position.line if number == self.start_position.file else 0
                texts = DocumentReader(file, self.form, self.skipped, first=first)
                for line, text in texts:
                    self.bytes_done = before + texts.bytes_read
                    yield SourceDocument(text, self.position_of(number, line))
            before += file.bytes
        self.bytes_done = self.total_bytes

    def position_of(self, file: int, line: int) -> DocumentPosition:
        """The position of a document that is being read."""
        return DocumentPosition(file, line, self.skipped.counts, self.skipped.examples)

    def _list_files(self, sources: Sequence[str]) -> list[SourceFile]:
        """Every file of the sources, in the given order; the files of a folder are sorted by name."""
        missing = [source for source in sources if source != PYTHON_STDLIB and not Path(source).exists()]
        if missing:
            raise SpecError([_missing_problem(Path(source)) for source in missing])
        files: list[SourceFile] = []
        for source in sources:
            if source == PYTHON_STDLIB:
                files += [_source_file(path, skip_if_bad=True) for path in _stdlib_files()]
            else:
                root = Path(source)
                paths = self._walk(root) if root.is_dir() else [root]
                files += [_source_file(path, skip_if_bad=False) for path in paths]
        return files

    def _walk(self, folder: Path) -> Iterator[Path]:
        for path in sorted(folder.iterdir(), key=lambda path: path.name):
            if path.name.startswith("."):
                self.skipped(None, "hidden")
            elif path.is_dir():
                if path.is_symlink():  # it may form a cycle
                    self.skipped(None, "linked folder")
                else:
                    yield from self._walk(path)
            elif path.is_file():
                yield path
            else:
                self.skipped(None, "not a file")


def _source_file(path: Path, skip_if_bad: bool) -> SourceFile:
    stat = path.stat()
    return SourceFile(path, stat.st_size, stat.st_mtime_ns, skip_if_bad)


def source_label(source: str) -> str:
    """The name of a source in the index."""
    return f"{PYTHON_STDLIB} {platform.python_version()}" if source == PYTHON_STDLIB else source


def _missing_problem(path: Path) -> Problem:
    siblings = [str(path.parent / entry.name) for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    close = get_close_matches(str(path), [*siblings, PYTHON_STDLIB], n=1)
    suggestion = f"did you mean `{close[0]}`?" if close else f"a file, a folder, or `{PYTHON_STDLIB}`"
    return problem_at(path, 1, "source", "does not exist", suggestion)


def _stdlib_files() -> list[Path]:
    """The modules of the standard library, without installed packages and without tests."""
    root = Path(sysconfig.get_path("stdlib"))
    found = [path for path in root.rglob("*.py") if not _EXCLUDED_DIRS.intersection(path.relative_to(root).parts)]
    if not found:
        message = "has no .py files: this Python was installed without the sources of its library"
        raise SpecError([problem_at(root, 1, "source", message, "give files or folders of your own")])
    return sorted(found)
