"""Data builds, appends and the promises of a run, recorded call by call; and what a crash may leave of them.

Never a wrong token: a data set that a crash leaves is one that was built, whole, and a build that is started again ends
with the bytes of one that was not broken off. Never a promise lost: what a run promised to read, it is still promised.
"""

import os
import random
import shutil
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import numpy as np
from crash_states import State, sampled
from fuse_mount import served
from history import History, Mark, read_log

from danlu.spec import SpecError
from danlu.storage.data import build as builder
from danlu.storage.data.build import build_dataset
from danlu.storage.data.mixture_dataset import MixtureDataset, update_version_log
from danlu.storage.data.shuffle import IntArray
from danlu.storage.data.token_shards import TokenShards
from danlu.storage.data.tokenizer import BytesTokenizer
from danlu.storage.data.version_log import DatasetVersionLog
from danlu.storage.store import atomic_files

SHARD_TOKENS, LENGTH = 96, 8
Act = Callable[[Path], None]


class Wrong(AssertionError):  # noqa: N818 - it is what the disk's content is
    """What must never be."""


@dataclass
class DataScenario:
    """What was done to a disk, and what it must hold afterwards."""

    name: str
    history: History
    versions: list[dict[str, bytes]]
    """The files of the data set after each build or append, as they are without a crash."""
    again: Act
    """What whoever finds the disk after a crash does: the last build, once more."""
    promises: list[bytes] = field(default_factory=list)
    """Lines of the run's log, in order."""
    stream: IntArray | None = None
    """What the run reads with all its promises."""


@dataclass
class DataTally:
    """What was looked at."""

    scenarios: int = 0
    calls: int = 0
    states: int = 0
    ordered: int = 0
    """Those a file system can leave that keeps a folder's changes in order."""
    built_again: int = 0
    wrong: list[str] = field(default_factory=list)


def explore_data(
    scenarios: Iterable[DataScenario],
    folder: Path,
    tally: DataTally,
    a_cut: int,
    again_every: int,
    seed: int = 0,
    on_state: Callable[[], None] = lambda: None,
) -> DataTally:
    """Look at up to `a_cut` new states for every place a crash may be at; one of `again_every` is built on."""
    for scenario in scenarios:
        tally.scenarios += 1
        tally.calls += len(scenario.history.ops)
        for number, state in enumerate(sampled(scenario.history, a_cut, seed), start=1):
            marks = tuple(op for op in scenario.history.ops[: state.cut] if isinstance(op, Mark))
            tally.states += 1
            tally.ordered += state.ordered
            tally.built_again += number % again_every == 0
            try:
                _look(scenario, state, marks, folder / "state", go_on=number % again_every == 0)
            except Wrong as wrong:
                last = repr(scenario.history.ops[state.cut - 1])[:120] if state.cut else "nothing"
                tally.wrong.append(f"{scenario.name}, after call {state.cut} ({last}): {wrong}")
            on_state()
    return tally


def _look(scenario: DataScenario, state: State, marks: tuple[Mark, ...], place: Path, *, go_on: bool) -> None:
    place.mkdir(parents=True)
    try:
        state.make(place)
        built = max((mark.step for mark in marks if mark.what == "built"), default=-1)
        replacing = any(mark.what == "replacing" for mark in marks)
        found = version_of(place / "data", scenario.versions)
        if found is None and built >= 0 and not (replacing and built == 0):
            raise Wrong(f"build {built} had returned, but there is no data set")
        if found is not None and found < built:
            raise Wrong(f"build {built} had returned, but the data set is that of build {found}")
        _check_promises(scenario, place, sum(mark.what == "promised" for mark in marks))
        if go_on:
            _go_on(scenario, place)
    finally:
        shutil.rmtree(place)


