"""A cluster as `danlu probe` measures it, on this machine or on hosts in namespaces."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from namespaces import INTERFACE, LabHost

from danlu.spec import Cluster, load_cluster


def probe_cluster(
    file: Path,
    ranks: int,
    *,
    quick: bool,
    levels: str = "",
    hosts: Sequence[LabHost] = (),
    chip_from: Path | None = None,
) -> Cluster:
    """Probe so many ranks, each with one thread, and write `file`; `hosts` are those of the ranks, in order.

    With `chip_from`, a cluster file, the network alone.
    """
    common = [sys.executable, "-m", "danlu", "probe", "--ranks", str(ranks), "--threads", "1", "-o", str(file)]
    common += ["--disk", str(file.parent), *(["--quick"] if quick else [])]
    common += ["--chip-from", str(chip_from)] if chip_from else []
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    commands = [common]
    if hosts:
        environment["GLOO_SOCKET_IFNAME"] = INTERFACE
        join = [*common, "--levels", levels, "--rdzv-endpoint", f"{hosts[0].address}:{free_port()}"]
        commands = [[*host.enter, *join, "--rank", str(rank)] for rank, host in enumerate(hosts)]
    started = [
        subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    told = [process.communicate()[1] for process in started]
    if any(process.returncode for process in started):
        sys.exit(f"danlu probe failed:\n{''.join(told)}")
    return load_cluster(str(file))


def free_port() -> int:
    """A free port."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])
