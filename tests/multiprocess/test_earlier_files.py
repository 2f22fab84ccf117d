"""Files that version 0.1 wrote (a run of a mixture of experts on two ranks, and its data) are read by this one."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

KEPT = Path(__file__).parents[1] / "data" / "run-0.1"
LOSSES = [5.43071174621582, 5.398049354553223]
"""Of steps 4 and 5, as version 0.1 itself went on from its checkpoint."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(KEPT / "run", tmp_path / "runs" / "kept")
    shutil.copytree(KEPT / "shards", tmp_path / "shards")
    recipe = tmp_path / "runs" / "kept" / "recipe.toml"
    text = recipe.read_text().replace("/srv/training", str(tmp_path))
    recipe.write_text(text.replace("\nsteps = 3\n", "\nsteps = 5\n"))
    return tmp_path


def danlu(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "danlu", *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_commands_that_look_at_files(folder: Path) -> None:
    assert json.loads(danlu(folder, "runs", "--json"))[0]["steps"] == 3
    assert json.loads(danlu(folder, "ckpt", "ls", "kept", "--json"))[0]["step"] == 3
    danlu(folder, "ckpt", "verify", "kept")
    danlu(folder, "data", "verify", "shards")
    danlu(folder, "show", "kept")


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.full)])
def test_the_run_goes_on(folder: Path, ranks: int) -> None:
    (folder / "plan.toml").write_text(f"microbatches = 2\n[degrees]\nshard = {ranks}\nep = {ranks}\n")
    danlu(folder, "resume", "kept", "--plan", "plan.toml", "--nproc", str(ranks))
    events = [json.loads(line) for line in (folder / "runs" / "kept" / "events.jsonl").read_text().splitlines()]
    (resumed,) = [event for event in events if event["kind"] == "resumed"]
    assert resumed["step"] == 3 and resumed["tensors"] == resumed["saved"]
    assert resumed["repeated"] == resumed["skipped"] == 0
    losses = [event["loss"] for event in events if event["kind"] == "step" and event["step"] > 3]
    assert losses == pytest.approx(LOSSES, rel=1e-5)
