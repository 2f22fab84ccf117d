"""`danlu train` on a disk that fills up, fails and dawdles: the training does not notice, the events do."""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from test_train import danlu, losses, run

from danlu.spec import EndEvent, RunFolder, SaveEvent, StartEvent, WarningEvent
from danlu.storage.checkpoint.checkpoint_dir import CheckpointDir
from danlu.storage.checkpoint.reader import CheckpointReader, hash_only
from danlu.storage.data.build import build_dataset
from danlu.storage.data.tokenizer import BytesTokenizer
from danlu.storage.store.local_store import LocalStore

STEPS = 40
EVERY = 4
RECIPE = f"""
name = "faults"
steps = {{steps}}
model = {{{{ base = "tiny-llama", vocabulary = 264 }}}}
data.shards = "shards"
batch = {{{{ sequences = 8, length = 64 }}}}
schedule.kind = "constant"
checkpoint = {{{{ every = {EVERY}, keep = 2, retries = 0 }}}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps that the others go on from, and where it ends if nothing is wrong."""
    folder = tmp_path_factory.mktemp("faults")
    (folder / "text.txt").write_text("".join(path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))))
    build_dataset([str(folder / "text.txt")], folder / "shards", BytesTokenizer())
    (folder / "first.toml").write_text(RECIPE.format(steps=EVERY))
    run(folder, "train", "first.toml", "--nproc", "2", "--name", "first")
    again(folder, "unfaulted")
    run(folder, "train", "--resume", "unfaulted", "--nproc", "2")
    assert warnings(folder, "unfaulted") == []
    return folder


def again(folder: Path, name: str) -> RunFolder:
    """A copy of the first run that is to go on to `STEPS`."""
    made = RunFolder(folder / "runs" / name)
    shutil.copytree(folder / "runs" / "first", made.path)
    recipe = made.recipe.read_text()
    made.recipe.write_text(recipe.replace(f"steps = {EVERY}\n", f"steps = {STEPS}\n", 1))
    return made


def warnings(folder: Path, name: str) -> list[str]:
    events = RunFolder(folder / "runs" / name).read_events()
    return [event.message for event in events if isinstance(event, WarningEvent)]


def saved(folder: Path, name: str) -> list[int]:
    events = RunFolder(folder / "runs" / name).read_events()
    return [event.step for event in events if isinstance(event, SaveEvent)]


def holds(folder: Path, name: str, checkpoints: Path) -> list[int]:
    """What must be so after every run: it ended well, with the same losses, and all that is listed can be read."""
    events = list(RunFolder(folder / "runs" / name).read_events())
    assert isinstance(events[-1], EndEvent) and events[-1].outcome == "finished"
    assert losses(folder, name) == losses(folder, "unfaulted"), "to the last bit"
    store = LocalStore(checkpoints)
    listed = CheckpointDir(store, 2).resumable_steps()
    for step in listed:
        reader = CheckpointReader(store, step)
        reader.read_chunks(reader.find_chunks(), hash_only)
    return listed


@pytest.fixture
def eyes() -> Iterator[Callable[[Callable[[], bool]], None]]:
    """Something that is looked at all the while, until it has happened or the test ends."""
    over, watchers = threading.Event(), []

    def watch(act: Callable[[], bool]) -> None:
        def look() -> None:
            while not over.is_set() and not act():
                time.sleep(0.01)

        watchers.append(threading.Thread(target=look))
        watchers[-1].start()

    yield watch
    over.set()
    for watcher in watchers:
        watcher.join()


def test_a_full_disk(folder: Path, mounted: Callable[[Path, int], None], eyes: Callable[..., None]) -> None:
    made = again(folder, "full")
    kept = folder / "kept-full"
    made.checkpoints.rename(kept)
    made.checkpoints.mkdir()
    size = sum(path.stat().st_size for path in kept.rglob("*"))
    mounted(made.checkpoints, 6 * size)
    shutil.copytree(kept, made.checkpoints, dirs_exist_ok=True)
    ballast = made.checkpoints / "somebody-elses-file"

    def fill_up() -> bool:
        """Once the run has rehearsed a save: before, it would not start."""
        if sum(isinstance(event, StartEvent) for event in made.read_events()) < 2:
            return False
        ballast.write_bytes(bytes(int(4.5 * size)))  # half of one more checkpoint fits
        return True

    def make_room() -> bool:
        if not warnings(folder, "full"):
            return False
        assert CheckpointDir(LocalStore(made.checkpoints), 2).resumable_steps() == [EVERY]
        ballast.unlink()
        return True

    eyes(fill_up)
    eyes(make_room)
    run(folder, "train", "--resume", "full", "--nproc", "2")
    told = warnings(folder, "full")
    assert any("saving the checkpoint of step" in warning for warning in told), told
    assert any("No space left" in line or "B free, but" in line or "another rank" in line for line in told), told
    assert holds(folder, "full", made.checkpoints)[-1] == STEPS
    assert not ballast.exists()


@pytest.mark.full
def test_a_disk_that_fails_and_dawdles(folder: Path, failing: Callable[[Path, Path, Path], None]) -> None:
    made = again(folder, "failing")
    kept, rules = folder / "kept-failing", folder / "rules"
    made.checkpoints.rename(kept)
    made.checkpoints.mkdir()
    rules.write_text(
        "write EIO step-00000008\n"
        "fsync EIO step-00000012\n"
        "write ENOSPC step-00000016/manifest\n"
        "fsync 0.7 step-00000024\n"
    )
    failing(kept, made.checkpoints, rules)
    process = danlu(folder, "train", "--resume", "failing", "--nproc", "2")
    output = process.communicate(timeout=540)[0]
    assert process.returncode == 0, output
    told = warnings(folder, "failing")
    for step in (8, 12, 16):
        assert any(f"saving the checkpoint of step {step} failed" in line for line in told), (step, told)
        assert step not in saved(folder, "failing")
    assert any("Input/output error" in line for line in told), told
    assert any("[Errno 28]" in line for line in told), told
    assert 20 in saved(folder, "failing"), "the disk is well again, and so is the next save"
    assert any("older checkpoints could not be deleted" in line for line in told), told
    listed = holds(folder, "failing", kept)
    assert listed[-1] == STEPS and not {8, 12, 16} & set(listed)
