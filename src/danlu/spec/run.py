"""The folder of one run: what was asked, and what happened."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from danlu.spec.event import Event, parse_event


@dataclass(frozen=True)
class RunFolder:
    """Names of the files in `runs/<name>/`; enough to repeat the run elsewhere."""

    path: Path

    @property
    def name(self) -> str:
        """The run's name: that of its folder."""
        return self.path.name

    @property
    def recipe(self) -> Path:
        """What to train, complete: catalogue entries are written out."""
        return self.path / "recipe.toml"

    @property
    def cluster(self) -> Path:
        """What it ran on, if that was given."""
        return self.path / "cluster.toml"

    @property
    def plan(self) -> Path:
        """How it ran."""
        return self.path / "plan.toml"

    @property
    def events(self) -> Path:
        """What happened, one JSON event a line."""
        return self.path / "events.jsonl"

    @property
    def data(self) -> Path:
        """Which editions of its data the run reads from which sample on, one promise a line."""
        return self.path / "data.jsonl"

    @property
    def tensorboard(self) -> Path:
        """The same figures for TensorBoard."""
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        """One folder a saved step."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """Standard output and error of every rank."""
        return self.path / "logs"

    @property
    def report(self) -> Path:
        """The page a person looks at."""
        return self.path / "report.html"

    def read_events(self) -> Iterator[Event]:
        """Every complete event so far; a line still being written is left for the next call."""
        if not self.events.exists():
            return
        with self.events.open() as lines:
            for line in lines:
                if line.endswith("\n"):
                    yield parse_event(line)
