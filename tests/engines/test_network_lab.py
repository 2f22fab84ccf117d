"""A cluster's network on this machine: its rates, its counters, and a run on it that loses a host."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from certificates import make_certificates

from danlu.scheduler.network_lab import (
    LabError,
    LabLevel,
    NetworkLab,
    find_lab,
    lab_down,
    lab_up,
    levels_of,
    sent_bytes,
    why_no_lab,
)
from danlu.spec import RecoveryEvent, RunFolder, StepEvent, WarningEvent, load_cluster

NAME = f"test{os.getpid()}"
MEGABYTE = 1_000_000
RECEIVE = """
import socket
connection, _ = socket.create_server(("", 7000)).accept()
while connection.recv(1 << 16):
    pass
"""
SEND = """
import socket, sys, time
for _ in range(100):
    try:
        s = socket.create_connection((sys.argv[1], 7000)); break
    except OSError:
        time.sleep(0.1)
began = time.perf_counter()
s.sendall(bytes(int(sys.argv[2])))
s.shutdown(socket.SHUT_WR)
s.recv(1)
print(time.perf_counter() - began)
"""
CLUSTER = """
name = "two supernodes"
[chip]
name = "cpu"
kind = "cpu"
memory = "4 GB"
memory_bandwidth = "10 GB/s"
[chip.peak]
fp32 = "50 GFLOP/s"
[[levels]]
name = "node"
fanout = 2
bandwidth = "1 GB/s"
latency = "10 us"
[[levels]]
name = "supernode"
fanout = 2
bandwidth = "100 MB/s"
latency = "20 us"
[[levels]]
name = "trunk"
fanout = 2
bandwidth = "100 MB/s"
latency = "50 us"
oversubscription = 4
"""
RECIPE = """
name = "rehearsed"
steps = 2000
[model]
base = "tiny-llama"
vocabulary = 264
[data]
shards = "shards"
source = ["text.txt"]
[batch]
sequences = 8
length = 32
[resilience]
peers = 5
[resilience.tls]
certificate = "{tls.certificate}"
key = "{tls.key}"
authority = "{tls.authority}"
"""


@pytest.fixture
def lab() -> Iterator[NetworkLab]:
    if reason := why_no_lab():
        pytest.skip(reason)
    levels = [LabLevel("supernode", 2, 40 * MEGABYTE), LabLevel("pod", 2, 20 * MEGABYTE), LabLevel("trunk", 2, 5e6)]
    yield lab_up(NAME, levels)
    lab_down(NAME)


def seconds_to_send(lab: NetworkLab, source: int, target: int, size: int) -> float:
    receiver = subprocess.Popen([*lab.hosts[target].enter, sys.executable, "-c", RECEIVE], stdout=subprocess.PIPE)
    sender = [*lab.hosts[source].enter, sys.executable, "-c", SEND, lab.hosts[target].address, str(size)]
    sent = subprocess.run(sender, capture_output=True, text=True, timeout=180, check=True)
    receiver.communicate(timeout=10)
    return float(sent.stdout)


def test_every_level_has_its_rate_and_counts_what_passes(lab: NetworkLab) -> None:
    assert len(lab.hosts) == 8 and find_lab(NAME) == lab
    for target, rate, size in ((1, 40, 20), (2, 20, 10), (7, 5, 4)):
        before = sent_bytes(*lab.port("trunk", 0))
        seconds = seconds_to_send(lab, 0, target, size * MEGABYTE)
        assert 0.9 * size / rate < seconds < 1.6 * size / rate, f"{size} MB to host {target} took {seconds:.2f} s"
        passed = sent_bytes(*lab.port("trunk", 0)) - before
        assert (passed > size * MEGABYTE) == (target == 7), f"{passed} bytes passed the trunk"
    with pytest.raises(LabError, match="is up already"):
        lab_up(NAME, lab.levels)


def test_levels_are_those_of_the_cluster(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    inner, trunk = levels_of(load_cluster(str(tmp_path / "cluster.toml")), slower=10)
    assert (inner.name, inner.fanout, inner.rate) == ("supernode", 2, pytest.approx(2 * 100e6 / 10))
    assert (trunk.name, trunk.fanout, trunk.rate) == ("trunk", 2, pytest.approx(4 * 100e6 / 4 / 10))
    assert inner.delay == pytest.approx(10 * 10e-6) and trunk.delay == pytest.approx(10 * 15e-6)


def test_what_cannot_be_made_is_refused_in_words() -> None:
    with pytest.raises(LabError, match="2 to 200 hosts, but this cluster has 96000"):
        lab_up(NAME, levels_of(load_cluster("sunway")))
    with pytest.raises(LabError, match="the name of a lab"):
        lab_up("../x", [LabLevel("a", 2, 1e6)])
    with pytest.raises(LabError, match="there is no lab"):
        find_lab("never-made")


def danlu(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "danlu", *arguments]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def done(process: subprocess.Popen[str], seconds: float = 400) -> str:
    output, _ = process.communicate(timeout=seconds)
    assert process.returncode == 0, output
    return output


def steps_done(run: RunFolder) -> int:
    events = run.read_events() if run.events.exists() else ()
    return max((event.step for event in events if isinstance(event, StepEvent)), default=0)


def wait_for_step(run: RunFolder, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 600
    while steps_done(run) < step:
        logs = "".join(f"\n--- {log.name}\n{log.read_text()[-1500:]}" for log in sorted(run.logs.glob("*.log")))
        assert process.poll() is None and time.monotonic() < deadline, f"step {steps_done(run)}{logs}"
        time.sleep(0.3)


def test_the_traffic_of_steps_is_what_passes_the_switches(tmp_path: Path) -> None:
    if reason := why_no_lab():
        pytest.skip(reason)
    (tmp_path / "cluster.toml").write_text(CLUSTER.replace("fanout = 2", "fanout = 1", 1))
    recipe = RECIPE[: RECIPE.index("[resilience]")].replace("steps = 2000", "steps = 12")
    (tmp_path / "recipe.toml").write_text(recipe + "[checkpoint]\nevery = 100\n")
    (tmp_path / "plan.toml").write_text("[degrees]\nreplicate = 2\nshard = 2\n")
    (tmp_path / "text.txt").write_text("The furnace melts copper and tin. " * 3000)
    done(danlu(tmp_path, "lab", "up", "cluster.toml", "--name", NAME))
    try:
        lab = find_lab(NAME)
        ports = [lab.port("trunk", 0), lab.port("trunk", 1)]
        before = [sent_bytes(*port) for port in ports]
        done(danlu(tmp_path, "lab", "train", "recipe.toml", "--plan", "plan.toml", "--lab", NAME), 120)
        passed = sum(sent_bytes(*port) for port in ports) - sum(before)
    finally:
        done(danlu(tmp_path, "lab", "down", NAME))
    run = RunFolder(tmp_path / "runs" / "rehearsed")
    steps = [event.traffic for event in run.read_events() if isinstance(event, StepEvent)]
    counted = sum(each["trunk"] for each in steps if each)
    assert len(steps) == 12 and steps[0] is not None and steps[0]["node"] == 0
    assert 0.9 * passed < counted < passed, "the rest are headers, and what is no collective"


@pytest.mark.full
def test_a_run_on_a_lab_outlives_a_host_that_is_switched_off(tmp_path: Path) -> None:
    if reason := why_no_lab():
        pytest.skip(reason)
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    (tmp_path / "recipe.toml").write_text(RECIPE.format(tls=make_certificates(tmp_path / "tls")))
    (tmp_path / "text.txt").write_text("The furnace melts copper and tin. " * 3000)
    made = json.loads(done(danlu(tmp_path, "lab", "up", "cluster.toml", "--name", NAME, "--json")))
    try:
        run = RunFolder(tmp_path / "runs" / "rehearsed")
        options = ["--lab", NAME, "--nodes", "2", "--ranks-per-node", "1", "--spares", "1"]
        training = danlu(tmp_path, "lab", "train", "recipe.toml", *options)
        wait_for_step(run, 20, training)
        lost = made["hosts"][1]["name"]
        agents = subprocess.run(["pgrep", "-f", f"hostname {lost} .*{run.path}"], capture_output=True, text=True)
        for pid in agents.stdout.split():
            os.killpg(os.getpgid(int(pid)), signal.SIGKILL)
        wait_for_step(run, steps_done(run) + 30, training)
        (found,) = (event for event in run.read_events() if isinstance(event, RecoveryEvent))
        assert found.ranks == (1,) and lost in found.cause and found.source == "memory"
        coordinator = subprocess.run(
            ["pgrep", "-f", f"danlu slurm-coordinate {run.path}"], capture_output=True, text=True
        )
        os.kill(max(map(int, coordinator.stdout.split())), signal.SIGKILL)
        deadline = time.monotonic() + 180
        while not any(isinstance(event, WarningEvent) and "took over" in event.message for event in run.read_events()):
            assert time.monotonic() < deadline
            time.sleep(0.3)
        wait_for_step(run, steps_done(run) + 10, training)
        assert "stopped" in done(danlu(tmp_path, "stop", "rehearsed"))
        training.communicate(timeout=180)
        assert training.returncode == 3, "stopped before its last step"
        again = danlu(tmp_path, "lab", "train", "recipe.toml", *options, "--name", "killed")
        wait_for_step(RunFolder(tmp_path / "runs" / "killed"), 2, again)
        again.kill()
        again.communicate()
        time.sleep(1.0)
        left = subprocess.run(["pgrep", "-f", str(tmp_path / "runs" / "killed")], capture_output=True, text=True)
        assert not left.stdout, "who is killed takes its ranks along"
    finally:
        assert "namespaces removed" in done(danlu(tmp_path, "lab", "down", NAME))


@pytest.mark.full
def test_collectives_are_tuned_on_the_hosts_of_a_lab(tmp_path: Path) -> None:
    """Two ranks a host, which share its memory; a rank that fails ends all of them, and its host is named."""
    if reason := why_no_lab():
        pytest.skip(reason)
    first, second = CLUSTER.index('[[levels]]\nname = "supernode"'), CLUSTER.index('[[levels]]\nname = "trunk"')
    (tmp_path / "cluster.toml").write_text(CLUSTER[:first] + CLUSTER[second:])
    done(danlu(tmp_path, "lab", "up", "cluster.toml", "--name", NAME))
    try:
        tuned = done(danlu(tmp_path, "lab", "tune", "--lab", NAME, "--quick", "-o", "tuned.toml"), 240)
        assert "written to tuned.toml" in tuned and "memory" in tuned, "ranks of one host share its memory"
        rows = json.loads(done(danlu(tmp_path, "comm", "show", "tuned.toml", "--json")))
        assert {(row["level"], row["ranks"]) for row in rows} == {("node", 2), ("trunk", 2), ("trunk", 4)}
        refused = danlu(tmp_path, "lab", "tune", "--lab", NAME, "--ranks-per-node", "3")
        output, _ = refused.communicate(timeout=180)
        assert refused.returncode == 2 and "must be at most the 4 chips" in output and f"host {NAME}-" in output
    finally:
        done(danlu(tmp_path, "lab", "down", NAME))
