"""Hosts in supernodes on one machine, for benchmarks and tests: a network lab of two levels.

with supernodes(inside="2gbit", between="200mbit") as hosts:
    subprocess.run([*hosts[3].enter, "ping", "-c", "1", hosts[0].address])
"""

import argparse
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from danlu.scheduler.network_lab import INTERFACE, LabHost, LabLevel, NetworkLab, lab_down, lab_up, why_no_lab

__all__ = [
    "INTERFACE",
    "LabHost",
    "NetworkLab",
    "add_rank_options",
    "bytes_per_second",
    "run_mpi_ranks",
    "run_ranks",
    "supernode_lab",
    "supernodes",
    "why_no_lab",
    "why_no_mpi",
]
_PORT = 29531
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


@contextmanager
def supernode_lab(inside: str, between: str, nodes: int = 2, hosts_each: int = 2) -> Iterator[NetworkLab]:
    """A network of supernodes: each host has a link of rate `inside`, each supernode one of rate `between`."""
    levels = [
        LabLevel("supernode", hosts_each, bytes_per_second(inside)),
        LabLevel("trunk", nodes, bytes_per_second(between)),
    ]
    lab = lab_up(f"bench{os.getpid()}", levels)
    try:
        yield lab
    finally:
        lab_down(lab.name)


@contextmanager
def supernodes(inside: str, between: str, nodes: int = 2, hosts_each: int = 2) -> Iterator[list[LabHost]]:
    """The hosts of such a network, supernode by supernode."""
    with supernode_lab(inside, between, nodes, hosts_each) as lab:
        yield list(lab.hosts)


def add_rank_options(parser: argparse.ArgumentParser) -> None:
    """What a script's ranks are told: by `run_ranks`, and a folder that its main process reads."""
    for name, kind in (("--rank", int), ("--world", int), ("--store", str), ("--folder", Path)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)


def run_ranks(hosts: Sequence[LabHost], ranks: int, arguments: Sequence[str], seconds: float) -> None:
    """Run a script's ranks, as many on every host, and wait for them; they are told `--rank`, `--world`, `--store`."""
    command = [sys.executable, *arguments, "--world", str(ranks), "--store", f"{hosts[0].address}:{_PORT}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE}
    each = ranks // len(hosts)
    started = [
        subprocess.Popen([*hosts[rank // each].enter, *command, "--rank", str(rank)], env=environment)
        for rank in range(ranks)
    ]
    codes = [process.wait(seconds) for process in started]
    if any(codes):
        sys.exit(f"ranks ended with exit codes {codes}")


def why_no_mpi() -> str:
    """What `run_mpi_ranks` lacks; empty if nothing."""
    if shutil.which("mpirun") is None:
        return "mpirun is not installed (apt install openmpi-bin)"
    return "" if importlib.util.find_spec("mpi4py") else "mpi4py is not installed (pip install 'danlu[mpi]')"


def run_mpi_ranks(hosts: Sequence[LabHost], ranks: int, arguments: Sequence[str], folder: Path, seconds: float) -> None:
    """Run a script's ranks by `mpirun`, as many on every host, and wait for them."""
    agent = folder / "enter-host"  # what Open MPI calls in the place of ssh
    cases = "\n".join(f'{host.address}) exec {shlex.join(host.machine)} sh -c "$*";;' for host in hosts)
    agent.write_text(f"#!/bin/sh\nhost=$1; shift\ncase $host in\n{cases}\nesac\n")
    agent.chmod(0o755)
    options = {
        "plm_rsh_agent": str(agent),
        "btl": "self,vader,tcp",
        "pml": "ob1",
        "btl_tcp_if_include": INTERFACE,
        "oob_tcp_if_include": INTERFACE,
        "mpi_yield_when_idle": "1",  # there are more ranks than cores
    }
    command = [*hosts[0].machine, "mpirun", "--allow-run-as-root", "--bind-to", "none", "-n", str(ranks)]
    command += ["--host", ",".join(f"{host.address}:{ranks // len(hosts)}" for host in hosts)]
    command += [word for key, value in options.items() for word in ("--mca", key, value)]
    subprocess.run(
        [*command, "-x", "PATH", "-x", "OMP_NUM_THREADS=1", sys.executable, *arguments], timeout=seconds, check=True
    )


def bytes_per_second(rate: str) -> float:
    """A rate in `tc`'s format."""
    return float(rate[:-4]) * _UNITS[rate[-4:]] / 8
