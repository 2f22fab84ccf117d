"""The coordinator of several nodes, with agents that are played by the test, and an agent whose coordinator is gone."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from danlu.comm.launcher_link import FIRST_STEP, RegroupOrder
from danlu.comm.store_client import LastingStoreClient, StoreClient, StoreError
from danlu.comm.store_server import StoreServer
from danlu.scheduler import coordinator as coordinating
from danlu.scheduler.coordinator import Coordinator
from danlu.scheduler.node_agent import NodeAgent
from danlu.scheduler.node_messages import NodeOrder, NodeStatus, RankStatus, order_key, status_key, wait_for_order
from danlu.scheduler.rank_map import RankMap
from danlu.spec import Plan, RunFolder, WarningEvent
from danlu.spec.plan import Degrees

RECIPE = """
name = "coordinated"
steps = 100
[model]
base = "tiny-llama"
[data]
shards = "shards"
[batch]
sequences = 8
length = 32
"""
TOKEN = bytes(32)
LEASE = 4.0
"""Longer than a busy machine keeps all threads of a process waiting."""


def free_endpoints() -> tuple[str, str]:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        first, second = (f"127.0.0.1:{each.getsockname()[1]}" for each in (one, two))
    return first, second


class PlayedAgent:
    """Writes the status of a node, and carries out orders at once."""

    def __init__(self, name: str, control: str) -> None:
        self.name, self.orders = name, list[NodeOrder]()
        self.ranks: dict[int, RankStatus] = {}
        self.changes: dict[str, object] = {}
        self.is_on, self.is_quiet = True, False
        self.speaks = threading.Event()
        self.speaks.set()
        self._store = LastingStoreClient(control, TOKEN, 10.0, silence=5.0, absence=20.0)
        self._thread = threading.Thread(target=self._play, daemon=True)
        self._thread.start()

    def _play(self) -> None:
        number = 0
        with suppress(StoreError):
            while self.is_on:
                self.is_quiet = not self.speaks.is_set()
                self.speaks.wait()
                self.is_quiet = False
                if order := wait_for_order(self._store, self.name, len(self.orders) + 1, 0.02):
                    self._carry_out(order)
                number += 1
                status = NodeStatus(number=number, order=len(self.orders), ranks=tuple(self.ranks.values()), step=40)
                self._store.set(status_key(self.name), status.model_copy(update=self.changes).model_dump_json())
        self._store.close()

    def _carry_out(self, order: NodeOrder) -> None:
        self.orders.append(order)
        regroup = RegroupOrder.from_json(order.regroup) if order.regroup else None
        generation = regroup.generation if regroup else 0
        if regroup and regroup.resized:
            self.ranks.clear()
        for rank in self.ranks if order.regroup else ():
            self.ranks[rank] = self.ranks[rank].model_copy(update={"joined": generation})
        for rank in order.kill:
            self.end(rank, -9)
        for rank, _ in order.start:
            self.ranks[rank] = RankStatus(
                rank=rank,
                generation=generation,
                pid=1,
                code=None,
                why="",
                phase=FIRST_STEP,
                trains=True,
                joined=generation,
                lost=-1,
            )

    def end(self, rank: int, code: int) -> None:
        self.ranks[rank] = self.ranks[rank].model_copy(update={"code": code, "why": f"rank {rank} ended with {code}"})


class KilledError(Exception):
    """Stands for a signal that ends the coordinator."""


class Job:
    """A coordinator of two nodes of two ranks, and a third node that waits."""

    def __init__(self, folder: Path, recipe: str = "") -> None:
        (folder / "recipe.toml").write_text(RECIPE + recipe)
        (folder / "plan.toml").write_text("[degrees]\nreplicate = 2\nshard = 2\n")
        control, store = free_endpoints()
        self.ranks = RankMap(
            job=1, restart=0, nodes=("a", "b"), tasks_per_node=2, store=store, spares=("c",), control=control, remark=""
        )
        self.run = RunFolder(folder)
        self.start_coordinator()
        self.agents = {name: PlayedAgent(name, control) for name in "abc"}
        self.code: int | None = None
        self.until(lambda: all(len(self.agents[name].ranks) == 2 for name in "ab"))
        time.sleep(0.3)

    def start_coordinator(self) -> None:
        self.coordinator = Coordinator(self.run, self.ranks, TOKEN, "127.0.0.1", restarts=5)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with suppress(KilledError):
            self.code = self.coordinator.run_to_end()

    def kill_coordinator(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It does nothing any more from here on: no order, no farewell."""

        def die(*_: object) -> None:
            raise KilledError

        monkeypatch.setattr(self.coordinator, "_give", die)
        monkeypatch.setattr(self.coordinator, "_poll", die)
        self._thread.join()
        self.coordinator.close()

    def until(self, condition: object, seconds: float = 40.0) -> None:
        assert callable(condition)
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, {name: agent.orders for name, agent in self.agents.items()}
            time.sleep(0.02)

    def finish(self) -> int | None:
        for agent in self.agents.values():
            for rank in agent.ranks:
                agent.end(rank, 0)
        self._thread.join(15)
        return self.code


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Job]:
    monkeypatch.setattr(coordinating, "NODE_LEASE_SECONDS", LEASE)
    job = Job(tmp_path, getattr(request, "param", ""))
    yield job
    job.finish()
    for agent in job.agents.values():
        agent.is_on = False
    job.coordinator.close()


