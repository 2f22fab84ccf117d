"""A run that is under way: who else starts it is refused, who kills its launcher ends it with what it has learned."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from test_train import RECIPE, danlu, losses, run

from danlu.spec import EndEvent, RunFolder
from danlu.storage.run_lock import read_holder


@pytest.fixture(scope="module")
def live(folder: Path) -> RunFolder:
    """The folder of a run that is about to begin."""
    (folder / "long.toml").write_text(RECIPE.format(steps=100_000))
    return RunFolder(folder / "runs" / "live")


def until_step(folder: Path, step: int) -> None:
    deadline = time.monotonic() + 360
    while len(losses(folder, "live")) < step:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def addresses(pids: list[int]) -> set[str]:
    """What these processes listen on."""
    lines = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout.splitlines()
    return {line.split()[3].rpartition(":")[0] for line in lines if any(f"pid={pid}," in line for pid in pids)}


def children(process: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def ranks_of(launcher: int) -> list[int]:
    """Children of the process that forks them, which is the launcher's."""
    (fork_server,) = children(launcher)
    return children(fork_server)


def test_a_second_start_is_refused_and_touches_nothing(folder: Path, live: RunFolder) -> None:
    process = danlu(folder, "train", "long.toml", "--nproc", "2", "--name", "live")
    until_step(folder, 5)
    ranks = ranks_of(process.pid)
    assert len(ranks) == 2
    assert addresses(ranks) == {"127.0.0.1"}
    before = {path: path.read_bytes() for path in (live.plan, live.recipe)}
    for command in (
        ["resume", "live", "--nproc", "1"],
        ["train", "--resume", "live", "--nproc", "1"],
        ["rm", "live", "--yes"],
    ):
        refused = run(folder, *command, code=2)
        assert refused.startswith(f"runs/live is running: pid {process.pid} on ") and refused.count("\n") == 1, refused
    assert {path: path.read_bytes() for path in before} == before
    assert not live.cluster.exists()
    assert not any(isinstance(event, EndEvent) for event in live.read_events())
    assert "running" in run(folder, "runs")
    kill_the_launcher(process, ranks, live)
    *_, end = live.read_events()
    assert isinstance(end, EndEvent) and end.outcome == "stopped"
    saved = max(int(path.name.removeprefix("step-")) for path in live.checkpoints.iterdir())
    assert saved == end.step, "what was learned up to the end is saved"


def kill_the_launcher(process: "subprocess.Popen[str]", ranks: list[int], live: RunFolder) -> None:
    """SIGKILL it, and see that its ranks are gone after a while and the run's lock with them."""
    handles = [os.pidfd_open(rank) for rank in ranks]
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 180
    try:
        while any(_is_alive(rank) for rank in ranks) or read_holder(live):
            assert time.monotonic() < deadline, "ranks outlive their launcher"
            time.sleep(0.05)
    finally:
        for handle, rank in zip(handles, ranks, strict=True):
            if _is_alive(rank):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.close(handle)
        assert process.stdout is not None
        process.stdout.close()


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.full
def test_a_run_is_stopped_from_another_terminal_and_its_command_does_not_succeed(folder: Path, live: RunFolder) -> None:
    done = len(losses(folder, "live"))
    process = danlu(folder, "resume", "live")
    until_step(folder, done + 2)
    assert "live stopped at step" in run(folder, "stop", "live")
    output = process.communicate(timeout=180)[0]
    assert process.returncode == 3, output
    assert "Traceback" not in output
    assert "live is removed" in run(folder, "rm", "live", "--yes")
    assert not live.path.exists()
