"""Who runs a run: one holder at a time, named, gone with its last process; and what `stop` and `rm` do about it."""

import os
import pwd
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from made_runs import make_run
from typer.testing import CliRunner, Result

from danlu.cli import rm as rm_command
from danlu.cli.app import app
from danlu.comm.flight_record import flight_folder, make_flight_folder
from danlu.spec import EndEvent, Plan, RunFolder, toml
from danlu.storage import run_lock
from danlu.storage.run_lock import LockHolder, RunError, acquire, read_holder

HOLD = """
import subprocess, sys, time
from pathlib import Path
from danlu.spec import RunFolder
from danlu.storage import run_lock
lock = run_lock.acquire(RunFolder(Path(sys.argv[1])))
{rank}
print("held", flush=True)
{then}
"""
RANK = """
code = "import time; time.sleep(120)"
print(subprocess.Popen([sys.executable, "-c", code], pass_fds=[lock.descriptor]).pid, flush=True)
"""
FOREVER = "time.sleep(120)"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    made = make_run(tmp_path / "runs" / "live")
    made.plan.write_text(toml.dumps(Plan()))
    return made


@contextmanager
def held(run: RunFolder, rank: str = "", then: str = FOREVER) -> Iterator["subprocess.Popen[str]"]:
    """Another process that holds the run's lock, as a launcher does."""
    code = HOLD.format(rank=rank, then=then)
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(run.path)], stdout=subprocess.PIPE, text=True, stdin=subprocess.PIPE
    )
    assert process.stdout is not None
    process.said = []  # type: ignore[attr-defined]
    while (line := process.stdout.readline().strip()) != "held":
        assert line, "it did not get the lock"
        process.said.append(line)  # type: ignore[attr-defined]
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def until(condition: Callable[[], object], seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def danlu(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_the_holder_is_named_and_a_second_one_refused_in_one_line(run: RunFolder) -> None:
    assert read_holder(run) is None
    with held(run) as launcher:
        found = read_holder(run)
        assert found is not None
        user = pwd.getpwuid(os.geteuid()).pw_name
        assert (found.pid, found.host, found.user) == (launcher.pid, socket.gethostname(), user)
        assert abs(found.since - time.time()) < 60 and found.is_alive
        with pytest.raises(RunError) as refused:
            acquire(run)
    words = str(refused.value)
    assert "\n" not in words
    assert f"pid {launcher.pid} on {socket.gethostname()}, started by {user}" in words and "danlu stop live" in words


def test_it_is_free_when_its_holder_is_killed(run: RunFolder) -> None:
    with held(run) as launcher:
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
        assert read_holder(run) is None
        acquire(run).release()


def test_a_rank_that_inherited_it_holds_it_after_its_launcher_was_killed(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "_EXIT_SECONDS", 0.2)
    with held(run, rank=RANK) as launcher:
        rank = int(launcher.said[0])  # type: ignore[attr-defined]
        process = os.pidfd_open(rank)
        os.kill(launcher.pid, signal.SIGKILL)
        launcher.wait()
        try:
            with pytest.raises(RunError, match=r"its launcher \(pid \d+\) is gone and its ranks are exiting"):
                acquire(run)
        finally:
            signal.pidfd_send_signal(process, signal.SIGKILL)
            os.close(process)
    until(lambda: read_holder(run) is None)


def test_whoever_comes_next_waits_for_the_ranks_of_a_killed_launcher(run: RunFolder) -> None:
    with held(run, rank=RANK) as launcher:
        process = os.pidfd_open(int(launcher.said[0]))  # type: ignore[attr-defined]
        os.kill(launcher.pid, signal.SIGKILL)
        launcher.wait()
        late = threading.Timer(0.5, signal.pidfd_send_signal, (process, signal.SIGKILL))
        late.start()
        acquire(run).release()
        late.join()
        os.close(process)


def test_to_ask_for_the_holder_takes_nothing_and_needs_no_right_to_write(run: RunFolder) -> None:
    with acquire(run):
        (run.path / ".lock").chmod(0o444)
        assert read_holder(run) is not None
    before = (run.path / ".lock").stat()
    assert read_holder(run) is None
    assert (run.path / ".lock").stat().st_mtime_ns == before.st_mtime_ns
    (run.path / ".lock").unlink()
    assert read_holder(run) is None
    assert not (run.path / ".lock").exists()


def test_one_that_is_about_to_go_is_waited_for(run: RunFolder) -> None:
    with held(run, then="time.sleep(0.5)"):
        acquire(run, wait=30.0).release()


def test_a_name_that_would_command_a_terminal_or_is_none_is_not_shown(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "_HOLDER_WRITE_TIMEOUT", 0.05)
    lock = acquire(run)
    for text in ('{"pid":1,"host":"\\u001b[2J","user":"x","since":0.0}', "", "{}", "[" * 4000):
        (run.path / ".lock").write_text(text)
        assert read_holder(run) is run_lock.UNKNOWN_HOLDER
    lock.release()


def test_a_number_that_is_used_again_is_not_taken_for_the_holder(run: RunFolder) -> None:
    with acquire(run):
        found = read_holder(run)
    assert found is not None and found.is_alive
    assert not found.model_copy(update={"started": found.started - 1}).is_alive
    assert not found.model_copy(update={"host": "elsewhere"}).is_alive


# --- stop


def stopping(then: str) -> str:
    return (
        "import signal\nfrom danlu.spec import EndEvent\nasked = []\n"
        "for number in (signal.SIGTERM, signal.SIGINT): signal.signal(number, lambda n, _: asked.append(n))\n"
        'print("held", flush=True)\n'
        f"deadline = time.monotonic() + 10\nwhile {then} and time.monotonic() < deadline: time.sleep(0.02)\n"
        "with (Path(sys.argv[1]) / 'events.jsonl').open('a') as events:\n"
        "    ended = EndEvent(time=time.time(), step=7, outcome='stopped', message=' '.join(map(str, asked)))\n"
        "    events.write(ended.model_dump_json() + '\\n')\n"
    )


@pytest.mark.parametrize(("options", "wanted"), [([], {signal.SIGTERM}), (["--now"], {signal.SIGTERM, signal.SIGINT})])
def test_stop_asks_the_holder_and_waits_until_it_is_gone(run: RunFolder, options: list[str], wanted: set[int]) -> None:
    with held(run, rank="", then=stopping(f"len(asked) < {len(wanted)}")) as launcher:
        assert launcher.stdout and launcher.stdout.readline() == "held\n", "its handlers are there"
        result = danlu("stop", "live", "--runs-dir", str(run.path.parent), *options)
    assert result.exit_code == 0, result.output
    *_, end = run.read_events()
    assert isinstance(end, EndEvent) and {int(number) for number in end.message.split()} == wanted
    assert "live stopped at step" in result.output


def failure(result: Result) -> str:
    assert isinstance(result.exception, RunError), result.output
    return str(result.exception)


def test_stop_says_where_to_stop_a_run_of_another_host_and_touches_nothing_here(run: RunFolder) -> None:
    with held(run) as launcher:
        found = read_holder(run)
        assert found is not None
        (run.path / ".lock").write_text(found.model_copy(update={"host": "node7"}).model_dump_json())
        words = failure(danlu("stop", str(run.path)))
        assert launcher.poll() is None
    assert "pid" in words and "on node7" in words and f"danlu stop {run.path}" in words


def test_stop_never_signals_a_stranger_with_the_holders_number(run: RunFolder) -> None:
    with held(run, then="time.sleep(1)"):
        found = read_holder(run)
        assert found is not None
        stranger = subprocess.Popen([sys.executable, "-c", FOREVER.replace("time", "import time; time", 1)])
        name = found.model_copy(update={"pid": stranger.pid})
        (run.path / ".lock").write_text(name.model_dump_json())
        danlu("stop", str(run.path))
        assert stranger.poll() is None
        stranger.kill()
        stranger.wait()


def test_stop_of_a_run_that_is_not_running_says_so(run: RunFolder) -> None:
    assert "is not running" in failure(danlu("stop", str(run.path)))


# --- rm


def test_rm_refuses_a_running_run_and_asks_before_it_removes_one(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed: list[RunFolder] = []
    monkeypatch.setattr(rm_command, "free_run_memory", lambda found: freed.append(found) or 3 << 20)
    (run.checkpoints / "step-00000004").mkdir(parents=True)
    run.samples.mkdir()
    make_flight_folder(run.path)
    records = flight_folder(run.path)
    with held(run):
        assert "is running" in failure(danlu("rm", str(run.path), "--yes"))
    asked = CliRunner().invoke(app, ["rm", str(run.path)], input="n\n")
    assert asked.exit_code == 1 and "1 checkpoints" in asked.output
    assert run.recipe.exists() and not freed
    removed = danlu("rm", str(run.path), "--yes")
    assert removed.exit_code == 0, removed.output
    assert "live is removed and 3.1 MB of shared memory" in removed.output
    assert not run.path.exists() and freed == [run]
    assert not records.exists()


def test_rm_removes_what_a_job_left(run: RunFolder) -> None:
    for name in (".store-token.7.0", ".ranks.json.7.0", ".coordinator.json", "ranks.json", "job.json", "job.sbatch"):
        (run.path / name).write_text("{}")
    (run.compiled_blocks / "mlp").mkdir(parents=True)
    removed = danlu("rm", str(run.path), "--yes")
    assert removed.exit_code == 0, removed.output
    assert not run.path.exists()


def test_rm_removes_no_folder_that_holds_anything_else(run: RunFolder) -> None:
    (run.path / "notes.txt").write_text("mine")
    assert "notes.txt" in failure(danlu("rm", str(run.path), "--yes"))
    (run.path / "notes.txt").unlink()
    run.plan.unlink()
    assert "is not the folder of a run" in failure(danlu("rm", str(run.path), "--yes"))
    assert run.recipe.exists()


def test_holders_survive_a_round_trip() -> None:
    name = LockHolder(pid=1, host="n0", user="a", since=0.5, started=3, job=4)
    assert LockHolder.model_validate_json(name.model_dump_json()) == name
    assert str(name).startswith("job 4, pid 1 on n0, started by a, since ")
