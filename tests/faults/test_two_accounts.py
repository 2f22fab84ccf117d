"""Two Unix accounts on one machine: neither can read, stop or join the other's run without being let in."""

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from other_accounts import Account, made_accounts
from torch.distributed import TCPStore

from danlu.spec import RunFolder, StepEvent
from danlu.storage.run_lock import read_holder

RECIPE = """
name = "secret"
steps = 100000
model = {{ base = "tiny-llama", vocabulary = 264 }}
data = {{ shards = "shards", source = ["text.txt"] }}
batch = {{ sequences = 4, length = 32 }}
checkpoint = {{ every = 3, near = "{near}" }}
"""


@pytest.fixture(scope="module")
def accounts() -> Iterator[list[Account]]:
    with made_accounts(2) as made:
        yield made


def steps(run: RunFolder) -> int:
    return sum(isinstance(event, StepEvent) for event in run.read_events())


def until_step(run: RunFolder, step: int, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 360
    while steps(run) < step:
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()[0]
        time.sleep(0.05)


def started(owner: Account, *options: str) -> "subprocess.Popen[str]":
    """A run of two ranks, as its owner starts it under the usual umask."""
    (owner.folder / "text.txt").write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(2000)))
    (owner.folder / "secret.toml").write_text(RECIPE.format(near=owner.folder / "near"))
    return subprocess.Popen(
        owner.command("-m", "danlu", "train", "secret.toml", "--nproc", "2", *options),
        cwd=owner.folder, env=owner.environment, umask=0o22,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def everything_of(run: RunFolder, owner: Account) -> list[Path]:
    """All files and folders that the run has made, wherever they are."""
    roots = [run.path, *(owner.folder / "near").iterdir(), Path(f"/dev/shm/danlu-{owner.number}")]
    roots += [path for path in Path("/tmp").glob("danlu-rendezvous-*") if path.stat().st_uid == owner.number]
    return [path for root in roots for path in (root, *root.rglob("*"))]


def ports_of(processes: list[int]) -> list[int]:
    lines = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [
        int(line.split()[3].rpartition(":")[2]) for line in lines if any(f"pid={each}," in line for each in processes)
    ]


@pytest.mark.full
def test_neither_can_read_stop_or_join_the_others_run(accounts: list[Account]) -> None:
    owner, stranger = accounts
    run = RunFolder(owner.folder / "runs" / "secret")
    process = started(owner)
    try:
        until_step(run, 7, process)
        launcher = read_holder(run)
        assert launcher is not None and launcher.user == owner.name
        (fork_server,) = _children(launcher.pid)
        ranks = _children(fork_server)
        assert len(ranks) == 2
        paths, ports = everything_of(run, owner), ports_of(ranks)
        kinds = {path.name.partition("-")[0] for path in paths}
        assert len(ports) >= 2 and {"events.jsonl", "rank", "store", "step", ".lock"} <= kinds, kinds
        question: dict[str, list[Any]] = {
            "paths": [str(path) for path in paths],
            "processes": [launcher.pid, fork_server, *ranks],
            "ports": ports,
        }
        # A store on a port, which anybody joins: that the stranger would have noticed one.
        control = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        question["ports"].append(control.port)
        (stranger.folder / "question.json").write_text(json.dumps(question))
        answer = subprocess.run(
            stranger.command(str(Path(__file__).with_name("stranger.py")), "question.json"),
            cwd=stranger.folder, env=stranger.environment, capture_output=True, text=True, timeout=360,
        )  # fmt: skip
        assert answer.returncode == 0, answer.stderr
        assert json.loads(answer.stdout.splitlines()[-1]) == [f"joined the store at port {control.port}"]
        before = steps(run)
        _refused(stranger, run, owner)
        until_step(run, before + 5, process)  # whatever was sent to its ports, it trains on
        assert "secret stopped at step" in owner.danlu("stop", "secret").stdout
        assert process.wait(60) == 3
    finally:
        if process.poll() is None:
            process.terminate()
        output = process.communicate(timeout=180)[0]
    assert "Traceback" not in output


TO_EVERY_PORT = r"""
declare -A seen
while sleep 0.01; do
    while read -r _ place _ state _ _ _ uid _; do
        [[ $state == 0A && $uid == UID_OF_OWNER && -z ${seen[$place]-} ]] || continue
        seen[$place]=1
        for number in 0 1 2 3 4 5 6 7; do
            exec {line}<>/dev/tcp/127.0.0.1/$((16#${place#*:})) && printf "\x$number\0\0\0\0\0\0\0" >&$line
        done
    done </proc/net/tcp
done
"""
"""Calls itself pair 0 to 7 at every port of an account, as soon as there is one."""


def test_who_connects_before_the_ranks_have_is_no_rank(accounts: list[Account]) -> None:
    owner, stranger = accounts
    drop = ["setpriv", f"--reuid={stranger.number}", f"--regid={stranger.number}", "--clear-groups"]
    intruder = subprocess.Popen([*drop, "bash", "-c", TO_EVERY_PORT.replace("UID_OF_OWNER", str(owner.number))])
    try:
        process = started(owner, "--name", "early")
        output = process.communicate(timeout=360)[0]
    finally:
        intruder.kill()
        intruder.wait()
    assert process.returncode == 1, output
    assert f"(uid {owner.number}), but some are of uid {stranger.number}" in output
    assert steps(RunFolder(owner.folder / "runs" / "early")) == 0


def _children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _refused(stranger: Account, run: RunFolder, owner: Account) -> None:
    for command in ("show", "stop", "resume", "rm"):
        answer = stranger.danlu(command, str(run.path))
        assert answer.returncode == 2 and f"is private to {owner.name}" in answer.stderr, answer.stderr
    listed = stranger.danlu("runs", "--runs-dir", str(run.path.parent))
    assert listed.returncode == 0 and "private to others: secret" in listed.stderr, listed.stderr


@pytest.mark.full  # of the run that the first one leaves
def test_who_is_let_in_reads_and_no_more(accounts: list[Account]) -> None:
    owner, guest = accounts
    run = RunFolder(owner.folder / "runs" / "secret")
    for path in (run.path, *run.path.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)  # what `access = "everyone"` makes
    assert "secret" in guest.danlu("show", str(run.path), "--no-open").stdout
    refused = guest.danlu("resume", str(run.path))
    assert refused.returncode == 2 and "cannot be written to: Permission denied" in refused.stderr
