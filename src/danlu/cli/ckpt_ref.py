"""Arguments of `danlu ckpt`: checkpoints of a run, in a folder, or in an object store, with or without a step."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from danlu.report.progress_bar import progress_bar
from danlu.report.run_tables import find_run, is_run_folder
from danlu.spec import RunFolder
from danlu.storage.checkpoint.copying import CheckpointExistsError
from danlu.storage.checkpoint.inspection import CheckpointEntry, list_checkpoints
from danlu.storage.checkpoint.manifest import CorruptCheckpointError
from danlu.storage.checkpoint.reader import CheckpointReader
from danlu.storage.checkpoint.run_store import open_run_store
from danlu.storage.store.base import Store, open_store

S3Option = Annotated[
    list[str] | None,
    typer.Option(
        "--s3", metavar="KEY=VALUE", help="Setting of an s3:// store, such as endpoint=http://localhost:9000."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]

_REF = re.compile(r"^(?P<where>.+)@(?P<step>[0-9]+)$")
_STEP_FOLDER = re.compile(r"^step-([0-9]{8,})$")
_MAX_LISTED_STEPS = 12


@dataclass(frozen=True)
class CheckpointRef:
    """Checkpoints in a store, and the requested step."""

    label: str
    """The argument as given, without the step."""
    store: Store
    step: int | None

    def entries(self) -> list[CheckpointEntry]:
        """All checkpoints; an empty store is an error."""
        found = list_checkpoints(self.store)
        if not found:
            fail(
                f"{self.label}: there is no checkpoint in {self.store.name}; see `danlu runs` for runs with checkpoints"
            )
        return found

    def entry(self) -> CheckpointEntry:
        """The requested step, or the newest complete one."""
        entries = self.entries()
        if self.step is None:
            complete = [entry for entry in entries if entry.state == "complete"]
            if not complete:
                states = ", ".join(f"{entry.step} ({entry.state})" for entry in entries)
                fail(f"{self.label}: no checkpoint is complete, only {states}; select one with @STEP")
            return complete[-1]
        found = next((entry for entry in entries if entry.step == self.step), None)
        return found or self._no_such_step([entry.step for entry in entries])

    def open_reader(self) -> CheckpointReader:
        """Open the checkpoint of `entry`; an incomplete one is an error."""
        entry = self.entry()
        if entry.state != "complete":
            why = f": {entry.error}" if entry.error else ""
            fail(f"{self.label}@{entry.step} is {entry.state}{why}; only a complete checkpoint can be read")
        return CheckpointReader(self.store, entry.step)

    def _no_such_step(self, steps: list[int]) -> NoReturn:
        assert self.step is not None
        wanted = self.step
        nearest = min(steps, key=lambda step: abs(step - wanted))
        more = f" and {len(steps) - _MAX_LISTED_STEPS} older" if len(steps) > _MAX_LISTED_STEPS else ""
        listed = ", ".join(map(str, steps[-_MAX_LISTED_STEPS:]))
        fail(
            f"{self.label} has no checkpoint of step {wanted}, but of {listed}{more}\n"
            f"    → did you mean {self.label}@{nearest}?"
        )


def resolve_ref(name: str, runs: Path, settings: list[str] | None = None, *, new: bool = False) -> CheckpointRef:
    """The checkpoints that `name` refers to; with `new`, also a folder that does not exist yet."""
    found = _REF.match(name)
    where, step = (found["where"], int(found["step"])) if found else (name, None)
    if "://" in where:
        return CheckpointRef(where, _open_store(where, settings), step)
    for path in (runs / where, Path(where)):
        if path.is_dir() and is_run_folder(path):
            return CheckpointRef(where, open_run_store(RunFolder(path)), step)
    folder = Path(where)
    if folder.is_dir() and (last := _STEP_FOLDER.match(folder.resolve().name)) and step is None:
        return CheckpointRef(str(folder.parent), open_store(str(folder.resolve().parent)), int(last[1]))
    if folder.is_dir() or new:
        return CheckpointRef(where, open_store(where), step)
    find_run(where, runs)  # raises, with the nearest name
    raise AssertionError("a run that was not found a moment ago is there now; try again")


def fail(message: str) -> NoReturn:
    """Print an error the user can fix, and exit with 2."""
    typer.echo(message, err=True)
    raise typer.Exit(2)


@contextmanager
def report_errors() -> Iterator[None]:
    """Print errors of a store or a checkpoint as a message instead of a traceback."""
    try:
        yield
    except (CorruptCheckpointError, CheckpointExistsError, OSError, EOFError, ImportError) as error:
        fail(str(error))


@contextmanager
def incremental_progress_bar(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """The same, for work that reports increments; may be called from several threads."""
    done = 0
    with progress_bar(label) as update:

        def more(count: int) -> None:
            nonlocal done
            done += count
            update(min(done, total), total)

        yield more


def _open_store(where: str, settings: list[str] | None) -> Store:
    options = dict(setting.partition("=")[::2] for setting in settings or [])
    try:
        return open_store(where, options if where.startswith("s3://") else None)
    except ValueError as error:
        fail(str(error))
