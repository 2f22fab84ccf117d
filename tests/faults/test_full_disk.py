"""A disk that fills up in the middle of a run, and a run's folder that cannot be written to."""

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from other_accounts import Account, made_accounts

from danlu.spec import RunFolder, StepEvent

RECIPE = """
name = "small"
steps = 100000
model = { base = "tiny-llama", vocabulary = 264 }
data = { shards = "shards", source = ["text.txt"] }
batch = { sequences = 4, length = 32 }
checkpoint = { every = 5, keep = 1, retries = 0 }
"""


TEXT = "".join(f"{n} times {n} is {n * n}, and not {n + n}.\n" for n in range(2000))


class Command:
    """A command of danlu whose output is read as it comes."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "danlu", *arguments],
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.said: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)

    def until(self, condition: Callable[[str], bool], seconds: float = 400.0) -> None:
        """Read until a line is as wanted."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                line = self.lines.get(timeout=1.0)
            except queue.Empty:
                assert time.monotonic() < deadline and self.process.poll() is None, "".join(self.said)
                continue
            self.said.append(line)
            if condition(line):
                return

    def end(self) -> int:
        code = self.process.wait(120)
        self._reader.join()
        while not self.lines.empty():
            self.said.append(self.lines.get())
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


def step_of(line: str) -> int:
    return int(line.split()[1].partition("/")[0].replace(",", "")) if line.startswith("step ") else 0


def steps(run: RunFolder) -> list[int]:
    return [event.step for event in run.read_events() if isinstance(event, StepEvent)]


def fill(place: Path) -> Path:
    ballast = place / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                continue
    return ballast


def test_a_disk_that_fills_up_ends_no_run(tmp_path: Path, mounted: Callable[[Path, int], None]) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "small.toml").write_text(RECIPE)
    (tmp_path / "runs").mkdir()
    mounted(tmp_path / "runs", 32 << 20)
    run = RunFolder(tmp_path / "runs" / "small")
    command = Command(tmp_path, "train", "small.toml")
    try:
        command.until(lambda line: step_of(line) >= 1)
        ballast = fill(tmp_path / "runs")
        command.until(lambda line: "cannot be written (events, TensorBoard): No space left on device" in line)
        full_at = steps(run)[-1]
        command.until(lambda line: step_of(line) > full_at + 10)
        assert steps(run)[-1] == full_at, "the disk is still full"
        ballast.unlink()
        deadline = time.monotonic() + 180
        while steps(run)[-1] < full_at + 11 and time.monotonic() < deadline:
            time.sleep(0.05)
        subprocess.run([sys.executable, "-m", "danlu", "stop", "small"], cwd=tmp_path, check=True, timeout=360)
        code = command.end()  # it still has its summary to print
    finally:
        if command.process.poll() is None:
            command.process.terminate()
            command.end()
    said = "".join(command.said)
    assert code == 3, said
    assert "Traceback" not in said
    assert steps(run) == list(range(1, steps(run)[-1] + 1)), "what waited in memory was written"
    assert "saving the checkpoint of step" in said, "checkpoints that failed are told as before"


@pytest.fixture(scope="module")
def account() -> Iterator[Account]:
    with made_accounts(1) as (made,):
        yield made


def test_a_run_that_cannot_be_written_to_is_shown_and_nothing_of_it_is_touched(account: Account) -> None:
    run = RunFolder(account.folder / "runs" / "theirs")
    (account.folder / "text.txt").write_text(TEXT)
    (account.folder / "small.toml").write_text(RECIPE)
    prepared = (
        "from danlu.runs.prepare import prepare_run; from pathlib import Path; "
        "prepare_run(Path('small.toml'), None, None, 'theirs', 1)"
    )
    subprocess.run([sys.executable, "-c", prepared], cwd=account.folder, check=True)
    for path in (run.path, *run.path.rglob("*")):  # root's, and readable to all
        path.chmod(0o755 if path.is_dir() else 0o644)
    before = sorted((path, path.stat().st_mtime_ns) for path in (run.path, *run.path.rglob("*")))
    shown = account.danlu("show", "theirs", "--no-open")
    assert shown.returncode == 0, shown.stderr
    assert "not started" in shown.stdout and "There is no page: the run is root's" in shown.stderr
    assert "theirs" in account.danlu("runs").stdout
    for arguments in (["train", "--resume", "theirs"], ["rm", "theirs", "--yes"]):
        refused = account.danlu(*arguments)
        assert refused.returncode == 2, refused.stderr
        assert "cannot be written to: Permission denied" in refused.stderr
        assert refused.stderr.count("\n") == 1, refused.stderr
    assert sorted((path, path.stat().st_mtime_ns) for path in (run.path, *run.path.rglob("*"))) == before
    nowhere = account.danlu("train", "small.toml", "--name", "mine")
    assert nowhere.returncode == 2 and "cannot be written to: Permission denied" in nowhere.stderr
    assert "Traceback" not in nowhere.stderr
