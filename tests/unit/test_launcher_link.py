"""The line between a launcher and its ranks: what ranks do is heard, and no rank outlives its launcher."""

import os
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from danlu.comm.connection_check import UnauthorizedConnectionError, check_connections, unauthorized_uids
from danlu.comm.interfaces import interface_of
from danlu.comm.launcher_link import FIRST_STEP, LauncherLink, RankLinks, RegroupOrder
from danlu.comm.rendezvous import RankInfo, _listen, rendezvous
from danlu.scheduler import rank_failure
from danlu.scheduler.rank_failure import count_oom_kills, describe_failure, first_failure, log_tail
from danlu.scheduler.rendezvous_file import rendezvous_file
from danlu.spec import RankFailureEvent, RunFolder

LAUNCH = """
import os, subprocess, sys, time
from danlu.comm.launcher_link import RankLinks
links = RankLinks()
with links.open_link(0) as link:
    rank = subprocess.Popen([sys.executable, "-c", {rank!r}, str(link.fileno())], pass_fds=[link.fileno()])
while links.slowest_phase != "training":
    links.poll_events()
    time.sleep(0.01)
print(rank.pid, flush=True)
time.sleep(120)
"""
RANK = """
import signal, sys, time
from danlu.comm.launcher_link import LauncherLink
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
link = LauncherLink(int(sys.argv[1]))
link.listen(grace_period={grace_period})
link.report_phase("training")
while {stubborn} or not asked:
    time.sleep(0.01)
"""


@pytest.mark.parametrize(("stubborn", "grace_period"), [(False, 60.0), (True, 0.2)], ids=["stops", "is stuck"])
def test_a_rank_ends_when_its_launcher_is_killed(stubborn: bool, grace_period: float) -> None:
    code = LAUNCH.format(rank=RANK.format(grace_period=grace_period, stubborn=stubborn))
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    rank = os.pidfd_open(int(launcher.stdout.readline()))
    try:
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
        assert gone(rank, seconds=20.0)
    finally:
        if not gone(rank, 0.0):
            signal.pidfd_send_signal(rank, signal.SIGKILL)
        os.close(rank)
        launcher.stdout.close()


def gone(process: int, seconds: float) -> bool:
    """Whether a process ends in time: its descriptor can be read then."""
    return bool(select.select([process], [], [], seconds)[0])


def test_a_launcher_that_was_gone_before_is_noticed_too() -> None:
    links = RankLinks()
    with links.open_link(0) as link:
        links.close()
        rank = subprocess.Popen(
            [sys.executable, "-c", RANK.format(grace_period=60.0, stubborn=False), str(link.fileno())],
            pass_fds=[link.fileno()],
        )
    assert rank.wait(20) in (0, -signal.SIGTERM)


def test_the_phase_is_that_of_the_slowest_rank() -> None:
    links = RankLinks()
    ranks = [LauncherLink(links.open_link(rank).detach()) for rank in range(3)]
    assert links.slowest_phase == "starting the processes"
    for rank in ranks:
        rank.report_phase("importing torch")
    assert links.poll_events() == [] and links.slowest_phase == "importing torch"
    ranks[0].report_phase("building the model")
    ranks[1].report_phase("building the model")
    links.poll_events()
    assert links.slowest_phase == "importing torch (1 of 3 ranks)"
    ranks[2].report_phase("building the model")
    ranks[0].report_event('{"kind": "x"}')
    assert links.poll_events() == ['{"kind": "x"}'] and links.slowest_phase == "building the model"
    for each in (links, *ranks):
        each.close()


def test_a_launcher_that_dies_without_having_read_is_noticed_too() -> None:
    """The kernel then resets the connection, where one that was read to its end is closed."""
    links = RankLinks()
    with links.open_link(0) as link:
        rank = subprocess.Popen(
            [sys.executable, "-c", RANK.format(grace_period=60.0, stubborn=False), str(link.fileno())],
            pass_fds=[link.fileno()],
        )
    assert select.select([links._sockets[0]], [], [], 20)[0], "it has sent its phase"
    links.close()
    assert rank.wait(20) in (0, -signal.SIGTERM)


