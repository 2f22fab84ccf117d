"""Documents out of files and folders, in one fixed order."""

import hashlib
import platform
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from danlu.spec import Problem, SpecError
from danlu.spec.problem import problem_at
from danlu.storage.file_texts import FileTexts, LeftOut, SourceFile

PYTHON_STDLIB = "python-stdlib"
_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class Place:
    """Where a document stands, and what was left out before it: enough to come to it again."""

    file: int = 0
    """Number of its file in the order of the sources."""
    line: int = 0
    """Line of its file; 0 where the file is one document."""
    left_out: Mapping[str, int] | None = None
    """None at the start, before anything was looked at."""
    examples: tuple[Problem, ...] = ()


@dataclass(frozen=True)
class Document:
    """A text, and where it stands."""

    text: str
    place: Place


class Documents:
    """The documents of some sources, in one fixed order; counts what it leaves out."""

    def __init__(
        self, sources: Sequence[str], *, field: str = "text", skip_bad: bool = False, place: Place | None = None
    ) -> None:
        """Read from `place` on, or from the start."""
        self.field = field
        self.place = place or Place()
        self.left_out = LeftOut(skip_bad)
        """Documents and files left out so far."""
        self.done = 0
        """Bytes of the source files read so far."""
        self.files = self._find(sources)
        """Every file of the sources, in order."""
        if self.place.left_out is not None:
            self.left_out = LeftOut(skip_bad, self.place.left_out, self.place.examples)
        self.bytes = sum(file.bytes for file in self.files)
        """Bytes of all source files."""

    @property
    def identity(self) -> str:
        """A hash of which files these are and when they were last written."""
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(f"{file.path}\0{file.bytes}\0{file.changed}\n".encode())
        return digest.hexdigest()

    def __iter__(self) -> Iterator[Document]:
        before = 0
        for number, file in enumerate(self.files):
            self.done = before
            if number >= self.place.file:
                first = self.place.line if number == self.place.file else 0
                texts = FileTexts(file, self.field, self.left_out, first=first)
                for line, text in texts:
                    self.done = before + texts.position
                    yield Document(text, self.place_of(number, line))
            before += file.bytes
        self.done = self.bytes

    def place_of(self, file: int, line: int) -> Place:
        """The place of a document that is read now."""
        return Place(file, line, self.left_out.counts, self.left_out.examples)

    def _find(self, sources: Sequence[str]) -> list[SourceFile]:
        """Every file of the sources: they in the order given, the files of a folder sorted by name."""
        missing = [source for source in sources if source != PYTHON_STDLIB and not Path(source).exists()]
        if missing:
            raise SpecError([_missing(Path(source)) for source in missing])
        files: list[SourceFile] = []
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
                self.left_out(None, "hidden")
            elif path.is_dir():
                if path.is_symlink():  # it may lead back to where we are
                    self.left_out(None, "linked folder")
                else:
                    yield from self._walk(path)
            elif path.is_file():
                yield path
            else:
                self.left_out(None, "not a file")


def _file(path: Path, spare: bool) -> SourceFile:
    stat = path.stat()
    return SourceFile(path, stat.st_size, stat.st_mtime_ns, spare)


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
