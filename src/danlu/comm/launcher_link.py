"""The link between a launcher and each of its ranks on one host: phases and events one way, orders the other.

A socket pair. A rank reads end-of-file however the launcher exits, SIGKILL included; a launcher that exited before the
rank started reading is detected too. No torch.
"""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field

GRACE_PERIOD = 300.0
"""Seconds a rank without a launcher has to finish its step and save before it is killed."""
MAX_MESSAGE_BYTES = 1 << 16
FIRST_STEP = "first step"
"""The phase of a rank that is about to train: the run's start is among its events."""
CHECK_STORE, OPEN_DATA = "checking that a checkpoint can be saved", "opening the data"
RESTORE, FIND_CHECKPOINT = "restoring the state from memory", "looking for a checkpoint to resume from"
LOADING_PHASES = frozenset({CHECK_STORE, OPEN_DATA, RESTORE, FIND_CHECKPOINT})
"""Phases that take as long as a store or a disk takes."""


@dataclass(frozen=True)
class RegroupOrder:
    """An order to leave a world that has lost ranks, and to join the next one."""

    generation: int
    """Number of the world to join; what belongs to an earlier one is late."""
    endpoint: str
    """Where its ranks meet."""
    ranks: tuple[int, ...]
    """Ranks that are new processes in it."""
    cause: str
    """What happened, in one line."""
    failed_at: float
    """When it was seen, in seconds since the epoch."""
    has_started: bool
    """Whether the start of the run is among its events."""
    quarantined: tuple[int, ...] = ()
    """Steps whose batches are not trained on."""
    plan: str = ""
    """The plan of the world, as JSON, if it is not that of the run's folder."""
    resized: bool = False
    """Whether that plan is new, with other ranks: all of them are new processes."""

    def to_json(self) -> str:
        """As one line; ranks as first and last of those in a row, as all of a large world would not fit a message."""
        return json.dumps(asdict(self) | {"ranks": _in_rows(self.ranks)})

    @classmethod
    def from_json(cls, text: str) -> "RegroupOrder":
        """The inverse of `to_json`."""
        fields = json.loads(text)
        ranks = tuple(rank for first, last in fields["ranks"] for rank in range(first, last + 1))
        return cls(**fields | {"ranks": ranks, "quarantined": tuple(fields["quarantined"])})


def _in_rows(ranks: Sequence[int]) -> list[tuple[int, int]]:
    rows: list[tuple[int, int]] = []
    for rank in ranks:
        if rows and rank == rows[-1][1] + 1:
            rows[-1] = rows[-1][0], rank
        else:
            rows.append((rank, rank))
    return rows


class LauncherLink:
    """A rank's end; without a launcher (`descriptor` is None) it does nothing."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._socket = None if descriptor is None else socket.socket(fileno=descriptor)
        self._order: RegroupOrder | None = None
        self._refused = False
        self._told = threading.Condition()
        self.on_order: Callable[[], None] = lambda: None
        """Called in the link's thread when an order comes: ends what this rank waits in."""

    def listen(self, grace_period: float = GRACE_PERIOD) -> None:
        """Take orders from now on, in a thread of its own.

        When the launcher exits: SIGTERM to this process (stop after the step), SIGKILL after the grace period.
        """
        if self._socket is not None:
            threading.Thread(
                target=self._listen, args=(self._socket, grace_period), name="danlu-launcher", daemon=True
            ).start()

    def order_after(self, generation: int, seconds: float = 0.0) -> RegroupOrder | None:
        """The newest order to join a later world; waits for one so long, or until the launcher says that none comes."""
        with self._told:
            if self._socket is not None:
                self._told.wait_for(lambda: self._refused or self._is_later(generation), seconds)
            return self._order if self._is_later(generation) else None

    def _is_later(self, generation: int) -> bool:
        return self._order is not None and self._order.generation > generation

    def close(self) -> None:
        """Close the link."""
        if self._socket is not None:
            self._socket.close()

    def report_phase(self, phase: str) -> None:
        """Report what this rank is doing before its first step."""
        self._send({"phase": phase})

    def report_generation(self, generation: int) -> None:
        """Report that this rank has left earlier worlds, and waits for the others in this one."""
        self._send({"generation": generation})

    def report_lost(self, generation: int) -> None:
        """Report that connections to other ranks of this world broke."""
        self._send({"lost": generation})

    def report_end(self) -> None:
        """Report that this rank is done and exits with 0, which its launcher may not be told otherwise."""
        self._send({"done": True})

    def report_event(self, line: str) -> None:
        """Send the launcher an event, as JSON, that could not be written to disk."""
        self._send({"event": line})

    def _send(self, message: dict[str, str | int | bool]) -> None:
        """Send a message if the launcher reads; training never waits for it."""
        raw = json.dumps(message).encode()
        if self._socket is not None and len(raw) <= MAX_MESSAGE_BYTES:
            with suppress(OSError):
                self._socket.send(raw, socket.MSG_DONTWAIT)

    def _listen(self, link: socket.socket, grace_period: float) -> None:
        while raw := _receive(link):
            text = json.loads(raw)["regroup"]
            with self._told:
                self._order = RegroupOrder.from_json(text) if text else self._order
                self._refused = not text
                self._told.notify_all()
            self.on_order()
        with self._told:
            self._refused = True
            self._told.notify_all()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace_period)
        os.kill(os.getpid(), signal.SIGKILL)