def test_a_run_without_faults_ends_well_and_lets_its_agents_go(job: Job) -> None:
    assert [agent.orders[0].start for agent in (job.agents["a"], job.agents["b"])] == [
        ((0, 0), (1, 1)),
        ((2, 0), (3, 1)),
    ]
    assert job.finish() == 0
    job.until(lambda: all(agent.orders[-1].leave for agent in job.agents.values()))
    assert len(job.agents["c"].orders) == 1, "who waits is not bothered"


def test_a_rank_that_died_is_replaced_on_its_node_and_all_others_join_it(job: Job) -> None:
    job.agents["b"].end(3, -9)
    job.until(lambda: all(len(job.agents[name].orders) == 2 for name in "ab"))
    assert job.agents["b"].orders[1].start == ((3, 1),)
    assert job.agents["a"].orders[1].start == ()
    order = RegroupOrder.from_json(job.agents["a"].orders[1].regroup)
    assert order.generation == 1 and order.ranks == (3,) and order.cause == "rank 3 ended with -9"
    with pytest.raises(StoreError, match="generation 0 of this run is over"):
        StoreClient(order.endpoint, TOKEN, 0, 5.0)
    assert job.finish() == 0


def test_a_node_that_is_silent_is_replaced_by_one_that_waits(job: Job) -> None:
    job.agents["b"].is_on = False
    job.until(lambda: job.agents["c"].orders)
    assert job.agents["c"].orders[0].start == ((2, 0), (3, 1))
    assert f"node b was not heard of for {LEASE:.0f} s" in next(
        event.message for event in job.run.read_events() if isinstance(event, WarningEvent)
    )
    del job.agents["b"]
    assert job.finish() == 0


def test_each_of_two_nodes_that_are_lost_at_once_has_a_spare_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "plan.toml").write_text("[degrees]\nreplicate = 2\nshard = 2\n")
    control, store = free_endpoints()
    ranks = RankMap(
        job=1, restart=0, nodes=("a", "b"), tasks_per_node=2, store=store, spares=("c", "d"), control=control, remark=""
    )
    coordinator = Coordinator(RunFolder(tmp_path), ranks, TOKEN, "127.0.0.1", restarts=5)
    try:
        for node in coordinator._nodes.values():
            node.status = NodeStatus(number=1, order=0)
        coordinator._nodes["a"].is_lost = coordinator._nodes["b"].is_lost = coordinator._nodes["d"].is_lost = True
        assert not coordinator.means.spare_hosts, "one node that waits does not replace two"
        coordinator._nodes["d"].is_lost = False
        assert coordinator.means.spare_hosts == ("c", "d") and not coordinator.means.memory
        order = RegroupOrder(1, store, (0, 1, 2, 3), "two hosts are lost", 1.0, True)
        coordinator.replace(order.ranks, order, "c")
        assert coordinator._place == {0: "c", 1: "c", 2: "d", 3: "d"}
    finally:
        coordinator.close()


