"""`python -m danlu.cli.fork_server`: a process that has imported torch, and forks the ranks of one host.

Importing takes seconds, a fork takes milliseconds: ranks start sooner, share the memory of what they import, and a rank
that died is replaced at once. Not a command of `danlu`; `danlu.scheduler.fork_server` is the launcher's side.
"""

import gc
import json
import os
import select
import signal
import socket
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from danlu.cli import worker
from danlu.comm.launcher_link import MAX_MESSAGE_BYTES

MAX_DESCRIPTORS = 8


def serve(control: socket.socket, threads: int, interface: str) -> Sequence[str] | None:
    """Fork a rank for every request until the launcher closes its end; in a rank, returns its worker's arguments."""
    _set_library_defaults(threads, interface)
    import danlu.worker  # noqa: F401  what every rank needs; no thread and no device is started by it

    gc.collect()
    gc.freeze()  # the collector does not touch, and so does not copy, what ranks share
    # Threads of numeric libraries handle forks themselves; Python's own are none here.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    ended, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    _send(control, {"ready": True})
    while True:
        ready, _, _ = select.select([control.fileno(), ended], [], [])
        if ended in ready:
            os.read(ended, 4096)
            _report_ended(control)
        if control.fileno() not in ready:
            continue
        raw, descriptors, _, _ = socket.recv_fds(control, MAX_MESSAGE_BYTES, MAX_DESCRIPTORS)
        if not raw:
            return None
        request = json.loads(raw)
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for descriptor in (ended, wake):
                os.close(descriptor)
            control.close()
            return _become_rank(request["arguments"], *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        _send(control, {"forked": request["number"], "pid": pid})


def _set_library_defaults(threads: int, interface: str) -> None:
    """Set what libraries read when they are loaded; the user's own settings take precedence.

    Threads that spin instead of sleeping gain nothing measurable on an idle machine, and on a busy one (twice as many
    processes as cores) made a run of one rank five times slower. Gloo listens on the interface of the host's name
    otherwise; ranks of one host need only loopback, others the one over which they reach the store.
    """
    assert sys.modules.keys().isdisjoint(("numpy", "torch")), "they have read their settings already"
    defaults = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "GLOO_SOCKET_IFNAME": interface}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def _report_ended(control: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        _send(control, {"ended": pid, "code": os.waitstatus_to_exitcode(status)})


def _send(control: socket.socket, message: dict[str, int | bool]) -> None:
    try:
        control.send(json.dumps(message).encode())
    except OSError:  # the launcher is gone, and the next read says so
        return


def _become_rank(arguments: list[str], log: int, link: int, *_inherited: int) -> list[str]:
    """This process is a rank from now on: its own session, no input (nobody would answer), its log as output.

    What it inherits besides, such as the run's lock, stays open as long as it lives.
    """
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, standard in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, standard)
    os.close(nothing)
    os.close(log)
    with suppress(OSError):
        # What ps and top show; the kernel keeps 15 characters.
        Path("/proc/self/comm").write_text(f"danlu rank {arguments[arguments.index('--rank') + 1]}")
    return [*arguments, "--launcher-link", str(link)]


if __name__ == "__main__":
    found = serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), sys.argv[3])
    if found is not None:
        worker.app(found)
