"""What a build has done so far, on disk, so that one that was killed goes on where it was."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from danlu.spec import Problem
from danlu.spec.description import Description, Many
from danlu.storage.durable import sync_folder, write_durably
from danlu.storage.index import INDEX, Index, Shard, counts_file
from danlu.storage.shard_writer import PARTIAL
from danlu.storage.source import Place

JOURNAL = "build.journal"
_DONE = ".done"
_OURS = ("[0-9][0-9][0-9][0-9][0-9]*.bin", "[0-9]*.crc", "[0-9]*.ends", "edition-[0-9]*.counts")


class Progress(Description):
    """The state of a build that is not over."""

    format: Literal[1] = 1
    request: str
    """A hash of what is being built: files, tokenizer, settings."""
    base: str
    """Fingerprint of the data set that is being appended to; empty for a new one."""
    stage: Literal["writing", "clearing", "placing"]
    """Writing shards; then removing a data set that is replaced; then giving the new files their names."""
    shards: Many[Shard]
    """Shards that are complete."""
    counts: str
    """Hash of the file that counts their tokens."""
    file: int = Field(ge=0)
    line: int = Field(ge=0)
    skip: int = Field(ge=0)
    """Where to go on: the document there, of which so many tokens are in the shards already."""
    left_out: dict[str, int]
    examples: Many[Problem]
    index: Index | None = None
    """What is put in place at the end."""

    @property
    def place(self) -> Place:
        """Where to go on reading."""
        return Place(self.file, self.line, self.left_out, self.examples) if self.shards else Place()


class _Done(Description):
    """What the newest edition was made by, so that an append that is repeated by mistake is not made twice."""

    request: str
    edition: str


class BuildJournal:
    """The progress of the build in one folder; what it says is on disk when a call returns."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / JOURNAL

    def read(self) -> Progress | None:
        """The progress of a build that did not end, if there is one that can be gone on with."""
        try:
            return Progress.model_validate_json(self.path.read_bytes())
        except (FileNotFoundError, ValidationError):  # of another release: what it left is removed, and built again
            return None

    def write(self, progress: Progress) -> None:
        """Note the progress in place of the last, and drop the counts that only the last spoke of."""
        new = self.path.with_name(JOURNAL + PARTIAL)
        write_durably(new, progress.model_dump_json())
        new.rename(self.path)
        sync_folder(self.folder)
        for counts in self.folder.glob(f"counts-*{PARTIAL}"):
            if counts != self._counts(progress.shards):
                counts.unlink()

    def write_counts(self, shards: Sequence[Shard], counts: NDArray[np.int64]) -> str:
        """Put down the counts of the complete shards, before the journal speaks of them."""
        raw = counts.astype("<i8").tobytes()
        write_durably(self._counts(shards), raw)
        return hashlib.sha256(raw).hexdigest()

    def read_counts(self, progress: Progress) -> NDArray[np.int64] | None:
        """The counts that the journal speaks of, if they are whole."""
        try:
            raw = self._counts(progress.shards).read_bytes()
        except FileNotFoundError:
            return None
        if hashlib.sha256(raw).hexdigest() != progress.counts:
            return None
        return np.frombuffer(raw, dtype="<i8").astype(np.int64)

    def clean(self, progress: Progress | None) -> None:
        """Remove what was begun and does not belong to the progress."""
        kept = {self._counts(progress.shards).name} if progress else set()
        for shard in progress.shards if progress else ():
            kept |= {f"{name}{PARTIAL}" for name in (shard.file, shard.beside(".crc"), shard.beside(".ends"))}
        if progress is None:
            self.path.unlink(missing_ok=True)
        for left in self.folder.glob(f"*{PARTIAL}"):
            if left.name not in kept:
                left.unlink()

    def finish(self, progress: Progress) -> Index:
        """Put shards and index in place; can be done again from the start wherever it was broken off.

        At no moment does an index stand beside shards that are not its own. Old files are unlinked rather than
        overwritten: a process that still has one mapped keeps it.
        """
        index = progress.index
        assert index is not None
        if progress.stage == "clearing":
            (self.folder / INDEX).unlink(missing_ok=True)
            sync_folder(self.folder)
            for pattern in _OURS:
                for old in self.folder.glob(pattern):
                    old.unlink()
            progress = progress.model_copy(update={"stage": "placing"})
            self.write(progress)
        counts = self._counts(progress.shards)
        if counts.exists():
            counts.rename(self.folder / counts_file(len(index.editions) - 1))
        for shard in progress.shards:
            for name in (shard.file, shard.beside(".crc"), shard.beside(".ends")):
                if (partial := self.folder / (name + PARTIAL)).exists():
                    partial.rename(self.folder / name)
        done = _Done(request=progress.request, edition=index.fingerprint(-1))
        write_durably(self.folder / _DONE, done.model_dump_json())
        new = self.folder / (INDEX + PARTIAL)
        write_durably(new, index.model_dump_json(indent=2) + "\n")
        sync_folder(self.folder)
        new.rename(self.folder / INDEX)
        sync_folder(self.folder)
        for left in self.folder.glob(f"*{PARTIAL}"):
            left.unlink()
        self.path.unlink()  # the last step of all: until then a rerun does these again
        sync_folder(self.folder)
        return index

    def is_done(self, request: str, index: Index) -> bool:
        """Whether the newest edition of the data set is what this request made of it."""
        try:
            done = _Done.model_validate_json((self.folder / _DONE).read_bytes())
        except (FileNotFoundError, ValidationError):
            return False
        return done == _Done(request=request, edition=index.fingerprint(-1))

    def _counts(self, shards: Sequence[Shard]) -> Path:
        return self.folder / f"counts-{len(shards):05d}{PARTIAL}"
