"""The link between a launcher and each of its ranks on one host: a rank reports its phase and detects launcher exit.

A socket pair. The rank's end only ever reads end-of-file, which the kernel delivers however the launcher exits, SIGKILL
included; a launcher that exited before the rank started reading is detected too. No torch.
"""

import json
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field

GRACE_PERIOD = 300.0
"""Seconds a rank without a launcher has to finish its step and save before it is killed."""
_MAX_MESSAGE_BYTES = 1 << 16


class LauncherLink:
    """A rank's end; without a launcher (`descriptor` is None) it does nothing."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._socket = None if descriptor is None else socket.socket(fileno=descriptor)

    def stop_when_launcher_exits(self, grace_period: float = GRACE_PERIOD) -> None:
        """When the launcher exits: SIGTERM to this process (stop after the step), SIGKILL after the grace period."""
        if self._socket is not None:
            threading.Thread(
                target=_stop_after_launcher, args=(self._socket, grace_period), name="danlu-launcher", daemon=True
            ).start()

    def close(self) -> None:
        """Close the link."""
        if self._socket is not None:
            self._socket.close()

    def report_phase(self, phase: str) -> None:
        """Report what this rank is doing before its first step."""
        self._send({"phase": phase})

    def report_event(self, line: str) -> None:
        """Send the launcher an event, as JSON, that could not be written to disk."""
        self._send({"event": line})

    def _send(self, message: dict[str, str]) -> None:
        """Send a message if the launcher reads; training never waits for it."""
        raw = json.dumps(message).encode()
        if self._socket is not None and len(raw) <= _MAX_MESSAGE_BYTES:
            with suppress(OSError):
                self._socket.send(raw, socket.MSG_DONTWAIT)


def _stop_after_launcher(link: socket.socket, grace_period: float) -> None:
    while link.recv(_MAX_MESSAGE_BYTES):
        pass  # a launcher sends nothing
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_period)
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class RankLinks:
    """A launcher's ends, one per rank."""

    _phases: dict[int, str] = field(default_factory=dict)
    """The last phase that each rank reported."""
    _order: list[str] = field(default_factory=list)
    """All reported phases, in the order of their first report."""
    _sockets: list[socket.socket] = field(default_factory=list)

    def open_link(self) -> socket.socket:
        """A link for the next rank; pass the returned end to it, then close it here."""
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sockets.append(mine)
        return theirs

    def poll_events(self) -> list[str]:
        """Events that ranks could not write to disk, as JSON; also updates the phases of the ranks."""
        events: list[str] = []
        for rank, link in enumerate(self._sockets):
            with suppress(OSError):
                while raw := link.recv(_MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT):
                    message = json.loads(raw)
                    events += [message["event"]] if "event" in message else []
                    if "phase" in message:
                        self._phases[rank] = message["phase"]
                        self._order += [] if message["phase"] in self._order else [message["phase"]]
        return events

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
        for link in self._sockets:
            link.close()