def test_a_rank_that_evaluates_still_trains() -> None:
    links = RankLinks()
    rank = LauncherLink(links.open_link(0).detach())
    for phase, trains in (("building the model", False), (FIRST_STEP, True), ("evaluating on web", True), ("", True)):
        rank.report_phase(phase)
        links.poll_events()
        assert (links.phase_of(0), links.trains(0)) == (phase, trains)
    links.forget_phases()
    assert not links.trains(0), "it starts again"
    for each in (links, rank):
        each.close()


def test_an_order_for_all_ranks_of_a_large_world_fits_a_message() -> None:
    order = RegroupOrder(3, "here:1", tuple(range(100_000)), "a host is lost", 1.0, True, quarantined=(7,))
    assert len(order.to_json()) < 1000
    assert RegroupOrder.from_json(order.to_json()) == order
    some = replace(order, ranks=(0, 1, 5, 7, 8, 9))
    assert RegroupOrder.from_json(some.to_json()) == some


def test_a_launcher_that_does_not_listen_never_holds_up_a_rank() -> None:
    links = RankLinks()
    rank = LauncherLink(links.open_link(0).detach())
    started = time.monotonic()
    for _ in range(3000):
        rank.report_event("x" * 1000)
    assert time.monotonic() - started < 5
    links.close()
    rank.report_phase("after its end")
    rank.close()
    LauncherLink(None).report_phase("without any")


# --- where ranks meet


def listening() -> set[str]:
    """Addresses that this process listens on, as the kernel sees them."""
    answer = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout
    return {line.split()[3].rpartition(":")[0] for line in answer.splitlines() if f"pid={os.getpid()}," in line}


def test_the_store_listens_on_the_address_that_was_named_and_no_other() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    one, two = (RankInfo(rank=rank, world_size=2, endpoint=f"127.0.0.1:{port}", token=bytes(32)) for rank in (0, 1))
    store = rendezvous(one)
    assert listening() == {"127.0.0.1"}
    store.set("a", "b")
    assert rendezvous(two).get("a") == b"b"
    with pytest.raises(ValueError, match="needs a token"):
        rendezvous(replace(two, token=b""))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)


def test_a_name_that_leads_to_loopback_alone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def table(host: str, port: int, **_: object) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", table)
    with pytest.warns(RuntimeWarning, match=r"node7 is 127\.0\.1\.1 on this host, which no other host reaches"):
        _listen("node7", 0).close()


def test_ranks_of_one_host_meet_in_a_folder_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left = tmp_path / "danlu-rendezvous-999999999-abc"
    left.mkdir()
    os.utime(left, (0, 0))
    young = tmp_path / "danlu-rendezvous-999999998-abc"
    young.mkdir()
    with rendezvous_file() as place:
        folder = Path(place.removeprefix("file:")).parent
        assert folder.stat().st_mode & 0o777 == 0o700
        assert not left.exists() and young.exists(), "ranks of a killed launcher may still be ending"
        first, second = (rendezvous(RankInfo(rank=rank, world_size=2, endpoint=place)) for rank in (0, 1))
        first.set("a", "b")
        assert second.get("a") == b"b"
    assert not folder.exists()


@pytest.mark.parametrize("uid", [0, 65534])
def test_another_account_that_connects_is_noticed(uid: int) -> None:
    with socket.socket() as server, socket.socket() as deaf:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        connect = f"exec 3<>/dev/tcp/127.0.0.1/{port}; echo connected; read -r _"
        command = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "bash", "-c", connect]
        assert unauthorized_uids() == set()
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            assert other.stdout and other.stdout.readline() == b"connected\n"
            if uid == os.geteuid():
                check_connections()
            else:
                with pytest.raises(UnauthorizedConnectionError, match=f"but some are of uid {uid};"):
                    check_connections()
            deaf.connect(("127.0.0.1", port))  # what goes out from here is nobody's intrusion
            other.communicate(b"\n")
        assert unauthorized_uids() == set()


