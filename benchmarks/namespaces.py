"""Hosts in supernodes on one machine: network namespaces joined by bridges, with links that the kernel throttles.

    with supernodes(inside="2gbit", between="200mbit") as hosts:
        subprocess.run([*hosts[3].enter, "ping", "-c", "1", hosts[0].address])

Everything is in separate namespaces, so the machine's addresses and routes do not change. Needs root, and `ip` and `tc`
of iproute2; `why_not` returns what is missing.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

INTERFACE = "net0"
"""Name of the interface by which a host reaches the others."""
_MTU = "9000"
_BURST = "256kb"


@dataclass(frozen=True)
class Host:
    """One namespace with an address on the common network."""

    namespace: str
    address: str

    interface: str = INTERFACE
    """Name of its link to the others."""

    @property
    def enter(self) -> tuple[str, ...]:
        """Prefix of a command that runs on this host."""
        return "ip", "netns", "exec", self.namespace


def why_not() -> str:
    """Why namespaces cannot be created here; empty if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} of iproute2 must be installed"
    name = f"danlu-try-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"the kernel refuses a network namespace: {tried.stderr.strip()}"
    _run("ip", "netns", "del", name)
    return ""


@contextmanager
def supernodes(inside: str, between: str, nodes: int = 2, hosts_each: int = 2) -> Iterator[list[Host]]:
    """Create hosts in supernodes: each host has a link of rate `inside`, each supernode one of rate `between`.

    Rates are in `tc`'s format. Hosts are numbered consecutively, supernode by supernode.
    """
    prefix = f"danlu-{os.getpid()}"
    made: list[str] = []
    try:
        middle = _switch(f"{prefix}-middle", made)
        hosts: list[Host] = []
        for node in range(nodes):
            switch = _switch(f"{prefix}-switch{node}", made)
            _cable(switch, f"up{node}", middle, f"down{node}", between)
            for _ in range(hosts_each):
                number = len(hosts)
                host = Host(_namespace(f"{prefix}-host{number}", made), f"10.213.0.{number + 1}")
                _cable(host.namespace, INTERFACE, switch, f"port{number}", inside, bridged=False)
                _run("ip", "-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
                hosts.append(host)
        yield hosts
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False)


def trunk_port(node: int) -> tuple[str, str]:
    """Namespace and name of the port by which the switch of a supernode of this process reaches the others."""
    return f"danlu-{os.getpid()}-switch{node}", f"up{node}"


def sent_bytes(namespace: str, port: str) -> int:
    """Bytes that a port has sent so far, as the kernel counts them; from any namespace."""
    command = ["ip", "-n", namespace, "-s", "-j", "link", "show", "dev", port]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(json.loads(shown.stdout)[0]["stats64"]["tx"]["bytes"])


def _namespace(name: str, made: list[str]) -> str:
    _run("ip", "netns", "add", name)
    made.append(name)
    _run("ip", "-n", name, "link", "set", "lo", "up")
    return name


def _switch(name: str, made: list[str]) -> str:
    """A namespace with only a bridge."""
    _namespace(name, made)
    _run("ip", "-n", name, "link", "add", "bridge", "type", "bridge")
    _run("ip", "-n", name, "link", "set", "bridge", "up")
    return name


def _cable(lower: str, plug: str, upper: str, socket: str, rate: str, bridged: bool = True) -> None:
    """Join two namespaces by a cable of one rate in both directions; `lower` may be a switch (`bridged`) or a host."""
    _run("ip", "-n", lower, "link", "add", plug, "type", "veth", "peer", "name", socket, "netns", upper)
    for name, end in ((lower, plug), (upper, socket)):
        _run("ip", "-n", name, "link", "set", end, "mtu", _MTU, "up")
        _run(
            "tc",
            "-n",
            name,
            "qdisc",
            "add",
            "dev",
            end,
            "root",
            "tbf",
            "rate",
            rate,
            "burst",
            _BURST,
            "latency",
            "50ms",
        )
    _run("ip", "-n", upper, "link", "set", socket, "master", "bridge")
    if bridged:
        _run("ip", "-n", lower, "link", "set", plug, "master", "bridge")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
