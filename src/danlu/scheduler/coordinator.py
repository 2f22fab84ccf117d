"""The coordinator of a job on several nodes: knows its agents, decides with `Recovery`, and gives orders."""

import signal
import socket
import time
from collections.abc import Sequence
from typing import Any, cast

from danlu.comm.launcher_link import RegroupOrder
from danlu.comm.store_server import StoreServer
from danlu.resilience.diagnosis import Cause, Culprit, Diagnosis
from danlu.resilience.policy import Means
from danlu.resilience.straggler_watch import SlowRank
from danlu.scheduler.coordinator_state import CoordinatorState, load_state, save_state
from danlu.scheduler.launcher import record_warning
from danlu.scheduler.node_messages import NODE_LEASE_SECONDS, NodeOrder, NodeStatus, RankStatus, node_of, order_key
from danlu.scheduler.rank_failure import read_failure
from danlu.scheduler.rank_map import RankMap
from danlu.scheduler.recovery import Recovery
from danlu.scheduler.smaller_layout import find_smaller_plan, is_only_fewer_replicas
from danlu.spec import Plan, RankFailureEvent, RunFolder, load_cluster, load_plan, load_recipe
from danlu.spec.resilience import TlsFiles

_POLL_SECONDS = 0.1
_START_SECONDS = 300.0
"""How long agents may take to report for the first time: Slurm starts them one after the other on large jobs."""
_GRACE_SECONDS = 30.0
"""Seconds that the other ranks have to exit after one has failed for good."""


