"""A command once a rank on the hosts of a network lab, as `srun` starts it on the nodes of a cluster."""

import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from typing import IO

from danlu.scheduler.network_lab import NetworkLab

# The ranks of a host are children of one shell: they share its /dev/shm, as on a machine of their own.
_RANKS = (
    'first=$1 count=$2; shift 2; started=; rank=$first; while [ $rank -lt $((first + count)) ]; do "$@" --rank $rank & '
    "started=\"$started $!\"; rank=$((rank + 1)); done; trap 'kill $started 2>/dev/null' INT TERM; "
    "code=0; for each in $started; do wait $each || code=$?; done; exit $code"
)
_TAIL_LINES = 20


class LabCommandError(RuntimeError):
    """The command failed on a host; the message names the host and ends with what it printed."""


def run_on_hosts(lab: NetworkLab, ranks_per_host: int, command: Sequence[str]) -> None:
    """Run `command --rank R` for every rank, hosts in order of the network; the first host's output is shown.

    Returns when all have ended. If one fails the others are killed, and `LabCommandError` says which and why.
    """
    with ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in lab.hosts[1:]]
        started = []
        for number, host in enumerate(lab.hosts):
            ranks = [str(number * ranks_per_host), str(ranks_per_host)]
            output = None if number == 0 else logs[number - 1]
            words = [*host.machine, "sh", "-c", _RANKS, "sh", *ranks, *command]
            started.append(subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=output))
            stack.callback(_end, started[-1])
        waiting = dict(enumerate(started))
        while waiting:
            for number, process in list(waiting.items()):
                try:
                    code = process.wait(0.2)
                except subprocess.TimeoutExpired:
                    continue
                del waiting[number]
                if code:
                    raise LabCommandError(_failure(lab, number, code, logs))


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill what is left on a host: its first process ends, and the kernel ends the others of its namespace."""
    process.kill()
    process.wait()


def _failure(lab: NetworkLab, number: int, code: int, logs: Sequence[IO[str]]) -> str:
    first = f"host {lab.hosts[number].name} of lab {lab.name} ended with exit code {code}"
    if number == 0:
        return f"{first}; its output is above"
    logs[number - 1].seek(0)
    last = logs[number - 1].read().splitlines()[-_TAIL_LINES:]
    return "\n".join([f"{first}:", *last])
