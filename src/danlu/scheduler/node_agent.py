"""The agent of a node: starts the ranks that the coordinator of the job wants there, and reports how they are.

It outlives its ranks and never decides anything, but for one thing: when it does not reach the coordinator any more, it
kills its ranks, because others will take their places. Where the coordinator was killed, it waits for the next one.
"""

import queue
import signal
import sys
import threading
import time
from typing import Any

from danlu.comm.flight_record import read_flights, remove_flights, remove_snapshots
from danlu.comm.interfaces import interface_of
from danlu.comm.launcher_link import RegroupOrder
from danlu.comm.store_client import LastingStoreClient, StoreError
from danlu.resilience.describe import describe_slow_rank
from danlu.resilience.host_watch import HostWatch
from danlu.scheduler.host_ranks import HostRanks
from danlu.scheduler.node_messages import (
    AGENT_LEASE_SECONDS,
    COORDINATOR_SECONDS,
    STATUS_SECONDS,
    NodeOrder,
    NodeStatus,
    RankStatus,
    pack_culprit,
    status_key,
    wait_for_order,
)
from danlu.spec import RunFolder
from danlu.spec.resilience import TlsFiles

_POLL_SECONDS = 0.1
_CONNECT_SECONDS = 120.0
"""How long the coordinator may take to start."""


class NodeAgent:
    """Of one node, until the coordinator lets it go or is not reached any more."""

    def __init__(
        self,
        run: RunFolder,
        node: str,
        control: str,
        token: bytes,
        world_size: int,
        ranks_per_node: int,
        worker_options: tuple[str, ...],
        tls: TlsFiles | None = None,
    ) -> None:
        """`control` is the endpoint of the coordinator's store."""
        self.run, self.node = run, node
        self._store, self._orders_store = (
            LastingStoreClient(
                control, token, seconds, silence=AGENT_LEASE_SECONDS, absence=COORDINATOR_SECONDS, tls=tls
            )
            for seconds in (_CONNECT_SECONDS, AGENT_LEASE_SECONDS)
        )
        self._ranks = HostRanks(
            run,
            world_size,
            worker_options,
            ranks_per_host=ranks_per_node,
            interface=interface_of(self._store.local_address),
        )
        self._watch = HostWatch(run.path)
        self._generations: dict[int, int] = {}
        self._orders: queue.SimpleQueue[NodeOrder | None] = queue.SimpleQueue()
        self._status = NodeStatus(number=0, order=0)
        self._written_at = 0.0
        self._watched_generation = -1
        self._is_stopping = False

    def serve(self) -> bool:
        """Carry out orders until the run is over; false if the coordinator was lost."""
        self.run.logs.mkdir(exist_ok=True)
        remove_flights(self.run.path)
        self._ranks.warm_up(self.run.logs / f"node-{self.node}.log")  # of a spare too
        previous = signal.signal(signal.SIGTERM, self._on_stop_signal)
        threading.Thread(target=self._listen, name="danlu-orders", daemon=True).start()
        try:
            while True:
                while not self._orders.empty():
                    order = self._orders.get()
                    if order is None or order.leave:
                        return order is not None
                    self._carry_out(order)
                try:
                    self._report()
                except StoreError:
                    return False
                self._ranks.wait(_POLL_SECONDS)
        finally:
            signal.signal(signal.SIGTERM, previous)
            self._ranks.close()
            for store in (self._store, self._orders_store):
                store.close()
            remove_snapshots(self.run.path)

    def _listen(self) -> None:
        """Take orders one after the other; None in the queue says that none will come."""
        number = 1
        while True:
            try:
                order = wait_for_order(self._orders_store, self.node, number, AGENT_LEASE_SECONDS)
            except StoreError:
                self._orders.put(None)
                return
            if order is not None:
                self._orders.put(order)
                number += 1

    def _carry_out(self, order: NodeOrder) -> None:
        for rank in order.kill:
            if rank in self._ranks.processes:
                self._ranks.processes[rank].send_signal(signal.SIGKILL)
        regroup = RegroupOrder.from_json(order.regroup) if order.regroup else None
        if regroup or order.refuse:
            self._ranks.links.forget_phases()
            for rank, process in self._ranks.processes.items():
                if process.poll() is None:
                    self._ranks.links.order(rank, regroup)
        if regroup and regroup.resized:
            self._ranks.forget()
            remove_flights(self.run.path, keep_snapshots=True)
        self._ranks.world_size = order.world_size or self._ranks.world_size
        for rank, local_rank in order.start:
            self._generations[rank] = regroup.generation if regroup else 0
            self._ranks.start(rank, local_rank, order.endpoint, regroup)
        self._status = self._status.model_copy(update={"order": self._status.order + 1})

    def _report(self) -> None:
        """Write a status if it changed, or if the last one is old."""
        unwritten = self._ranks.poll_events()
        if unwritten:  # a full disk: the log of the node is the next best place
            sys.stdout.write("\n".join([*unwritten, ""]))
            sys.stdout.flush()
        changes: dict[str, Any] = {
            "ranks": tuple(self._rank_status(rank) for rank in sorted(self._ranks.processes)),
            "is_importing": self._ranks.is_importing,
            "is_stopping": self._is_stopping,
        }
        changes |= self._look_at_ranks()
        status = self._status.model_copy(update=changes)
        if status != self._status or time.monotonic() - self._written_at > STATUS_SECONDS:
            step = max((flight.step for flight in read_flights(self.run.path, collectives=False)), default=0)
            self._status = status.model_copy(update={"number": status.number + 1, "step": step})
            self._store.set(status_key(self.node), self._status.model_dump_json())
            self._written_at = time.monotonic()

    def _look_at_ranks(self) -> dict[str, Any]:
        """Who hangs and who is slow, once all ranks of this node train."""
        changes: dict[str, Any] = {}
        links, ranks = self._ranks.links, self._ranks.processes
        if not ranks or not all(map(links.trains, ranks)):
            return changes
        generation = max(links.generation_of(rank) for rank in ranks)
        if generation != self._watched_generation:
            self._watched_generation = generation
            self._watch.restart()
            remove_snapshots(self.run.path, keep_ranks=ranks)  # the others had ranks here under other numbers
        if (found := self._watch.look()) is not None:
            culprits = tuple(map(pack_culprit, found.culprits))
            changes |= {"hangs": self._status.hangs + 1, "culprits": culprits, "quiet": self._watch.quiet}
        if slow := self._watch.look_for_stragglers():
            changes["slow"] = (*self._status.slow, *map(describe_slow_rank, slow))
        return changes

    def _rank_status(self, rank: int) -> RankStatus:
        process, links = self._ranks.processes[rank], self._ranks.links
        known = next((each for each in self._status.ranks if each.rank == rank and each.pid == process.pid), None)
        code = process.poll()
        if code is not None and known is not None and known.code == code:
            return known
        return RankStatus(
            rank=rank,
            generation=self._generations[rank],
            pid=process.pid,
            code=code,
            why=self._ranks.describe(rank) if code else "",
            phase=links.phase_of(rank),
            trains=links.trains(rank),
            joined=links.generation_of(rank),
            lost=links.lost_of(rank),
        )

    def _on_stop_signal(self, _number: int, _frame: Any) -> None:
        self._is_stopping = True
        self._ranks.signal_all(signal.SIGTERM)
