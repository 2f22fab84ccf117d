"""The launcher's side of a fork server: ranks that start in milliseconds, because one process has imported torch."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO, Protocol

from danlu.comm.launcher_link import MAX_MESSAGE_BYTES
from danlu.scheduler.rank_failure import UNKNOWN_EXIT


class RankProcess(Protocol):
    """The process of a rank, as `subprocess.Popen` has it."""

    @property
    def returncode(self) -> int | None:
        """Its exit code as it was last seen."""
        ...

    @property
    def pid(self) -> int:
        """Its id; 0 before it is forked."""
        ...

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        ...

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        ...

    def send_signal(self, sig: int) -> None:
        """Send it a signal, if it still runs."""
        ...


class ForkServer:
    """A process that forks ranks; `fork` may be called at once, and takes effect when torch is imported."""

    def __init__(self, threads: int, log: IO[bytes], interface: str) -> None:
        """Every rank computes with so many threads, and is reached over `interface`; the server's output is `log`."""
        self.is_ready = False
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "danlu.cli.fork_server", str(theirs.fileno()), str(threads), interface]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # signals of the terminal reach ranks through the launcher only
                pass_fds=(theirs.fileno(),),
            )
        self._ranks: list[ForkedRank] = []
        self.is_alive = True

    def fork(
        self, arguments: Sequence[str], log: int, link: int, *inherited: int, is_done: Callable[[], bool]
    ) -> "ForkedRank":
        """A rank whose worker gets these arguments and descriptors; `is_done` if it said that it ends well."""
        rank = ForkedRank(self, is_done)
        request = json.dumps({"number": len(self._ranks), "arguments": list(arguments)}).encode()
        self._ranks.append(rank)
        try:
            socket.send_fds(self._control, [request], [log, link, *inherited])
        except OSError:
            self._on_death()
        return rank

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def fileno(self) -> int:
        """Readable when a rank was forked or has ended."""
        return self._control.fileno()

    def pump(self) -> None:
        """Take in what was reported."""
        while self.is_alive:
            try:
                raw = self._control.recv(MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:
                raw = b""
            if not raw:
                self._on_death()
                break
            message = json.loads(raw)
            self.is_ready = True
            if "forked" in message:
                self._ranks[message["forked"]].start(message["pid"])
            for rank in self._ranks if "ended" in message else ():
                if rank.pid == message["ended"] and rank.returncode is None:
                    rank.end(message["code"])
        if not self.is_alive:
            for rank in self._ranks:
                rank.end_if_gone()

    def kill(self) -> None:
        """Kill the server; ranks that wait to be forked never start."""
        self._on_death()

    def close(self) -> None:
        """End the server; ranks that still run are the caller's."""
        self._control.close()
        self._process.kill()
        self._process.wait()
        self.is_alive = False
        for rank in self._ranks:
            rank.close()

    def _on_death(self) -> None:
        self.is_alive = False
        self._process.kill()
        code = self._process.wait() or UNKNOWN_EXIT
        for rank in self._ranks:
            if not rank.pid and rank.returncode is None:
                rank.end(code)


class ForkedRank:
    """A rank that was or will be forked by a server."""

    def __init__(self, server: ForkServer, is_done: Callable[[], bool]) -> None:
        self.returncode: int | None = None
        self.pid = 0
        self._server, self._is_done = server, is_done
        self._handle = -1

    def start(self, pid: int) -> None:
        """It has been forked."""
        self.pid = pid
        with suppress(ProcessLookupError):  # it has ended already; its code follows
            self._handle = os.pidfd_open(pid)

    def end(self, code: int) -> None:
        """It has ended."""
        self.returncode = code
        self.close()

    def end_if_gone(self) -> None:
        """It may have ended, and the server that would be told how is gone."""
        if self.returncode is None and (self._handle < 0 or select.select([self._handle], [], [], 0)[0]):
            self.end(0 if self._is_done() else UNKNOWN_EXIT)

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            self._server.pump()
        return self.returncode

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        while (code := self.poll()) is None:
            if self._server.is_alive:
                select.select([self._server], [], [], 1.0)
            else:
                time.sleep(0.01)
        return code

    def send_signal(self, sig: int) -> None:
        """Send it a signal, if it still runs; one that is not forked yet never will be."""
        if self.poll() is not None:
            return
        if not self.pid:
            self._server.kill()
            self.returncode = -sig
        elif self._handle >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, sig)

    def close(self) -> None:
        """Forget the process."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
