"""Log of which data set versions a run reads from which sample on, durable before such a sample is read.

So a run that is killed and resumed, even from an older checkpoint, reads exactly what it would have read.
"""

from pathlib import Path

from pydantic import Field, ValidationError

from danlu.spec import SpecError
from danlu.spec.description import SpecModel, TupleOf
from danlu.spec.problem import problem_at
from danlu.storage.store.atomic_files import atomic_replace


class DatasetVersionEntry(SpecModel):
    """From sample `cursor` of the run on, these versions are read."""

    cursor: int = Field(ge=0)
    editions: TupleOf[int]
    """One version per source."""
    fingerprints: TupleOf[str]
    """Hash of the content of each version."""
    weights: TupleOf[int]
    """Weights of the sources, which must not change: the order depends on them."""
    length: int
    """Tokens per sample, which must not change either."""


class DatasetVersionLog:
    """The log of one run, one entry per line, oldest first."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[DatasetVersionEntry]:
        """All entries; a line truncated by a crash was never acted on, and is ignored."""
        if not self.path.exists():
            return []
        lines = self.path.read_bytes().split(b"\n")[:-1]
        try:
            return [DatasetVersionEntry.model_validate_json(line) for line in lines]
        except ValidationError as error:
            message = f"cannot be read: {error.errors()[0]['msg']}"
            raise SpecError([problem_at(self.path, 1, "file", message, "restore it from a copy of the run")]) from None

    def append(self, entry: DatasetVersionEntry) -> None:
        """Add an entry; it is durable when this returns, and a crash loses none of the earlier ones."""
        lines = [known.model_dump_json() + "\n" for known in (*self.read(), entry)]
        atomic_replace(self.path, "".join(lines))