def version_of(folder: Path, versions: list[dict[str, bytes]]) -> int | None:
    """Which of the builds a folder holds, all of it; None if it is no data set. `Wrong` if it is anything else."""
    if not (folder / "index.json").exists():
        return None
    try:
        shards = TokenShards.open(folder)
        shards.verify()
        tokens = shards.read(0, shards.tokens)
    except (SpecError, OSError) as error:
        raise Wrong(f"there is an index, but the data set cannot be read: {error}") from error
    for number, version in enumerate(versions):
        if (folder / "index.json").read_bytes() == version["index.json"]:
            whole = b"".join(version[shard.file] for shard in shards.index.shards)
            if tokens.astype("<u2").tobytes() != whole:
                raise Wrong("the data set passes every check, but other tokens were built")
            return number
    raise Wrong("the data set passes every check, but nobody built it")


def _check_promises(scenario: DataScenario, place: Path, made: int) -> None:
    if not scenario.promises or not (place / "run").exists():
        return
    try:
        lines = [each.model_dump_json().encode() for each in DatasetVersionLog(place / "run" / "data.jsonl").read()]
    except SpecError as error:
        raise Wrong(f"the promises of the run cannot be read: {error}") from error
    if lines != scenario.promises[: len(lines)]:
        raise Wrong(f"promised was {scenario.promises}, but there is {lines}")
    if len(lines) < made:
        raise Wrong(f"{made} promises had been made, but there are {len(lines)}")
    promised = DatasetVersionLog(place / "run" / "data.jsonl").read()
    found = version_of(place / "data", scenario.versions)
    if promised and (found is None or found < promised[-1].editions[0]):
        raise Wrong(f"edition {promised[-1].editions[0]} is promised, but the data set is that of build {found}")


def _go_on(scenario: DataScenario, place: Path) -> None:
    """Build again, as whoever finds this does; then let the run go on, and hold both against an undisturbed disk."""
    try:
        scenario.again(place)
    except SpecError as error:
        raise Wrong(f"it cannot be built again: {error}") from error
    found = version_of(place / "data", scenario.versions)
    if found != len(scenario.versions) - 1:
        raise Wrong(f"built again, it is the data set of build {found}")
    files = {path.name: path.read_bytes() for path in (place / "data").iterdir()}
    if files != scenario.versions[-1]:
        raise Wrong(f"built again, it has other files: {sorted(files)}")
    if scenario.stream is not None:
        (place / "run").mkdir(exist_ok=True)
        if not np.array_equal(_live(place), scenario.stream):
            raise Wrong("the run that goes on reads other samples")


# --- scenarios


def texts_in(folder: Path) -> dict[str, Path]:
    """Three texts, of some shards each; not on the disk that crashes."""
    folder.mkdir(parents=True)
    dice, made = random.Random(3), {}
    for name, documents in (("first", 7), ("more", 5), ("other", 6)):
        made[name] = folder / f"{name}.jsonl"
        lines = ['{"text": "' + "".join(dice.choices("abcdef", k=dice.randint(5, 60))) + '"}' for _ in range(documents)]
        made[name].write_text("\n".join(lines))
    return made


def data_scenarios(folder: Path, kills: range) -> Iterator[DataScenario]:
    """A build and an append; one that replaces another; ones that are killed and started again; a run beside an append.

    `kills` are calls at which a first try of the append is killed.
    """
    texts = texts_in(folder / "texts")

    def first(place: Path) -> None:
        _build(texts["first"], place)

    def append(place: Path) -> None:
        if not (place / "data" / "index.json").exists():
            first(place)
        _build(texts["more"], place, append=True)

    def replace(place: Path) -> None:
        _build(texts["other"], place, force=True)

    def killed(place: Path, at: int) -> None:
        child = os.fork()
        if child == 0:
            try:
                with _killed_at(at):
                    append(place)
            finally:  # never back into the process this was forked from
                os._exit(0)
        os.waitpid(child, 0)

    yield _recorded("a build and an append", folder / "append", [("built 0", first), ("built 1", append)], append)
    steps: list[tuple[str, Act]] = [("built 0", first), ("replacing 0", _nothing), ("built 1", replace)]
    yield _recorded("a build that replaces another", folder / "replace", steps, replace)
    for at in kills:
        name = f"an append that is killed at call {at}, and started again"
        steps = [("built 0", first), ("killed 0", lambda place, at=at: killed(place, at)), ("built 1", append)]  # type: ignore[misc]
        yield _recorded(name, folder / f"killed-{at}", steps, append)
    steps = [("built 0", first), ("promised 0", _promise_first), ("built 1", append), ("promised 1", _promise_rest)]
    yield _recorded("a run that takes up an append", folder / "promise", steps, append, runs=True)
    yield _recorded(
        "a run that takes up an append whose name is not on the disk yet",
        folder / "early",
        [("built 0", first), ("promised 0", _promise_first), ("built 1", lambda place: _promised_early(place, append))],
        append,
        runs=True,
    )


