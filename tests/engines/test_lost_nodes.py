"""Four nodes under real Slurm: one is switched off, one is cut off, and the run goes on."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_lab import missing_programs
from slurm_nodes import CONTROLLER, SlurmNodes

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from namespaces import supernodes, why_no_lab

from danlu.scheduler import read_ranks
from danlu.spec import EndEvent, RecoveryEvent, ResumeEvent, RunFolder, StartEvent, StepEvent, WarningEvent

RECIPE = """
name = "lost-nodes"
steps = 4000
[model]
base = "tiny-llama"
vocabulary = 264
[data]
shards = "shards"
source = ["text.txt"]
[batch]
sequences = 8
length = 32
[checkpoint]
every = 25
[resilience]
peers = 5
"""


@pytest.fixture
def nodes() -> Iterator[SlurmNodes]:
    reason = why_no_lab() or ", ".join(missing_programs())
    if reason:
        pytest.skip(reason)
    with supernodes("2gbit", "1gbit", hosts_each=3) as hosts, tempfile.TemporaryDirectory(prefix="dn-") as folder:
        lab = SlurmNodes(Path(folder), hosts)
        try:
            lab.start()
            yield lab
        finally:
            lab.stop()


def danlu(lab: SlurmNodes, folder: Path, *arguments: str) -> str:
    source = Path(__file__).parents[2] / "src"
    environment = {**lab.environment, "PYTHONPATH": f"{source}:{os.environ.get('PYTHONPATH', '')}"}
    command = lab.on(CONTROLLER, sys.executable, "-m", "danlu", *arguments)
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def wait_for_step(run: RunFolder, step: int, seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while step > max((event.step for event in events(run) if isinstance(event, StepEvent)), default=0):
        logs = "".join(f"\n--- {log.name}\n{log.read_text()[-1500:]}" for log in sorted(run.logs.glob("*.log")))
        assert time.monotonic() < deadline, logs
        time.sleep(0.3)


def ranks_on(machine: int) -> list[int]:
    """Processes of ranks among the descendants of one."""
    children = Path(f"/proc/{machine}/task/{machine}/children").read_text().split()
    below = [rank for child in children for rank in ranks_on(int(child))]
    is_rank = Path(f"/proc/{machine}/comm").read_text().startswith("danlu rank")
    return [machine, *below] if is_rank else below


def events(run: RunFolder) -> list[object]:
    return list(run.read_events()) if run.events.exists() else []


def last_step(run: RunFolder) -> int:
    return next(event.step for event in reversed(events(run)) if isinstance(event, StepEvent))


def launched(nodes: SlurmNodes, folder: Path, *options: str) -> RunFolder:
    """A run that has a checkpoint."""
    (folder / "text.txt").write_text("The furnace melts copper and tin. " * 3000)
    (folder / "recipe.toml").write_text(RECIPE)
    assert "job 1" in danlu(nodes, folder, "launch", "recipe.toml", "--on", "slurm", "--nodes", "2", *options)
    run = RunFolder(folder / "runs" / "lost-nodes")
    wait_for_step(run, 30)
    return run


def test_a_run_outlives_two_of_its_nodes(nodes: SlurmNodes, tmp_path: Path) -> None:
    run = launched(nodes, tmp_path, "--spares", "2")
    ranks = read_ranks(run.path)
    assert len(ranks.nodes) == len(ranks.spares) == 2
    nodes.power_off(ranks.nodes[1])
    before = last_step(run)
    wait_for_step(run, before + 30)
    (first,) = (event for event in events(run) if isinstance(event, RecoveryEvent))
    assert first.ranks == (1,) and ranks.nodes[1] in first.cause
    assert first.source == "memory" and before - first.step <= 10, "its state was in another node's memory"
    time.sleep(15)  # until Slurm itself gives the node up, and tells srun
    wait_for_step(run, last_step(run) + 10)
    nodes.cut_off(ranks.spares[0])
    wait_for_step(run, last_step(run) + 30)
    *_, second = (event for event in events(run) if isinstance(event, RecoveryEvent))
    assert second.ranks == (1,) and ranks.spares[0] in second.cause and second.source == "memory"
    assert not ranks_on(nodes.nodes[ranks.spares[0]].pid), "who is cut off has killed its ranks before others took over"
    danlu(nodes, tmp_path, "stop", "lost-nodes")
    *_, end = events(run)
    assert isinstance(end, EndEvent) and end.outcome == "stopped"


@pytest.mark.full
def test_with_no_node_that_waits_a_run_goes_on_with_fewer(nodes: SlurmNodes, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("[degrees]\nreplicate = 2\n")
    run = launched(nodes, tmp_path, "--spares", "0", "--plan", "plan.toml")
    nodes.power_off(read_ranks(run.path).nodes[1])
    before = last_step(run)
    wait_for_step(run, before + 30)
    (found,) = (event for event in events(run) if isinstance(event, RecoveryEvent))
    assert "goes on with 1 of 2 ranks" in found.cause
    assert found.source == "memory" and found.step >= before, "what is left of the replicas is the newest state"
    *_, start = (event for event in events(run) if isinstance(event, StartEvent))
    assert start.world == 1
    danlu(nodes, tmp_path, "stop", "lost-nodes")


@pytest.mark.full
def test_a_job_that_may_not_shrink_is_requeued_and_resumes(nodes: SlurmNodes, tmp_path: Path) -> None:
    run = launched(nodes, tmp_path, "--spares", "0", "--set", "resilience.shrink=1")
    nodes.power_off(read_ranks(run.path).nodes[1])
    wait_for_step(run, last_step(run) + 20)
    assert read_ranks(run.path).restart == 1
    assert any(isinstance(event, ResumeEvent) for event in events(run))
    danlu(nodes, tmp_path, "stop", "lost-nodes")


@pytest.mark.full
def test_a_coordinator_that_was_killed_is_replaced_and_the_run_goes_on(nodes: SlurmNodes, tmp_path: Path) -> None:
    run = launched(nodes, tmp_path, "--spares", "1")
    ranks = read_ranks(run.path)
    found = subprocess.run(["pgrep", "-f", f"slurm-coordinate {run.path}"], capture_output=True, text=True, check=True)
    for pid in found.stdout.split():
        os.kill(int(pid), signal.SIGKILL)
    wait_for_step(run, last_step(run) + 20, seconds=60)
    deadline = time.monotonic() + 180
    while not any(isinstance(event, WarningEvent) and "took over" in event.message for event in events(run)):
        assert time.monotonic() < deadline
        time.sleep(0.3)
    assert len([event for event in events(run) if isinstance(event, StartEvent)]) == 1, "no rank has noticed"
    nodes.power_off(ranks.nodes[1])
    wait_for_step(run, last_step(run) + 30)
    (found,) = (event for event in events(run) if isinstance(event, RecoveryEvent))
    assert found.ranks == (1,) and ranks.nodes[1] in found.cause and read_ranks(run.path).restart == 0
    danlu(nodes, tmp_path, "stop", "lost-nodes")
