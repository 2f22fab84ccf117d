"""`danlu launch --on slurm` against a real slurmctld and four slurmd."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from slurm_lab import NODES, SWITCHES, SlurmLab

from danlu.scheduler import JobStatus, SlurmJob, expand_hostlist, read_ranks, render_sbatch
from danlu.scheduler import slurm as commands
from danlu.spec import EndEvent, ResumeEvent, RunFolder, StartEvent, StepEvent

TELL = """\
import json, os, sys
from pathlib import Path
from danlu.scheduler.slurm_task import resolve_task, wait_for_ranks_file
run = Path(sys.argv[1])
task = resolve_task(wait_for_ranks_file(run, os.environ), os.environ)
(run / f"task-{task.rank}.json").write_text(task.model_dump_json())
"""
"""Runs instead of the worker: records the rank of the task."""


@pytest.fixture
def cluster(slurm: SlurmLab, monkeypatch: pytest.MonkeyPatch) -> SlurmLab:
    """The lab, with this process in the place of a user who is logged in on it."""
    source = Path(__file__).parents[2] / "src"
    environment = {**slurm.environment, "PYTHONPATH": f"{source}:{os.environ.get('PYTHONPATH', '')}"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return slurm


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder whose path a careless script would split or expand."""
    folder = tmp_path / "all runs" / "100% mine"
    (folder / "logs").mkdir(parents=True)
    return folder


def finished(job: int, seconds: float = 600) -> JobStatus:
    deadline = time.monotonic() + seconds
    while not (status := commands.get_job_status(job)).is_finished:
        assert time.monotonic() < deadline, status
        time.sleep(0.3)
    return status


def telling_script(run: Path, nodes: int, tasks: int, extra: tuple[str, ...] = ()) -> Path:
    """The real script of a launch, but for what a task does once it knows its rank."""
    job = SlurmJob(
        name=run.name,
        workdir=str(run.parent),
        run_folder=str(run),
        python=sys.executable,
        nodes=nodes,
        tasks_per_node=tasks,
        extra_options=extra,
    )
    (run / "tell.py").write_text(TELL)
    text = render_sbatch(job)
    assert text.count("-m danlu slurm-task") == 1
    (run / "job.sbatch").write_text(text.replace("-m danlu slurm-task", f"{str(run)!r}/tell.py"))
    return run / "job.sbatch"


def told(run: Path) -> list[dict[str, object]]:
    tasks = [json.loads(file.read_text()) for file in run.glob("task-*.json")]
    return sorted(tasks, key=lambda task: task["rank"])


def logs(run: Path) -> str:
    return "\n".join(f"--- {file.name}\n{file.read_text()}" for file in sorted((run / "logs").iterdir()))


def test_ranks_follow_the_topology(cluster: SlurmLab, run: Path) -> None:
    job = commands.submit_script(telling_script(run, nodes=4, tasks=2))
    assert finished(job).state == "COMPLETED", logs(run)
    tasks = told(run)
    assert [task["rank"] for task in tasks] == list(range(8))
    nodes = [str(task["node"]) for task in tasks[::2]]
    assert sorted(nodes) == list(NODES) and nodes != sorted(nodes)
    assert {tuple(nodes[:2]), tuple(nodes[2:])} == set(SWITCHES.values()), nodes
    assert [task["local_rank"] for task in tasks] == [0, 1] * 4
    ranks = read_ranks(run)
    assert (ranks.job, ranks.restart, list(ranks.nodes)) == (job, 0, nodes)
    assert ranks.store.startswith("127.0.0.1:")
    assert "follow the topology; leaf switches: 2" in logs(run)


def test_a_task_knows_the_processors_it_was_given(cluster: SlurmLab, run: Path) -> None:
    job = commands.submit_script(telling_script(run, nodes=2, tasks=2, extra=("--cpus-per-task=3",)))
    assert finished(job).state == "COMPLETED", logs(run)
    assert [task["threads"] for task in told(run)] == [3] * 4


def test_a_requeued_job_writes_its_ranks_anew(cluster: SlurmLab, run: Path) -> None:
    script = telling_script(run, nodes=2, tasks=1)
    (run / "tell.py").write_text(
        TELL + "import time\ntime.sleep(60 * (os.environ.get('SLURM_RESTART_COUNT') is None))\n"
    )
    job = commands.submit_script(script)
    deadline = time.monotonic() + 180
    while len(told(run)) < 2:
        assert time.monotonic() < deadline, logs(run)
        time.sleep(0.3)
    first = read_ranks(run)
    cluster.run("scontrol", "requeue", str(job))
    status = finished(job)
    assert (status.state, status.restarts) == ("COMPLETED", 1), logs(run)
    again = read_ranks(run)
    assert (first.restart, again.restart, again.job) == (0, 1, job)


