"""Which checkpoints an argument of `danlu ckpt` names: a run, a folder, or an object store, with or without a step."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from danlu.report.runs import find_run, is_run
from danlu.spec import RunFolder
from danlu.storage.checkpoint.copying import Occupied
from danlu.storage.checkpoint.home import open_home
from danlu.storage.checkpoint.inventory import Entry, inventory
from danlu.storage.checkpoint.manifest import Damaged
from danlu.storage.checkpoint.reader import Reader
from danlu.storage.store import Store, open_store

Runs = Annotated[Path, typer.Option("--folder", help="Folder that holds the runs.")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--s3", metavar="KEY=VALUE", help="Setting of an s3:// store, such as endpoint=http://localhost:9000."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]

_STEP = re.compile(r"^(?P<where>.+)@(?P<step>[0-9]+)$")
_STEP_FOLDER = re.compile(r"^step-([0-9]{8,})$")
_TOLD_STEPS = 12


@dataclass(frozen=True)
class Place:
    """Checkpoints in a store, and the step that was asked for."""

    label: str
    """What the user called it, without the step."""
    store: Store
    step: int | None

    def entries(self) -> list[Entry]:
        """Everything there; an empty place is an error."""
        found = inventory(self.store)
        if not found:
            fail(f"{self.label}: there is no checkpoint in {self.store.name}")
        return found

    def entry(self) -> Entry:
        """The step that was asked for, or the newest complete one."""
        entries = self.entries()
        if self.step is None:
            complete = [entry for entry in entries if entry.state == "complete"]
            if not complete:
                states = ", ".join(f"{entry.step} ({entry.state})" for entry in entries)
                fail(f"{self.label}: no checkpoint is complete, only {states}; name one with @STEP")
            return complete[-1]
        found = next((entry for entry in entries if entry.step == self.step), None)
        return found or self._no_such_step([entry.step for entry in entries])

    def reader(self) -> Reader:
        """The checkpoint of `entry`, opened; one that is not complete is an error."""
        entry = self.entry()
        if entry.state != "complete":
            why = f": {entry.trouble}" if entry.trouble else ""
            fail(f"{self.label}@{entry.step} is {entry.state}{why}; only a complete checkpoint can be read")
        return Reader(self.store, entry.step)

    def _no_such_step(self, steps: list[int]) -> NoReturn:
        assert self.step is not None
        wanted = self.step
        nearest = min(steps, key=lambda step: abs(step - wanted))
        more = f" and {len(steps) - _TOLD_STEPS} older" if len(steps) > _TOLD_STEPS else ""
        listed = ", ".join(map(str, steps[-_TOLD_STEPS:]))
        fail(
            f"{self.label} has no checkpoint of step {wanted}, but of {listed}{more}\n"
            f"    → did you mean {self.label}@{nearest}?"
        )


def find_place(name: str, runs: Path, settings: list[str] | None = None, *, new: bool = False) -> Place:
    """The checkpoints that `name` names; with `new`, a folder that does not exist yet is one too."""
    found = _STEP.match(name)
    where, step = (found["where"], int(found["step"])) if found else (name, None)
    if "://" in where:
        return Place(where, _opened(where, settings), step)
    for path in (runs / where, Path(where)):
        if path.is_dir() and is_run(path):
            return Place(where, open_home(RunFolder(path)), step)
    folder = Path(where)
    if folder.is_dir() and (last := _STEP_FOLDER.match(folder.resolve().name)) and step is None:
        return Place(str(folder.parent), open_store(str(folder.resolve().parent)), int(last[1]))
    if folder.is_dir() or new:
        return Place(where, open_store(where), step)
    find_run(where, runs)  # says that it is none, and which is nearest
    raise AssertionError("a run that was not found a moment ago is there now; try again")


def fail(message: str) -> NoReturn:
    """Say what the user can mend, and end."""
    typer.echo(message, err=True)
    raise typer.Exit(2)


@contextmanager
def told_plainly() -> Iterator[None]:
    """What a store or a checkpoint has to say against a command, as a message instead of a traceback."""
    try:
        yield
    except (Damaged, Occupied, OSError, EOFError, ImportError) as error:
        fail(str(error))


@contextmanager
def bytes_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """A bar over bytes on standard error, gone when the work is done."""
    columns = (TextColumn(label), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(label, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def growing_bar(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """The same, for work that tells how many bytes more are done; may be told from several threads."""
    done = 0
    with bytes_bar(label) as tell:

        def more(count: int) -> None:
            nonlocal done
            done += count
            tell(min(done, total), total)

        yield more


def _opened(where: str, settings: list[str] | None) -> Store:
    options = dict(setting.partition("=")[::2] for setting in settings or [])
    try:
        return open_store(where, options if where.startswith("s3://") else None)
    except ValueError as error:
        fail(str(error))
