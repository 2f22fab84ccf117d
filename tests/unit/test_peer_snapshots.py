"""A host that is lost takes its memory along: its ranks find their state on another, as a copy or as a replica's.

Hosts are folders, and ranks are threads whose collectives meet at a barrier; what travels does so over real sockets.
"""

import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from danlu.comm.world import World
from danlu.framework.state import TrainState
from danlu.framework.state_snapshots import StateSnapshots
from danlu.spec.resilience import ResilienceConfig
from danlu.storage.checkpoint.peer_hosts import PeerHosts
from danlu.storage.checkpoint.peer_snapshots import PeerSnapshots

HOSTS = 4


class Meeting:
    """Where the ranks of one world meet: their collectives, and their key-value store."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(HOSTS, timeout=20)
        self.values: dict[int, list[int]] = {}
        self._keys: dict[str, str] = {}
        self._told = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._told:
            self._keys[key] = value
            self._told.notify_all()

    def get(self, key: str) -> bytes:
        with self._told:
            assert self._told.wait_for(lambda: key in self._keys, 20), key
            return self._keys[key].encode()

    def check(self, keys: list[str]) -> bool:
        with self._told:
            return all(key in self._keys for key in keys)


class ThreadWorld(World):
    """The collectives that snapshots use, among threads."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__(rank, HOSTS)
        object.__setattr__(self, "meeting", meeting)

    meeting: Meeting

    def barrier(self) -> None:
        self.meeting.barrier.wait()

    def all_reduce_ints(self, values: Any, reduction: Any = "sum") -> list[int]:
        self.meeting.values[self.rank] = list(values)
        self.meeting.barrier.wait()
        columns = list(zip(*self.meeting.values.values(), strict=True))
        self.meeting.barrier.wait()
        return [max(column) if reduction == "max" else min(column) for column in columns]


@dataclass
class State:
    """What snapshots are taken of: a tensor whose values are those of its step."""

    name: str
    step: int = 0
    tensor: Tensor = field(default_factory=lambda: torch.zeros(1000))

    def tensors(self) -> dict[str, Tensor]:
        return {self.name: self.tensor}

    def scalars(self) -> dict[str, int]:
        return {"step": self.step}

    def restore_scalars(self, scalars: dict[str, int]) -> None:
        self.step = scalars["step"]
        assert (self.tensor == self.step).all()


class Rank:
    """One rank in one world, on the host of the same number."""

    def __init__(
        self, folder: Path, rank: int, name: str, config: ResilienceConfig, meeting: Meeting, warnings: list[str]
    ) -> None:
        self.state = State(name)
        (folder / f"host-{rank}").mkdir(exist_ok=True)
        hosts = PeerHosts(meeting, folder / f"host-{rank}", rank, HOSTS, "127.0.0.1", leader=True)
        self.peers = PeerSnapshots(hosts, rank)
        found = StateSnapshots.open(
            folder / f"host-{rank}",
            cast(TrainState, self.state),
            ThreadWorld(meeting, rank),
            config,
            self.peers,
            None,
            warnings.append,
        )
        assert found is not None
        self.snapshots = found

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.state.step += 1
            self.state.tensor += 1
            self.snapshots.take_if_due(cast(TrainState, self.state), 1.0)
            if self.peers._thread is not None:
                self.peers._thread.join()

    def restore(self) -> int | None:
        return self.state.step if self.snapshots.restore(cast(TrainState, self.state)) else None


class Run:
    """All ranks of a run, world after world."""

    def __init__(self, folder: Path, names: list[str], config: ResilienceConfig) -> None:
        self.folder, self._names, self._config = folder, names, config
        self.ranks: list[Rank] = []
        self.warnings: list[str] = []
        self.pool = ThreadPoolExecutor(HOSTS)

    def regroup(self) -> None:
        self.close()
        meeting = Meeting()
        made = [
            self.pool.submit(Rank, self.folder, rank, name, self._config, meeting, self.warnings)
            for rank, name in enumerate(self._names)
        ]
        self.ranks = [each.result() for each in made]

    def all(self, do: Callable[[Rank], Any]) -> list[Any]:
        return [each.result() for each in [self.pool.submit(do, rank) for rank in self.ranks]]

    def lose_host(self, number: int) -> None:
        shutil.rmtree(self.folder / f"host-{number}")

    def close(self) -> None:
        for rank in self.ranks:
            rank.snapshots.close()
        self.ranks = []


SHARDED = ["a", "b", "c", "d"]
REPLICATED = ["a", "b", "a", "b"]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(names: list[str], peers: int) -> Run:
        runs.append(Run(tmp_path, names, ResilienceConfig(peers=peers)))
        runs[0].regroup()
        return runs[0]

    yield start
    for run in runs:
        run.close()
        run.pool.shutdown()


def test_a_lost_host_costs_the_steps_since_the_newest_copy(make: Callable[..., Run]) -> None:
    run = make(SHARDED, peers=5)
    run.all(lambda rank: rank.train(13))
    run.lose_host(1)
    run.regroup()
    assert run.all(Rank.restore) == [10] * HOSTS
    # And again, with another host, before any new copy was due: the first snapshot of a world is sent.
    run.all(lambda rank: rank.train(1))
    run.lose_host(2)
    run.regroup()
    assert run.all(Rank.restore) == [11] * HOSTS
    assert not run.warnings


