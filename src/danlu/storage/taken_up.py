"""Which editions of its sources a run reads from which sample on: promised on disk before such a sample is read.

A run that is killed and resumed, even from an older checkpoint, reads what it would have read: the promise stands.
"""

import os
from pathlib import Path

from pydantic import Field, ValidationError

from danlu.spec import SpecError
from danlu.spec.description import Description, Many
from danlu.spec.problem import problem_at
from danlu.storage.durable import sync_folder


class TakenUp(Description):
    """From sample `cursor` of the run on, these editions count."""

    cursor: int = Field(ge=0)
    editions: Many[int]
    """One a source."""
    fingerprints: Many[str]
    """What each edition holds, as a hash."""
    weights: Many[int]
    """Shares of the sources, which must stay as they are: the order depends on them."""
    length: int
    """Tokens a sample, which must stay too."""


class TakenUpLog:
    """The promises of one run, one a line, oldest first."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[TakenUp]:
        """All promises; a line that was cut off by a crash was never acted on, and does not count."""
        if not self.path.exists():
            return []
        lines = self.path.read_bytes().split(b"\n")[:-1]
        try:
            return [TakenUp.model_validate_json(line) for line in lines]
        except ValidationError as error:
            message = f"cannot be read: {error.errors()[0]['msg']}"
            raise SpecError([problem_at(self.path, 1, "file", message, "restore it from a copy of the run")]) from None

    def add(self, promise: TakenUp) -> None:
        """Promise; it is on disk when this returns."""
        kept = b"".join(known.model_dump_json().encode() + b"\n" for known in self.read())
        with self.path.open("r+b" if self.path.exists() else "w+b") as file:
            file.truncate(len(kept))  # of the half line of a crash
            file.seek(len(kept))
            file.write(promise.model_dump_json().encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        sync_folder(self.path.parent)