def test_our_host_lists_are_slurms(cluster: SlurmLab) -> None:
    for hostlist in ("n[0-3,7],x01", "rack[08-11]", "a,b[1,3-4]", "r[0-1]n[1-2]"):
        assert list(expand_hostlist(hostlist)) == cluster.run("scontrol", "show", "hostnames", hostlist).split()


def test_a_job_can_be_cancelled(cluster: SlurmLab, run: Path) -> None:
    script = telling_script(run, nodes=1, tasks=1)
    (run / "tell.py").write_text(TELL + "import time\ntime.sleep(60)\n")
    job = commands.submit_script(script)
    commands.cancel_job(job)
    status = finished(job)
    assert status.state == "CANCELLED"
    assert status.shell_exit_code != 0


RECIPE = """\
name = "tiny"
steps = 5
model = { base = "tiny-llama", vocabulary = 264 }
data = { shards = "shards", source = ["text.txt"], tokenizer = "bytes" }
batch = { sequences = 8, length = 64 }
"""


@pytest.fixture
def desk(cluster: SlurmLab, tmp_path: Path) -> Path:
    """The folder of a user with a recipe and a text to train on."""
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "text.txt").write_text("".join(f"{n} times {n} is {n * n}, and not {n + n}.\n" for n in range(2000)))
    return tmp_path


def danlu(*arguments: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "danlu", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900)


def losses(run: RunFolder) -> list[float]:
    return [event.loss for event in run.read_events() if isinstance(event, StepEvent)]


def test_two_nodes_train_as_one_machine_does(desk: Path) -> None:
    launched = danlu(
        *("launch", "recipe.toml", "--on", "slurm", "--nodes", "2", "--ranks-per-node", "2"),
        *("--name", "queued", "--wait"),
        folder=desk,
    )
    queued = RunFolder(desk / "runs" / "queued")
    assert launched.returncode == 0, launched.stdout + launched.stderr + logs(queued.path)
    local = danlu("train", "recipe.toml", "--nproc", "4", "--name", "local", folder=desk)
    assert local.returncode == 0, local.stdout + local.stderr
    events = list(queued.read_events())
    assert isinstance(events[0], StartEvent) and events[0].world == 4
    assert [event.step for event in events if isinstance(event, StepEvent)] == [1, 2, 3, 4, 5]
    assert isinstance(events[-1], EndEvent) and events[-1].outcome == "finished"
    assert losses(queued) == pytest.approx(losses(RunFolder(desk / "runs" / "local")), abs=1e-5)
    assert {f"rank-{rank}.log" for rank in range(4)} <= {file.name for file in queued.logs.iterdir()}


def submitted(answer: "subprocess.CompletedProcess[str]") -> int:
    assert answer.returncode == 0, answer.stderr
    return int(answer.stdout.splitlines()[-2].removeprefix("job ").partition(":")[0])


@pytest.mark.full
def test_a_requeued_run_goes_on_from_its_checkpoint(desk: Path, cluster: SlurmLab) -> None:
    (desk / "recipe.toml").write_text(RECIPE.replace("steps = 5", "steps = 25") + "checkpoint = { every = 1 }\n")
    job = submitted(danlu("launch", "recipe.toml", "--on", "slurm", "--nodes", "2", folder=desk))
    run = RunFolder(desk / "runs" / "tiny")
    deadline = time.monotonic() + 600
    while len(losses(run)) < 3:
        assert time.monotonic() < deadline, logs(run.path)
        time.sleep(0.1)
    cluster.run("scontrol", "requeue", str(job))
    status = finished(job)
    assert (status.state, status.restarts) == ("COMPLETED", 1), logs(run.path)
    events = list(run.read_events())
    first, second = (event for event in events if isinstance(event, StartEvent))
    assert first.step == 0 and 3 <= second.step < 25
    again = events[events.index(second) :]
    assert [event.step for event in again if isinstance(event, StepEvent)] == list(range(second.step + 1, 26))
    assert isinstance(events[-1], EndEvent) and events[-1].outcome == "finished"
    assert read_ranks(run.path).restart == 1