def test_a_replica_on_another_host_costs_no_step(make: Callable[..., Run]) -> None:
    run = make(REPLICATED, peers=0)
    run.all(lambda rank: rank.train(13))
    run.lose_host(3)
    run.regroup()
    assert run.all(Rank.restore) == [13] * HOSTS


def test_what_is_newer_than_the_restored_state_is_gone(make: Callable[..., Run]) -> None:
    run = make(SHARDED, peers=0)
    run.all(lambda rank: rank.train(3))
    run.ranks[1].snapshots._snapshots.drop_newest()  # it died before the others, or was outvoted
    run.regroup()
    assert run.all(Rank.restore) == [2] * HOSTS
    assert all(sorted(rank.snapshots._snapshots._whole()) == [2] for rank in run.ranks)
    run.all(lambda rank: rank.train(1))
    assert all(sorted(rank.snapshots._snapshots._whole()) == [2, 3] for rank in run.ranks)


def test_a_restored_snapshot_makes_room_for_new_ones(make: Callable[..., Run]) -> None:
    run = make(REPLICATED, peers=0)
    for steps in (3, 4):
        run.all(lambda rank, steps=steps: rank.train(steps))
        run.lose_host(3)
        run.regroup()
        run.all(Rank.restore)
    run.all(lambda rank: rank.train(2))
    for rank in run.ranks:
        assert sorted(rank.snapshots._snapshots._whole()) == [8, 9], "two in turns, so that one is whole at any moment"


def test_a_host_that_is_lost_while_it_sends_leaves_the_copy_before(
    make: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(SHARDED, peers=5)
    run.all(lambda rank: rank.train(12))

    # Its newest copies never arrive, while those of the others do: all must go back to the one before.
    monkeypatch.setattr(run.ranks[0].peers, "_send", lambda *_: setattr(run.ranks[0].peers, "error", "cut off"))
    run.all(lambda rank: rank.train(9))
    run.lose_host(0)
    run.regroup()
    assert run.all(Rank.restore) == [10] * HOSTS


def test_two_hosts_that_keep_each_others_copies_are_one_too_many(make: Callable[..., Run]) -> None:
    run = make(SHARDED, peers=5)
    run.all(lambda rank: rank.train(13))
    run.lose_host(0)
    run.lose_host(2)
    run.regroup()
    assert run.all(Rank.restore) == [None] * HOSTS
    # What is taken after that, from a checkpoint's state on, is newer than whatever is still in memory.
    assert {rank.snapshots._snapshots.taken for rank in run.ranks} == {13}
    run.all(lambda rank: rank.train(1))
    run.lose_host(1)
    run.regroup()
    assert run.all(Rank.restore) == [1] * HOSTS


def test_a_damaged_copy_is_not_restored_by_anybody(make: Callable[..., Run]) -> None:
    run = make(SHARDED, peers=5)
    run.all(lambda rank: rank.train(6))
    run.lose_host(1)
    (copy,) = (run.folder / "host-3" / "copies").glob("000001-*-5")
    raw = bytearray(copy.read_bytes())
    raw[5000] ^= 1
    copy.write_bytes(raw)
    run.regroup()
    assert run.all(Rank.restore) == [None] * HOSTS
    (said,) = run.warnings
    assert "memory of another host was not read" in said and "what arrived is damaged" in said


def test_a_host_that_is_lost_while_others_read_from_it_is_named(
    make: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(SHARDED, peers=5)
    run.all(lambda rank: rank.train(6))
    run.lose_host(1)
    run.regroup()

    def fail(self: PeerSnapshots, place: tuple[str, str], into: memoryview) -> None:
        raise OSError("connection reset")

    monkeypatch.setattr(PeerSnapshots, "read_into", fail)
    assert run.all(Rank.restore) == [None] * HOSTS
    (said,) = run.warnings
    assert said.endswith("connection reset")


def test_a_copy_that_is_still_under_way_is_waited_for_by_nobody(
    make: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(SHARDED, peers=2)
    monkeypatch.setattr(
        PeerSnapshots, "is_sending", property(lambda peers: peers._rank == 2 and peers._thread is not None)
    )
    run.all(lambda rank: rank.train(6))
    copies = sorted(path.name.split("-")[::2] for path in run.folder.glob("host-*/copies/*"))
    assert copies == [[f"{rank:06d}", "1"] for rank in range(HOSTS)]
    (warning,) = run.warnings
    assert "takes longer than 2 steps" in warning


def test_at_most_two_copies_of_a_rank_are_kept(make: Callable[..., Run]) -> None:
    run = make(SHARDED, peers=1)
    run.all(lambda rank: rank.train(9))
    for host in range(HOSTS):
        names = {path.name.rpartition("-")[2] for path in (run.folder / f"host-{host}" / "copies").iterdir()}
        assert names == {"8", "9"}