class Node:
    """A node of the job, as it was last heard of."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.status: NodeStatus | None = None
        self.ranks: dict[int, RankStatus] = {}
        self.heard_at = time.monotonic()
        self.is_lost = False
        self.orders = 0
        self.patience = _START_SECONDS
        """Seconds after which it counts as lost if it was never heard of."""

    def hear(self, status: NodeStatus) -> None:
        """Take in a status; an old one says nothing."""
        if self.status is None or status.number > self.status.number:
            self.status, self.heard_at = status, time.monotonic()
            self.ranks = {each.rank: each for each in status.ranks}


class Coordinator:
    """The ranks of a job on all its nodes: what `Recovery` needs of them."""

    def __init__(self, run: RunFolder, ranks: RankMap, token: bytes, host: str, restarts: int) -> None:
        """`host` is this node's address, on which the stores of agents and of ranks listen."""
        self.run, self.ranks = run, ranks
        self._recipe, self._plan = load_recipe(run.recipe), load_plan(run.plan)
        self._control, self._rendezvous = (
            _serve(endpoint, host, token, self._recipe.resilience.tls) for endpoint in (ranks.control, ranks.store)
        )
        self._control.take_written()
        self._nodes = {name: Node(name) for name in (*ranks.nodes, *ranks.spares)}
        self._lay_out(ranks.nodes, 0)
        self._unread: dict[tuple[str, int], NodeOrder] = {}
        """Orders that may not have been carried out yet, by node and number."""
        self._cluster = load_cluster(str(run.cluster)) if run.cluster.exists() else None
        self.generation = 0
        self.stop_requested = False
        self.watch = AgentReports(self)
        self._started_at = time.time()
        self._deadline = float("inf")
        self._taken_over = load_state(run.path, ranks)
        self.recovery = Recovery(self, restarts, self._taken_over.recovery if self._taken_over else None)

    def _lay_out(self, nodes: Sequence[str], generation: int) -> None:
        """Give the nodes their ranks, from 0 on, all of them new processes."""
        each = self.ranks.tasks_per_node
        self._place = {rank: nodes[rank // each] for rank in range(len(nodes) * each)}
        self._generation_of_start = dict.fromkeys(self._place, generation)
        self.processes: Sequence[RemoteRank] = [RemoteRank(self, rank) for rank in sorted(self._place)]

    @property
    def links(self) -> "Coordinator":
        """What ranks report comes with the statuses of their nodes."""
        return self

    def run_to_end(self) -> int:
        """Start the ranks, keep them going, and return 0 once all have ended well."""
        if self._taken_over:
            self._take_over(self._taken_over)
        else:
            self._start_all()
        try:
            while any(process.poll() is None for process in self.processes):
                self._poll()
                time.sleep(_POLL_SECONDS)
        finally:
            self._give(dict.fromkeys(self._nodes, NodeOrder(leave=True)))
            time.sleep(2 * _POLL_SECONDS)  # agents take their leave
        return int(any(process.returncode for process in self.processes))

    def _start_all(self) -> None:
        each, orders = self.ranks.tasks_per_node, dict[str, NodeOrder]()
        for number, node in enumerate(self.ranks.nodes):
            start = tuple((number * each + local, local) for local in range(each))
            orders[node] = NodeOrder(endpoint=self.ranks.store, start=start, world_size=len(self._place))
        self._give(orders)

    def _take_over(self, state: CoordinatorState) -> None:
        """Go on from what another coordinator has decided: agents have kept the ranks, and connect again."""
        self.generation, self._started_at = state.recovery.generation, state.started_at
        self._place = dict(enumerate(state.place))
        self._generation_of_start = dict(enumerate(state.started_in))
        self.processes = [RemoteRank(self, rank) for rank in sorted(self._place)]
        for node in self._nodes.values():
            node.orders, node.is_lost = state.orders[node.name], node.name in state.lost_nodes
            node.patience = NODE_LEASE_SECONDS
        self._rendezvous.advance(self.generation)
        for name, number, order in state.unread:
            self._unread[name, number] = order
        self._control.put({order_key(*key): order.model_dump_json() for key, order in self._unread.items()})
        record_warning(self.run, 0, "the coordinator of the job was killed, and another one took over")

    @property
    def _state(self) -> CoordinatorState:
        nodes = self._nodes.values()
        return CoordinatorState(
            job=self.ranks.job,
            restart=self.ranks.restart,
            started_at=self._started_at,
            place=tuple(self._place[rank] for rank in sorted(self._place)),
            started_in=tuple(self._generation_of_start[rank] for rank in sorted(self._place)),
            lost_nodes=tuple(node.name for node in nodes if node.is_lost),
            orders={node.name: node.orders for node in nodes},
            unread=tuple((name, number, order) for (name, number), order in self._unread.items()),
            recovery=self.recovery.state,
        )

    def close(self) -> None:
        """Stop serving."""
        self._control.close()
        self._rendezvous.close()

    def hear(self) -> None:
        """Take in what agents have written, and who is silent."""
        for key, raw in self._control.take_written().items():
            if (node := self._nodes.get(node_of(key))) is not None:
                node.hear(NodeStatus.model_validate_json(raw))
        for node in self._nodes.values():
            patience = NODE_LEASE_SECONDS if node.status else node.patience
            if not node.is_lost and time.monotonic() - node.heard_at > patience:
                node.is_lost = True
                record_warning(self.run, 0, f"node {node.name} was not heard of for {patience:.0f} s: it is lost")
        for name, number in [*self._unread]:
            status = self._nodes[name].status
            if status is not None and number <= status.order:
                del self._unread[name, number]

    def _poll(self) -> None:
        self.hear()
        self.stop_requested |= any(node.status is not None and node.status.is_stopping for node in self._nodes.values())
        self.recovery.look(recover=not self.stop_requested)
        if any(process.poll() for process in self.processes):
            self._deadline = min(self._deadline, time.monotonic() + _GRACE_SECONDS)
            if time.monotonic() > self._deadline and (self.recovery.reason or self.stop_requested):
                for process in self.processes:
                    process.send_signal(signal.SIGKILL)
        else:
            self._deadline = float("inf")

    def stop(self, *_: Any) -> None:
        """Let the run end after its step; agents are told by Slurm itself."""
        self.stop_requested = True

    # --- what a rank is, as `Recovery` asks

    def status_of(self, rank: int) -> RankStatus | None:
        """The newest about a rank; None if nothing is known yet about the process that has its place now."""
        found = self._nodes[self._place[rank]].ranks.get(rank)
        return found if found and found.generation == self._generation_of_start[rank] else None

    def _is_current(self, rank: int) -> bool:
        """Whether the newest status was written after the newest order: phases before that are of an earlier world."""
        node = self._nodes[self._place[rank]]
        return node.status is not None and node.status.order >= node.orders

    @property
    def has_lost_nodes(self) -> bool:
        """Whether any node of the job is gone."""
        return any(node.is_lost for node in self._nodes.values())

    def statuses(self) -> list[tuple[str, NodeStatus]]:
        """Of all nodes that have ranks and answer."""
        nodes = (self._nodes[name] for name in sorted(set(self._place.values())))
        return [(node.name, node.status) for node in nodes if node.status and not node.is_lost]

    def lost_host(self, rank: int) -> str:
        """The node that a rank was lost with; empty if it is there."""
        node = self._nodes[self._place[rank]]
        return node.name if node.is_lost else ""

    def phase_of(self, rank: int) -> str:
        """What a rank said last that it is doing."""
        status = self.status_of(rank)
        return status.phase if status and self._is_current(rank) else ""

    def trains(self, rank: int) -> bool:
        """Whether a rank has come to its first step since it started."""
        status = self.status_of(rank)
        return status is not None and status.trains and self._is_current(rank)

    def generation_of(self, rank: int) -> int:
        """The newest world that a rank reported."""
        status = self.status_of(rank)
        return status.joined if status else 0

    def has_lost(self, generation: int) -> bool:
        """Whether a rank reported that connections of this world broke."""
        return any(status.lost >= generation for rank in self._place if (status := self.status_of(rank)))

    def forget_phases(self) -> None:
        """All ranks start again: their agents forget, with the next order."""

    def order(self, rank: int, order: RegroupOrder | None) -> None:
        """Say that no order will come; others are given by `replace`."""
        assert order is None
        if rank % self.ranks.tasks_per_node == 0:
            self._give({self._place[rank]: NodeOrder(refuse=True)})

    def kill(self, rank: int) -> None:
        """Have a rank killed."""
        self._give({self._place[rank]: NodeOrder(kill=(rank,))})

    @property
    def means(self) -> Means:
        """Nodes that wait, nodes that answer, and a plan for them if one is lost and none waits."""
        used = set(self._place.values())
        alive = [node.name for node in self._nodes.values() if not node.is_lost and node.status]
        spares = tuple(name for name in alive if name not in used)
        lost = sum(self._nodes[name].is_lost for name in used)
        if len(spares) >= lost:
            return Means(memory=not lost, spare_hosts=spares, hosts=tuple(alive))
        smaller = self._smaller_plan(len(alive))
        if smaller is None:
            return Means(memory=False, hosts=tuple(alive))
        replicas = smaller.degrees.replicate if is_only_fewer_replicas(self._plan, smaller) else 0
        return Means(False, hosts=tuple(alive), smaller_plan=smaller.model_dump_json(), replicas=replicas)

    def _smaller_plan(self, nodes: int) -> Plan | None:
        """A plan for so many nodes, unless the recipe wants more ranks than that."""
        found = find_smaller_plan(self._recipe, self._plan, self._cluster, nodes, self.ranks.tasks_per_node)
        least = self._recipe.resilience.shrink * self._plan.degrees.world
        return found if found is not None and found.degrees.world >= least else None

    @property
    def furthest_step(self) -> int:
        """Steps done by the rank that is furthest."""
        return max((node.status.step for node in self._nodes.values() if node.status), default=0)

    @property
    def is_importing(self) -> bool:
        """Whether new ranks still wait for torch to be imported."""
        return any(node.status.is_importing for node in self._nodes.values() if node.status and not node.is_lost)

    def failure(self, rank: int) -> RankFailureEvent | None:
        """What a rank reported about its failure."""
        status = self.status_of(rank)
        return read_failure(self.run, rank, since=self._started_at, pid=status.pid if status else None)

    def describe(self, rank: int) -> str:
        """Why a rank ended, in one line."""
        status = self.status_of(rank)
        return status.why if status else f"rank {rank} was lost with its node"

    def endpoint_of(self, generation: int) -> str:
        """Where the ranks of a world meet: the same place for all; the store turns earlier generations away."""
        return self.ranks.store

    def replace(self, ranks: Sequence[int], order: RegroupOrder, host: str = "") -> None:
        """Start new processes in the place of ranks that have ended, and order the others to join them."""
        self.generation = order.generation
        self._rendezvous.advance(order.generation)
        if order.resized:
            used = dict.fromkeys(self._place.values())  # in order of ranks
            alive = [name for name in (*used, *self._nodes) if not self._nodes[name].is_lost]
            self._lay_out(list(dict.fromkeys(alive))[: len(ranks) // self.ranks.tasks_per_node], order.generation)
        waiting = iter(dict.fromkeys([*filter(None, [host]), *self.means.spare_hosts]))
        instead: dict[str, str] = {}
        for rank in ranks:
            lost = self._place[rank]
            if self._nodes[lost].is_lost:
                if lost not in instead:  # each lost node has a spare of its own
                    instead[lost] = next(waiting, lost)
                self._place[rank] = instead[lost]
            self._generation_of_start[rank] = order.generation
        start: dict[str, list[tuple[int, int]]] = {name: [] for name in sorted(set(self._place.values()))}
        for rank in sorted(ranks):
            start[self._place[rank]].append((rank, rank % self.ranks.tasks_per_node))
        regroup, size = order.to_json(), len(self._place)
        self._give(
            {
                name: NodeOrder(endpoint=order.endpoint, regroup=regroup, start=tuple(new), world_size=size)
                for name, new in start.items()
            }
        )

    def _give(self, orders: dict[str, NodeOrder]) -> None:
        """Give nodes their next orders, after they are written down."""
        for name, order in orders.items():
            self._nodes[name].orders += 1
            self._unread[name, self._nodes[name].orders] = order
        try:
            save_state(self.run.path, self._state)
        except OSError as error:  # a full disk: the run matters more
            record_warning(self.run, 0, f"no other coordinator could take over, its state was not saved: {error}")
        self._control.put(
            {order_key(name, self._nodes[name].orders): order.model_dump_json() for name, order in orders.items()}
        )


class RemoteRank:
    """The process of a rank on some node."""

    def __init__(self, coordinator: Coordinator, rank: int) -> None:
        self._coordinator, self._rank = coordinator, rank

    @property
    def pid(self) -> int:
        """Its id on its node; 0 before it is known."""
        status = self._coordinator.status_of(self._rank)
        return status.pid if status else 0

    @property
    def returncode(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        if self._coordinator.lost_host(self._rank):
            return -signal.SIGKILL
        status = self._coordinator.status_of(self._rank)
        return status.code if status else None

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self.returncode

    def wait(self) -> int:
        """Its exit code, once it has ended, or its node is lost."""
        while (code := self.returncode) is None:
            self._coordinator.hear()
            time.sleep(_POLL_SECONDS)
        return code

    def send_signal(self, sig: int) -> None:
        """Kill it; no other signal is sent over nodes."""
        assert sig == signal.SIGKILL, sig
        if self.returncode is None:
            self._coordinator.kill(self._rank)


class AgentReports:
    """Hangs and slow ranks, as the agents found them: each looks at the ranks of its node."""

    quiet = 0.0

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._told: dict[str, int] = {}
        self._slow: dict[str, int] = {}

    def restart(self) -> None:
        """What agents found before is of an earlier world."""
        for name, status in self._coordinator.statuses():
            self._told[name] = status.hangs

    def look(self) -> Diagnosis | None:
        """Who is to blame, if an agent has found somebody on its node; the network, if all nodes only wait."""
        new = [
            (name, status) for name, status in self._coordinator.statuses() if status.hangs > self._told.get(name, 0)
        ]
        culprits = [
            Culprit(rank, cast(Cause, cause), step, phase, pid)
            for _, status in new
            for rank, cause, step, phase, pid in status.culprits
        ]
        own = [culprit for culprit in culprits if culprit.cause not in ("network", "mismatch")]
        if not own and len(new) < len(self._coordinator.statuses()):
            return None  # some nodes wait for others: who is waited for is found on its own node
        self._told |= {name: status.hangs for name, status in new}
        self.quiet = max((status.quiet for _, status in new), default=0.0)
        return Diagnosis(tuple(own or culprits), None, ()) if culprits else None

    def look_for_stragglers(self) -> Sequence[SlowRank]:
        """Agents say it in words, which are written down as they are."""
        for name, status in self._coordinator.statuses():
            for words in status.slow[self._slow.get(name, 0) :]:
                record_warning(self._coordinator.run, 0, words)
            self._slow[name] = len(status.slow)
        return ()


def _serve(endpoint: str, host: str, token: bytes, tls: TlsFiles | None) -> StoreServer:
    listener = socket.create_server((host, int(endpoint.rpartition(":")[2])), backlog=socket.SOMAXCONN)
    return StoreServer(listener, token, tls=tls)