def test_a_connection_of_somebody_else_to_the_same_port_elsewhere_is_no_intrusion() -> None:
    """Another account's client and server on an address of this host; here only the number of the port is the same."""
    with socket.socket() as mine:
        mine.bind(("127.0.0.1", 0))
        mine.listen()
        port = mine.getsockname()[1]
        code = (
            "import socket, sys; s = socket.create_server(('127.0.0.3', int(sys.argv[1])));"
            "c = socket.create_connection(('127.0.0.3', int(sys.argv[1]))); a = s.accept(); print('on', flush=True);"
            "sys.stdin.read()"
        )
        command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "/usr/bin/env", "python3", "-c", code]
        with subprocess.Popen([*command, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            assert other.stdout and other.stdout.readline() == b"on\n"
            assert unauthorized_uids() == set()
            other.communicate()


def test_every_address_of_an_interface_is_found() -> None:
    label = ["ip", "address", "add", "127.77.0.5/32", "dev", "lo"]
    subprocess.run(label, check=True)
    try:
        assert interface_of("127.77.0.5") == interface_of("127.0.0.1") == "lo"
    finally:
        subprocess.run(["ip", "address", "del", *label[3:]], check=True)
    with pytest.raises(OSError, match=r"no interface of this host has the address 192\.0\.2\.1"):
        interface_of("192.0.2.1")


# --- how a rank failed


def test_a_killed_rank_is_told_by_its_signal_and_what_the_kernel_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert describe_failure(1, -signal.SIGSEGV, None, "", 0) == "rank 1 was killed by SIGSEGV"
    assert isinstance(count_oom_kills(), int), "Linux counts them"
    monkeypatch.setattr(rank_failure, "count_oom_kills", lambda: 5)
    assert "OOM killer ended 2 processes" in describe_failure(1, -signal.SIGKILL, None, "", 3)
    assert "not out of memory" in describe_failure(1, -signal.SIGKILL, None, "", 5)
    assert "out of memory?" in describe_failure(1, -signal.SIGKILL, None, "", None)


def failure(rank: int, **changes: object) -> RankFailureEvent:
    figures: dict[str, object] = {"time": 17.5, "step": 3, "error": "KeyError", "message": "'x'", "explained": False}
    return RankFailureEvent.model_validate({"rank": rank, "host": "n0", "pid": 12} | figures | changes)


def test_a_rank_is_quoted_in_its_own_plain_words() -> None:
    said = "some noise\nTraceback\n"
    ours = failure(2, error="DivergedError", message="loss nan must be finite", explained=True)
    assert describe_failure(2, 1, ours, said, 0) == "rank 2 failed: loss nan must be finite"
    assert log_tail(ours, said) == [], "the traceback of an error of ours tells nothing more"
    assert describe_failure(2, 1, failure(2), said, 0) == "rank 2 failed: KeyError: 'x'"
    assert log_tail(failure(2), said) == said.splitlines()
    assert describe_failure(2, 1, None, "", 0) == "rank 2 ended with exit code 1: no output"


def test_the_first_failure_of_this_start_is_found_among_the_files_of_all_ranks(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert first_failure(run, since=0.0) is None
    run.rank_events(0).parent.mkdir()
    for each in (failure(0, time=9.0), failure(0, time=30.0), failure(12, time=20.0), failure(3, time=25.0)):
        with run.rank_events(each.rank).open("a") as events:
            events.write(each.model_dump_json() + "\n")
    found = first_failure(run, since=10.0)
    assert found is not None and (found.rank, found.time) == (12, 20.0)
    run.rank_events(12).write_text("no event\n")
    found = first_failure(run, since=10.0)
    assert found is not None and found.rank == 3, "an unreadable file is passed over"
