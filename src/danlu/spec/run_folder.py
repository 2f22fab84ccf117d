"""The folder of one run: its configuration and its events."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from danlu.spec.event import Event, parse_event


@dataclass(frozen=True)
class RunFolder:
    """Paths of the files in `runs/<name>/`; enough to repeat the run elsewhere."""

    path: Path

    @property
    def name(self) -> str:
        """The run's name: that of its folder."""
        return self.path.name

    @property
    def recipe(self) -> Path:
        """What to train, complete: catalog entries are expanded."""
        return self.path / "recipe.toml"

    @property
    def cluster(self) -> Path:
        """The cluster it ran on, if given."""
        return self.path / "cluster.toml"

    @property
    def plan(self) -> Path:
        """The plan it ran with."""
        return self.path / "plan.toml"

    @property
    def events(self) -> Path:
        """Events, one JSON object per line."""
        return self.path / "events.jsonl"

    @property
    def data(self) -> Path:
        """Dataset versions that the run reads from which sample on, one record per line."""
        return self.path / "data.jsonl"

    @property
    def tensorboard(self) -> Path:
        """The same figures for TensorBoard."""
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        """One folder per saved step."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """Standard output and error of every rank."""
        return self.path / "logs"

    @property
    def report(self) -> Path:
        """The HTML report."""
        return self.path / "report.html"

    def read_events(self) -> Iterator[Event]:
        """Every complete event so far; a line still being written is left for the next call."""
        if not self.events.is_file():
            return
        with self.events.open("rb") as lines:
            for line in lines:
                if line.endswith(b"\n"):
                    yield parse_event(line)