def _receive(link: socket.socket) -> bytes:
    """The next message; nothing when the launcher is gone, which is a reset if it left messages unread."""
    try:
        return link.recv(MAX_MESSAGE_BYTES)
    except OSError:
        return b""


@dataclass
class RankLinks:
    """A launcher's ends, one per rank."""

    _phases: dict[int, str] = field(default_factory=dict)
    """The last phase that each rank reported."""
    _order: list[str] = field(default_factory=list)
    """All reported phases, in the order of their first report."""
    _sockets: dict[int, socket.socket] = field(default_factory=dict)
    _generations: dict[int, int] = field(default_factory=dict)
    """The newest world that each rank waits in or is part of."""
    _events: list[str] = field(default_factory=list)
    _training: set[int] = field(default_factory=set)
    """Ranks that have reached their first step since they started."""
    _done: set[int] = field(default_factory=set)
    """Ranks that reported their end."""
    _lost: dict[int, int] = field(default_factory=dict)
    """The newest world of each rank in which connections broke."""

    def open_link(self, rank: int) -> socket.socket:
        """A link for a rank, in place of any that it had; pass the returned end to it, then close it here."""
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if (earlier := self._sockets.pop(rank, None)) is not None:
            earlier.close()
        self._sockets[rank] = mine
        self._phases.pop(rank, None)
        self._training.discard(rank)
        self._done.discard(rank)
        return theirs

    def is_done(self, rank: int) -> bool:
        """Whether a rank reported its end."""
        self._receive()
        return rank in self._done

    def has_lost(self, generation: int) -> bool:
        """Whether a rank reported that connections of this world broke."""
        return any(lost >= generation for lost in self._lost.values())

    def lost_of(self, rank: int) -> int:
        """The newest world in which a rank reported that connections broke; -1 if it never did."""
        return self._lost.get(rank, -1)

    def forget_phases(self) -> None:
        """All ranks start again."""
        self._phases.clear()
        self._training.clear()

    def order(self, rank: int, order: RegroupOrder | None) -> None:
        """Order a rank to regroup; None says that no such order will come."""
        with suppress(OSError):  # it has ended, or does not read: whoever watches it finds out
            raw = json.dumps({"regroup": order.to_json() if order else None}).encode()
            self._sockets[rank].send(raw, socket.MSG_DONTWAIT)

    def generation_of(self, rank: int) -> int:
        """The newest world that a rank reported."""
        return self._generations.get(rank, 0)

    def phase_of(self, rank: int) -> str:
        """What a rank said last that it is doing."""
        return self._phases.get(rank, "")

    def trains(self, rank: int) -> bool:
        """Whether a rank has come to its first step since it started, whatever it does now: evaluations are phases."""
        return rank in self._training

    def poll_events(self) -> list[str]:
        """Events that ranks could not write to disk, as JSON; also updates the phases of the ranks."""
        self._receive()
        events, self._events = self._events, []
        return events

    def _receive(self) -> None:
        for rank, link in self._sockets.items():
            with suppress(OSError):
                while raw := link.recv(MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT):
                    message = json.loads(raw)
                    self._events += [message["event"]] if "event" in message else []
                    if "generation" in message:
                        self._generations[rank] = message["generation"]
                    if "done" in message:
                        self._done.add(rank)
                    if "lost" in message:
                        self._lost[rank] = message["lost"]
                    if "phase" in message:
                        self._phases[rank] = message["phase"]
                        self._training |= {rank} if message["phase"] == FIRST_STEP else set()
                        self._order += [] if message["phase"] in self._order else [message["phase"]]

    @property
    def slowest_phase(self) -> str:
        """The phase of the rank that is furthest behind, and how many ranks are in it."""
        if len(self._phases) < max(1, len(self._sockets)):
            return "starting the processes"
        behind = min(self._phases.values(), key=self._order.index)
        count = sum(phase == behind for phase in self._phases.values())
        return behind if count == len(self._sockets) else f"{behind} ({count} of {len(self._sockets)} ranks)"

    def close(self) -> None:
        """Close the links; ranks that still run stop."""
        for link in self._sockets.values():
            link.close()
