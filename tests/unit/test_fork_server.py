"""Ranks that are forked from a process with torch: how they end is known, whoever of the two ends first."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from made_runs import make_run

from danlu.comm.launcher_link import RankLinks
from danlu.scheduler.fork_server import ForkedRank, ForkServer
from danlu.scheduler.rank_failure import UNKNOWN_EXIT, describe_failure

pytestmark = pytest.mark.timeout(600)


class Server:
    """A server whose ranks wait for others that never come."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.links, self.forked = folder, RankLinks(), 0
        with (folder / "log").open("ab") as log:
            self.server = ForkServer(1, log, "lo")

    def fork(self, run: Path, is_done: Callable[[], bool] = lambda: False) -> ForkedRank:
        words = [str(run), "--rank", "0", "--world", "2", "--local-rank", "0", "--store", f"file:{self.folder}/store"]
        self.forked += 1  # a link of its own: a rank whose launcher closes it stops
        with self.links.open_link(self.forked) as link, (self.folder / "log").open("ab") as log:
            return self.server.fork([*words, "--locked"], log.fileno(), link.fileno(), is_done=is_done)

    def until_forked(self, rank: ForkedRank) -> None:
        deadline = time.monotonic() + 180
        while not rank.pid and time.monotonic() < deadline:
            rank.poll()
            time.sleep(0.01)
        assert rank.pid


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    made.links.close()
    made.server.close()


def test_exit_codes_and_signals_are_known_and_ranks_have_names(server: Server, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert server.fork(empty).wait() == 2, (tmp_path / "log").read_text()
    waiting = server.fork(make_run(tmp_path / "run").path)
    server.until_forked(waiting)
    assert os.getsid(waiting.pid) == waiting.pid, "signals of the terminal do not reach it"
    assert server.server.is_ready
    waiting.send_signal(signal.SIGKILL)
    assert waiting.wait() == -signal.SIGKILL
    waiting.send_signal(signal.SIGKILL)  # nobody


def test_a_rank_outlives_its_server_and_says_itself_how_it_ended(server: Server, tmp_path: Path) -> None:
    said = [False]
    run = make_run(tmp_path / "run").path
    first, second = server.fork(run, lambda: said[0]), server.fork(run, lambda: said[0])
    for rank in (first, second):
        server.until_forked(rank)
    os.kill(server.server.pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while server.server.is_alive and time.monotonic() < deadline:
        assert first.poll() is None
        time.sleep(0.01)
    assert not server.server.is_alive and first.poll() is None
    first.send_signal(signal.SIGKILL)
    assert first.wait() == UNKNOWN_EXIT
    assert describe_failure(0, UNKNOWN_EXIT, None, "", None) == "rank 0 ended, and so did the process that forked it"
    said[0] = True
    second.send_signal(signal.SIGKILL)
    assert second.wait() == 0


def test_a_rank_that_is_not_forked_yet_never_is(server: Server, tmp_path: Path) -> None:
    rank = server.fork(make_run(tmp_path / "run").path)
    assert not rank.pid and rank.poll() is None
    rank.send_signal(signal.SIGTERM)
    assert rank.wait() == -signal.SIGTERM
    assert not server.server.is_alive