def test_with_no_node_left_the_run_goes_on_with_fewer_replicas(job: Job) -> None:
    job.agents["a"].is_on = job.agents["c"].is_on = False
    job.until(lambda: len(job.agents["b"].orders) == 4)
    _, *kills, start = job.agents["b"].orders
    assert [each.kill for each in kills] == [(2,), (3,)]
    order = RegroupOrder.from_json(start.regroup)
    assert order.resized and order.ranks == (0, 1)
    assert start.start == ((0, 0), (1, 1)) and start.world_size == 2
    assert Plan.model_validate_json(order.plan) == Plan(degrees=Degrees(replicate=1, shard=2), microbatches=2)
    assert order.cause == "host a is lost: none waits, and the run goes on with 2 of 4 ranks"
    # A rank of the smaller world is replaced in it.
    job.agents["b"].changes = {"step": 41}
    time.sleep(0.3)
    job.agents["b"].end(1, -9)
    job.until(lambda: len(job.agents["b"].orders) == 5)
    last = job.agents["b"].orders[-1]
    again = RegroupOrder.from_json(last.regroup)
    assert last.start == ((1, 1),) and last.world_size == 2
    assert again.plan == order.plan and not again.resized and again.ranks == (1,)
    del job.agents["a"]
    assert job.finish() == 0


@pytest.mark.parametrize("job", ["[resilience]\nshrink = 1\n"], indirect=True)
def test_with_no_node_left_the_run_stops_and_says_so(job: Job) -> None:
    job.agents["b"].is_on = job.agents["c"].is_on = False
    job.until(lambda: job.coordinator.recovery.reason)
    assert "host b is lost, and there is neither a spare nor a layout without it" in job.coordinator.recovery.reason
    job.until(lambda: any(order.refuse for order in job.agents["a"].orders))


def test_a_rank_that_hangs_on_any_node_is_killed_and_replaced(job: Job) -> None:
    culprits = ((2, "stopped", 40, "update", 1),)
    job.agents["a"].changes = {"hangs": 1, "culprits": ((0, "network", 40, "metrics", 1),)}
    time.sleep(0.5)
    assert len(job.agents["a"].orders) == 1, "a node that waits for another blames nobody"
    job.agents["b"].changes = {"hangs": 1, "culprits": culprits}
    job.until(lambda: len(job.agents["b"].orders) >= 3)
    assert job.agents["b"].orders[1].kill == (2,)
    assert job.agents["b"].orders[2].start == ((2, 0),)


