"""The examples as a user runs them: torchrun, real ranks, and the losses of the plain script."""

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def losses(script: str, *arguments: str, ranks: int = 0) -> list[float]:
    """The losses that a script prints, by step; every rank that prints must print the same."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    command = [sys.executable, *torchrun, str(EXAMPLES / script), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    by_step: dict[int, set[str]] = {}
    for step, loss in re.findall(r"step (\d+) loss ([\d.]+)", done.stdout):
        by_step.setdefault(int(step), set()).add(loss)
    assert by_step, done.stdout
    assert all(len(printed) == 1 for printed in by_step.values()), "ranks disagree on the loss"
    return [float(printed.pop()) for _, printed in sorted(by_step.items())]


@pytest.fixture(scope="module")
def plain() -> list[float]:
    return losses("plain.py")


def test_ten_lines_make_it_parallel() -> None:
    before, after = ((EXAMPLES / name).read_text().splitlines() for name in ("plain.py", "parallel.py"))
    lines = [line for line in difflib.ndiff(before, after) if line.startswith(("+ ", "- "))]
    assert sum(line.startswith("+") for line in lines) <= 10
    assert sum(line.startswith("-") for line in lines) <= 10


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.full), 2, pytest.param(4, marks=pytest.mark.full)])
def test_parallel_script_equals_its_undistributed_self(ranks: int, plain: list[float]) -> None:
    assert losses("parallel.py", ranks=ranks) == pytest.approx(plain, rel=1e-5)


@pytest.mark.full
def test_loop_resumes_on_another_layout(tmp_path: Path) -> None:
    straight = losses("resumable.py", str(tmp_path / "one"), ranks=1) + losses("resumable.py", str(tmp_path / "one"))
    split = losses("resumable.py", str(tmp_path / "two"), ranks=2)
    split += losses("resumable.py", str(tmp_path / "two"), str(EXAMPLES / "tensor-2.toml"), ranks=4)
    assert len(straight) == 20
    assert split == pytest.approx(straight, rel=1e-5)
