"""The folder of one run: its configuration and its events."""

import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from danlu.spec.event import Event, describe_unknown_events, parse_known_events

DEFAULT_RUNS_DIR = Path("runs")
"""Folder of the runs, relative to the working directory."""


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

    def rank_events(self, rank: int) -> Path:
        """Events that only this rank can report, such as its own failure."""
        return self.path / "events" / f"rank-{rank}.jsonl"

    def rank_profile(self, rank: int) -> Path:
        """What a rank measured for `danlu profile`; only in its scratch folder."""
        return self.path / f"profile-{rank}.json"

    @property
    def compiled_blocks(self) -> Path:
        """What reproduces compiled blocks that differed from eager ones."""
        return self.path / "compiled-blocks"

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
    def samples(self) -> Path:
        """Text that checkpoints generated: one file per `danlu sample --save`."""
        return self.path / "samples"

    @property
    def logs(self) -> Path:
        """Standard output and error of every rank."""
        return self.path / "logs"

    @property
    def report(self) -> Path:
        """The HTML report."""
        return self.path / "report.html"

    def read_events(self) -> Iterator[Event]:
        """Every complete event so far; a line still being written is left for the next call.

        Kinds that only a newer Danlu knows are skipped, with one warning.
        """
        unknown: Counter[str] = Counter()
        yield from _read_complete_lines(self.events, unknown)
        if unknown:
            warnings.warn(f"{self.events}: {describe_unknown_events(unknown)}", stacklevel=2)

    def read_rank_events(self, rank: int) -> Iterator[Event]:
        """The same of the events that only one rank reported."""
        return _read_complete_lines(self.rank_events(rank))


def _read_complete_lines(path: Path, unknown: Counter[str] | None = None) -> Iterator[Event]:
    if path.is_file():
        with path.open("rb") as lines:
            yield from parse_known_events((line for line in lines if line.endswith(b"\n")), unknown)