def test_another_coordinator_takes_over_and_knows_what_was_decided(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.agents["b"].end(3, -9)
    job.until(lambda: all(len(job.agents[name].orders) == 2 for name in "ab"))
    job.kill_coordinator(monkeypatch)
    for agent in job.agents.values():
        agent.changes["step"] = 41
    job.agents["a"].end(0, -9)  # nobody sees it now
    job.start_coordinator()
    job.until(lambda: all(len(job.agents[name].orders) == 3 for name in "ab"))
    order = RegroupOrder.from_json(job.agents["b"].orders[2].regroup)
    assert order.generation == 2 and order.ranks == (0,)
    assert job.agents["a"].orders[2].start == ((0, 0),)
    assert [fault.ranks for fault in job.coordinator.recovery.faults] == [(3,), (0,)]
    assert any(isinstance(event, WarningEvent) and "took over" in event.message for event in job.run.read_events())
    assert job.finish() == 0


def test_an_order_that_nobody_had_read_is_given_again(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: object) -> None:
        monkeypatch.setattr(job.coordinator, "_give", die)  # nor does it say farewell
        raise KilledError

    monkeypatch.setattr(job.coordinator._control, "put", die)  # it is killed once the decision is written down
    job.agents["b"].end(3, -9)
    job.until(lambda: not job._thread.is_alive())
    job.coordinator.close()
    job.start_coordinator()
    job.until(lambda: all(len(job.agents[name].orders) == 2 for name in "ab"))
    assert job.agents["b"].orders[1].start == ((3, 1),)
    assert job.finish() == 0
    assert len(job.coordinator.recovery.faults) == 1, "the same fault is not handled twice"


def test_a_node_that_was_lost_with_the_coordinator_is_replaced_by_the_next_one(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.kill_coordinator(monkeypatch)
    job.agents["b"].is_on = False
    job.start_coordinator()
    job.until(lambda: len(job.agents["c"].orders) == 1)
    assert job.agents["c"].orders[0].start == ((2, 0), (3, 1))


def test_ranks_that_were_just_meeting_when_the_coordinator_was_lost_meet_again(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Quiet before it is killed: a word that is under way then would reach the next one first, and be of ranks at work.
    for agent in (job.agents["a"], job.agents["b"]):
        agent.speaks.clear()
    job.until(lambda: all(job.agents[name].is_quiet for name in "ab"))
    job.kill_coordinator(monkeypatch)
    for agent in (job.agents["a"], job.agents["b"]):
        for rank, status in agent.ranks.items():
            agent.ranks[rank] = status.model_copy(update={"phase": "joining", "trains": False, "lost": 0})
        agent.speaks.set()
    job.start_coordinator()
    job.until(lambda: all(len(job.agents[name].orders) == 2 for name in "ab"))
    order = RegroupOrder.from_json(job.agents["a"].orders[1].regroup)
    assert order.generation == 1 and order.ranks == () and "broke while they started" in order.cause


def test_the_coordinator_of_a_requeued_job_starts_afresh(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.kill_coordinator(monkeypatch)
    job.ranks = job.ranks.model_copy(update={"restart": 1})
    job.start_coordinator()
    assert job.coordinator._taken_over is None and job.coordinator.recovery.generation == 0


@pytest.mark.parametrize("lost", ["nobody serves there", "the host is silent"])
def test_an_agent_without_a_coordinator_ends_its_ranks(
    lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = 1.5
    absence, silence = (lease, 60.0) if lost == "nobody serves there" else (60.0, lease)
    monkeypatch.setattr("danlu.scheduler.node_agent.AGENT_LEASE_SECONDS", silence)
    monkeypatch.setattr("danlu.scheduler.node_agent.COORDINATOR_SECONDS", absence)
    server = StoreServer(socket.create_server(("127.0.0.1", 0)), TOKEN)
    agent = NodeAgent(RunFolder(tmp_path), "a", server.address, TOKEN, 1, 1, ())
    watcher = StoreClient(server.address, TOKEN, 0, 5.0)
    began = threading.Event()

    def end() -> None:
        assert watcher.wait([status_key("a")], 20)
        watcher.set(order_key("a", 1), NodeOrder(start=((0, 0),), endpoint="127.0.0.1:1").model_dump_json())
        time.sleep(0.5)
        began.set()
        if lost == "the host is silent":
            server._loop.call_soon_threadsafe(time.sleep, 4 * lease)
            time.sleep(3 * lease)
        server.close()

    thread = threading.Thread(target=end)
    thread.start()
    assert agent.serve() is False
    thread.join()
    watcher.close()
    assert began.is_set()
    assert all(process.poll() is not None for process in agent._ranks.processes.values())