@pytest.mark.full
def test_a_run_of_this_machine_goes_on_on_two_nodes(desk: Path, cluster: SlurmLab) -> None:
    assert danlu("train", "recipe.toml", "--nproc", "1", "--name", "moved", folder=desk).returncode == 0
    run = RunFolder(desk / "runs" / "moved")
    run.recipe.write_text(run.recipe.read_text().replace("steps = 5\n", "steps = 8\n", 1))
    refused = danlu("resume", "moved", "--partition", "x", folder=desk)
    assert refused.returncode == 2 and "--nodes" in refused.stderr
    resumed = danlu("resume", "moved", "--nodes", "2", "--wait", folder=desk)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr + logs(run.path)
    events = list(run.read_events())
    (proof,) = (event for event in events if isinstance(event, ResumeEvent))
    assert (proof.was, proof.now, proof.repeated, proof.skipped) == ({}, {"shard": 2}, 0, 0)
    assert [event.step for event in events if isinstance(event, StepEvent)] == list(range(1, 9))


def test_a_job_holds_its_runs_lock_and_is_stopped_with_a_checkpoint(desk: Path, cluster: SlurmLab) -> None:
    (desk / "recipe.toml").write_text(RECIPE.replace("steps = 5", "steps = 100000"))
    job = submitted(danlu("launch", "recipe.toml", "--on", "slurm", "--nodes", "2", folder=desk))
    run = RunFolder(desk / "runs" / "tiny")
    deadline = time.monotonic() + 600
    while len(losses(run)) < 3:
        assert time.monotonic() < deadline, logs(run.path)
        time.sleep(0.1)
    refused = danlu("train", "--resume", "tiny", "--nproc", "1", folder=desk)
    assert refused.returncode == 2 and f"tiny is running: job {job}, pid " in refused.stderr, refused.stderr
    stopped = danlu("stop", "tiny", folder=desk)
    assert stopped.returncode == 0 and "tiny stopped at step" in stopped.stdout, stopped.stderr + logs(run.path)
    status = finished(job)
    assert (status.state, status.shell_exit_code) == ("FAILED", 3), logs(run.path)
    *_, end = run.read_events()
    assert isinstance(end, EndEvent) and end.outcome == "stopped"
    assert (run.checkpoints / f"step-{end.step:08d}").is_dir()


def test_a_job_that_has_not_begun_is_stopped_too(desk: Path, cluster: SlurmLab) -> None:
    job = submitted(danlu("launch", "recipe.toml", "--on", "slurm", "--nodes", "2", "--sbatch=--hold", folder=desk))
    stopped = danlu("stop", "tiny", folder=desk)
    assert stopped.returncode == 0 and f"job {job} of tiny had not started" in stopped.stdout, stopped.stderr
    assert finished(job).state == "CANCELLED"
    assert "is not running" in danlu("stop", "tiny", folder=desk).stderr


def test_a_run_whose_ranks_fail_is_recorded_as_failed(desk: Path, cluster: SlurmLab) -> None:
    job = submitted(danlu("launch", "recipe.toml", "--on", "slurm", "--nodes", "2", "--sbatch=--hold", folder=desk))
    shutil.rmtree(desk / "shards")
    cluster.run("scontrol", "release", str(job))
    status = finished(job)
    run = RunFolder(desk / "runs" / "tiny")
    assert status.state == "FAILED" and status.shell_exit_code != 0, logs(run.path)
    *_, end = run.read_events()
    assert isinstance(end, EndEvent) and end.outcome == "failed" and f"job {job} failed" in end.message
    assert "shards" in (run.logs / "rank-0.log").read_text() + (run.logs / "rank-1.log").read_text()


def test_slurms_own_words_reach_the_user(desk: Path) -> None:
    refused = danlu("launch", "recipe.toml", "--on", "slurm", "--nodes", "2", "--partition", "nowhere", folder=desk)
    assert refused.returncode == 2
    assert "invalid partition specified: nowhere" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not (desk / "runs" / "tiny").exists()


def test_a_dry_run_submits_and_writes_nothing(desk: Path, cluster: SlurmLab) -> None:
    def seen() -> tuple[list[str], str]:
        jobs = cluster.run("squeue", "--noheader", "--states=all", "--format=%i")
        return sorted(path.name for path in desk.iterdir()), jobs

    before = seen()
    shown = danlu("launch", "recipe.toml", "--on", "slurm", "--nodes", "2", "--dry-run", folder=desk)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("#!/bin/bash\n#SBATCH --job-name=tiny\n")
    assert seen() == before
