"""The progress of a build on disk, so that a killed build can be resumed."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from danlu.spec import Problem
from danlu.spec.description import SpecModel, TupleOf
from danlu.storage.data.dataset_index import INDEX_FILE, DatasetIndex, ShardInfo, token_counts_file
from danlu.storage.data.documents import DocumentPosition
from danlu.storage.data.shard_writer import PARTIAL_SUFFIX
from danlu.storage.store.atomic_files import atomic_replace, fsync_dir, write_and_fsync

JOURNAL_FILE = "build.journal"
_STAMP_FILE = ".done"
_DATASET_FILE_PATTERNS = ("[0-9][0-9][0-9][0-9][0-9]*.bin", "[0-9]*.crc", "[0-9]*.ends", "edition-[0-9]*.counts")


class BuildProgress(SpecModel):
    """The state of an unfinished build."""

    format: Literal[1] = 1
    request: str
    """A hash of what is being built: files, tokenizer, settings."""
    base: str
    """Fingerprint of the data set that is appended to; empty for a new one."""
    stage: Literal["writing", "clearing", "placing"]
    """Writing shards; then removing the data set that is replaced; then renaming the new files."""
    shards: TupleOf[ShardInfo]
    """Complete shards."""
    counts: str
    """Hash of the file with their token counts."""
    file: int = Field(ge=0)
    line: int = Field(ge=0)
    skip: int = Field(ge=0)
    """Where to resume: the document there, of which so many tokens are in the shards already."""
    left_out: dict[str, int]
    examples: TupleOf[Problem]
    index: DatasetIndex | None = None
    """The index to write at the end."""

    @property
    def resume_position(self) -> DocumentPosition:
        """Where to resume reading."""
        return (
            DocumentPosition(self.file, self.line, self.left_out, self.examples) if self.shards else DocumentPosition()
        )


class _BuildStamp(SpecModel):
    """What built the newest version, so that an append repeated by mistake adds nothing."""

    request: str
    edition: str


class BuildJournal:
    """The progress of the build in one folder; durable when a call returns."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / JOURNAL_FILE

    def read(self) -> BuildProgress | None:
        """The progress of an unfinished build, if there is one that can be resumed."""
        try:
            return BuildProgress.model_validate_json(self.path.read_bytes())
        except (FileNotFoundError, ValidationError):  # of another release: its files are removed, and built again
            return None

    def write(self, progress: BuildProgress) -> None:
        """Replace the recorded progress, and remove the counts of the previous one."""
        atomic_replace(self.path, progress.model_dump_json())
        for counts in self.folder.glob(f"counts-*{PARTIAL_SUFFIX}"):
            if counts != self._counts_path(progress.shards):
                counts.unlink()

    def write_counts(self, shards: Sequence[ShardInfo], counts: NDArray[np.int64]) -> str:
        """Write the counts of the complete shards, before the journal refers to them."""
        raw = counts.astype("<i8").tobytes()
        write_and_fsync(self._counts_path(shards), raw)
        return hashlib.sha256(raw).hexdigest()

    def read_counts(self, progress: BuildProgress) -> NDArray[np.int64] | None:
        """The counts that the journal refers to, if they are intact."""
        try:
            raw = self._counts_path(progress.shards).read_bytes()
        except FileNotFoundError:
            return None
        if hashlib.sha256(raw).hexdigest() != progress.counts:
            return None
        return np.frombuffer(raw, dtype="<i8").astype(np.int64)

    def remove_stale_files(self, progress: BuildProgress | None) -> None:
        """Remove partial files that the journal does not list."""
        kept = {self._counts_path(progress.shards).name} if progress else set()
        for shard in progress.shards if progress else ():
            kept |= {
                f"{name}{PARTIAL_SUFFIX}"
                for name in (shard.file, shard.sidecar_name(".crc"), shard.sidecar_name(".ends"))
            }
        if progress is None:
            self.path.unlink(missing_ok=True)
        for left in self.folder.glob(f"*{PARTIAL_SUFFIX}"):
            if left.name not in kept:
                left.unlink()

    def commit(self, progress: BuildProgress) -> DatasetIndex:
        """Rename shards and write the index; can be rerun from the start if interrupted.

        At no moment is there an index with shards that are not its own. Old files are unlinked rather than overwritten:
        a process that still has one mapped keeps it.
        """
        index = progress.index
        assert index is not None
        if progress.stage == "clearing":
            (self.folder / INDEX_FILE).unlink(missing_ok=True)
            fsync_dir(self.folder)
            for pattern in _DATASET_FILE_PATTERNS:
                for old in self.folder.glob(pattern):
                    old.unlink()
            progress = progress.model_copy(update={"stage": "placing"})
            self.write(progress)
        counts = self._counts_path(progress.shards)
        if counts.exists():
            counts.rename(self.folder / token_counts_file(len(index.editions) - 1))
        for shard in progress.shards:
            for name in (shard.file, shard.sidecar_name(".crc"), shard.sidecar_name(".ends")):
                if (partial := self.folder / (name + PARTIAL_SUFFIX)).exists():
                    partial.rename(self.folder / name)
        done = _BuildStamp(request=progress.request, edition=index.fingerprint(-1))
        write_and_fsync(self.folder / _STAMP_FILE, done.model_dump_json())
        atomic_replace(self.folder / INDEX_FILE, index.model_dump_json(indent=2, exclude_none=True) + "\n")
        for left in self.folder.glob(f"*{PARTIAL_SUFFIX}"):
            left.unlink()
        self.path.unlink()  # the very last step: until then a rerun repeats all of these
        fsync_dir(self.folder)
        return index

    def is_up_to_date(self, request: str, index: DatasetIndex) -> bool:
        """Whether this request built the newest version of the data set."""
        try:
            done = _BuildStamp.model_validate_json((self.folder / _STAMP_FILE).read_bytes())
        except (FileNotFoundError, ValidationError):
            return False
        return done == _BuildStamp(request=request, edition=index.fingerprint(-1))

    def _counts_path(self, shards: Sequence[ShardInfo]) -> Path:
        return self.folder / f"counts-{len(shards):05d}{PARTIAL_SUFFIX}"
