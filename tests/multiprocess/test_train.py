"""`danlu train` as a user runs it: from recipe to page, stopped by an interrupt, resumed at another layout."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from danlu.comm.flight_record import read_flights
from danlu.spec import EndEvent, PreflightEvent, RankFailureEvent, ResumeEvent, RunFolder, StartEvent, StepEvent

RECIPE = """
name = "small"
steps = {steps}

[model]
base = "tiny-llama"
vocabulary = 264

[data]
shards = "shards"

[batch]
sequences = 8
length = 64

[schedule]
kind = "constant"

[checkpoint]
every = 4
"""


def danlu(folder: Path, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "danlu", *arguments],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(folder: Path, *arguments: str, code: int = 0) -> str:
    process = danlu(folder, *arguments)
    output = process.communicate(timeout=540)[0]
    assert process.returncode == code, output
    return output


def losses(folder: Path, name: str) -> dict[int, float]:
    events = RunFolder(folder / "runs" / name).read_events()
    return {event.step: event.loss for event in events if isinstance(event, StepEvent)}


@pytest.fixture(scope="module")
def whole(folder: Path) -> dict[int, float]:
    """An uninterrupted run on two ranks, looked at from outside."""
    (folder / "small.toml").write_text(RECIPE.format(steps=12))
    output = run(folder, "train", "small.toml", "--nproc", "2", "--name", "whole")
    assert "no plan given: states sharded over all 2 ranks" in output
    assert "step 12/12 (100%)" in output
    return losses(folder, "whole")


def test_run_folder_is_complete(folder: Path, whole: dict[int, float]) -> None:
    made = RunFolder(folder / "runs" / "whole")
    events = list(made.read_events())
    assert isinstance(events[0], StartEvent)
    assert events[0].world == 2
    assert events[0].peak > 1e9
    assert events[0].baseline_loss is not None
    assert isinstance(events[-1], EndEvent)
    assert events[-1].outcome == "finished"
    assert list(whole) == list(range(1, 13))
    assert whole[12] < whole[1]
    assert "<svg" in made.report.read_text()
    assert any(made.tensorboard.iterdir())
    assert [path.name for path in sorted(made.checkpoints.iterdir())] == ["step-00000008", "step-00000012"]


def test_interrupt_saves_and_resume_goes_on(folder: Path, whole: dict[int, float]) -> None:
    (folder / "long.toml").write_text(RECIPE.format(steps=10_000))
    process = danlu(folder, "train", "long.toml", "--nproc", "2", "--name", "stopped")
    deadline = time.monotonic() + 360
    while len(losses(folder, "stopped")) < 5 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=180)[0]
    assert process.returncode == 3, output
    assert "stopped" in output
    before = losses(folder, "stopped")
    made = RunFolder(folder / "runs" / "stopped")
    recipe = made.recipe.read_text()
    made.recipe.write_text(recipe.replace("steps = 10000", f"steps = {len(before) + 3}"))
    output = run(folder, "resume", "stopped", "--nproc", "1")
    proof = [line.split(maxsplit=1) for line in output.splitlines() if line.startswith("  ")]
    (resumed,) = [event for event in made.read_events() if isinstance(event, ResumeEvent)]
    assert ["was", "shard 2, 2 ranks"] in proof and ["now", "1 rank"] in proof
    assert (resumed.tensors, resumed.samples) == (resumed.saved, 8 * len(before))
    assert ["samples", f"{8 * len(before)} consumed, 0 repeated, 0 skipped"] in proof
    assert sum(isinstance(event, PreflightEvent) for event in made.read_events()) == 2
    after = losses(folder, "stopped")
    assert sorted(after) == list(range(1, len(before) + 4))
    common = [step for step in after if step in whole]
    assert [after[step] for step in common] == pytest.approx([whole[step] for step in common], rel=1e-5)


def test_wrong_layout_is_refused_before_anything_starts(folder: Path, whole: dict[int, float]) -> None:
    (folder / "plan.toml").write_text("[degrees]\ntp = 3\n")
    output = run(folder, "train", "small.toml", "--plan", "plan.toml", "--name", "refused", code=2)
    assert "plan.toml:2" in output
    assert not (folder / "runs" / "refused").exists()


def test_a_store_that_takes_nothing_ends_the_run_before_its_first_step(folder: Path, whole: dict[int, float]) -> None:
    run(folder, "train", "small.toml", "--name", "closed")
    made = RunFolder(folder / "runs" / "closed")
    shutil.rmtree(made.checkpoints)
    made.checkpoints.symlink_to("/proc/nowhere")  # where nobody may write, not even root
    made.events.unlink()
    output = run(folder, "train", "--resume", "closed", code=1)
    assert "rank 0 failed: " in output and "cannot be written" in output
    assert "Traceback" not in output and "NotReady" not in output
    (failure,) = made.read_rank_events(0)
    assert isinstance(failure, RankFailureEvent) and failure.explained and failure.step is None
    assert f"rank 0 failed: {failure.message}" in " ".join(output.split())
    assert losses(folder, "closed") == {}
    assert "has no checkpoint to resume from" in run(folder, "resume", "closed", code=2)


def test_failure_names_the_rank(folder: Path, whole: dict[int, float]) -> None:
    made = RunFolder(folder / "runs" / "broken")
    words = ["long.toml", "--nproc", "2", "--name", "broken", "--set", "resilience.restarts=0"]
    process = danlu(folder, "train", *words)
    deadline = time.monotonic() + 360
    while len(losses(folder, "broken")) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    victim = read_flights(made.path)[1].pid
    assert Path(f"/proc/{victim}/comm").read_text() == "danlu rank 1\n"
    os.kill(victim, signal.SIGKILL)
    output = process.communicate(timeout=360)[0]
    assert process.returncode == 1
    assert "rank 1 was killed by SIGKILL" in output
    last = list(made.read_events())[-1]
    assert isinstance(last, EndEvent)
    assert last.outcome == "failed"


PYTHON = """
import sys
from pathlib import Path
import danlu
assert "torch" not in sys.modules
from danlu.comm.flight_record import read_flights
from danlu.spec import Degrees, Plan, load_recipe
recipe = load_recipe(Path("small.toml"))
result = danlu.train(recipe, plan=Plan(degrees=Degrees(shard=2)), name="called", quiet=True)
assert "torch" not in sys.modules, "ranks are other processes"
assert (result.step, result.outcome, result.run.name) == (12, "finished", "called"), result
closed = recipe.model_copy(update={"checkpoint": recipe.checkpoint.model_copy(update={"store": "/proc/nowhere"})})
try:
    danlu.train(closed, name="refused-store", quiet=True)
except danlu.TrainError as error:
    *_, end = error.run.read_events()
    assert end.message == str(error) and "rank 0 failed" in str(error), error
else:
    raise AssertionError("a store that takes nothing must end the run")
print(repr(result.loss))
"""


def test_a_program_trains_as_the_command_does(folder: Path, whole: dict[int, float]) -> None:
    called = subprocess.run(
        [sys.executable, "-c", PYTHON],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert called.returncode == 0, called.stdout + called.stderr
    assert losses(folder, "called") == whole, "to the last bit"
    assert called.stdout == f"{whole[12]!r}\n", "quiet"