def _build(text: Path, place: Path, *, append: bool = False, force: bool = False) -> None:
    with patch.object(builder, "_PROGRESS_OVERHEAD_DIVISOR", 0):  # one per shard, so that every state can be met
        build_dataset(
            [str(text)], place / "data", BytesTokenizer(), shard_tokens=SHARD_TOKENS, append=append, force=force
        )


def _recorded(name: str, folder: Path, steps: list[tuple[str, Act]], again: Act, *, runs: bool = False) -> DataScenario:
    """Do the steps on a disk that writes every call down, with a mark behind each."""
    source, disk, log = (folder / part for part in ("source", "disk", "log"))
    source.mkdir(parents=True)
    disk.mkdir()
    versions: list[dict[str, bytes]] = []
    with served("recording_fs.py", source, disk, str(log)):
        if runs:
            (disk / "run").mkdir()
            _sync(disk)  # whoever makes a run's folder sees to it
        for mark, act in steps:
            act(disk)
            os.setxattr(disk, "user.mark", mark.encode())
            if mark.startswith("built"):
                versions.append({path.name: path.read_bytes() for path in (source / "data").iterdir()})
    scenario = DataScenario(name, read_log(log, source), versions, again)
    if runs:
        scenario.promises = (source / "run" / "data.jsonl").read_bytes().splitlines()
        scenario.stream = _live(source)
    return scenario


def _live(place: Path) -> IntArray:
    """What a run reads that resumes at its beginning: the editions that it has promised, from where on it has."""
    data = _data(place)
    data.set_version_schedule(update_version_log(DatasetVersionLog(place / "run" / "data.jsonl"), data, cursor=20))
    return data.read_samples(np.arange(60))


def _data(place: Path) -> MixtureDataset:
    return MixtureDataset([TokenShards.open(place / "data")], [1], LENGTH, seed=5)


def _promise_first(place: Path) -> None:
    update_version_log(DatasetVersionLog(place / "run" / "data.jsonl"), _data(place), cursor=0)


def _promise_rest(place: Path) -> None:
    update_version_log(DatasetVersionLog(place / "run" / "data.jsonl"), _data(place), cursor=20)


def _promised_early(place: Path, append: Act) -> None:
    """The run looks when the new index has its name, and the append still waits for the disk."""
    real, done = atomic_files.fsync_dir, list[bool]()

    def sync(folder: Path) -> None:
        if not done and folder == place / "data" and _data(place).newest_versions() == (1,):
            done.append(True)
            _promise_rest(place)
            os.setxattr(place, "user.mark", b"promised 1")
        real(folder)

    with patch.object(atomic_files, "fsync_dir", sync):
        append(place)
    assert done


def _nothing(place: Path) -> None:
    pass


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


@contextmanager
def _killed_at(point: int) -> Iterator[None]:
    """Before the `point`-th sync, renaming, removal or opening of a file, be killed."""
    left = [point]

    def counted(call: Callable[..., object]) -> Callable[..., object]:
        def touch(*arguments: object, **named: object) -> object:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **named)

        return touch

    for name in ("rename", "unlink", "write_bytes", "open"):
        setattr(Path, name, counted(getattr(Path, name)))
    os.fsync = counted(os.fsync)  # type: ignore[assignment]
    yield
