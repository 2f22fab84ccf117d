"""The network of a cluster on one machine: a namespace for every node and switch, and links that the kernel throttles.

All of it is in namespaces of its own, so that the machine's addresses and routes do not change. Needs root, and `ip`
and `tc` of iproute2; `why_no_lab` says what is missing.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path

from danlu.spec.cluster import Cluster
from danlu.spec.text import one_line

INTERFACE = "net0"
"""Name of the interface by which a host reaches the others."""
MAX_HOSTS = 200
"""Hosts of one lab: each is a few dozen system calls, and has at least one process."""
_UPLINK = "uplink"
_MTU = "9000"
_BURST = "256kb"
_QUEUE_SECONDS = 0.05
_SHORTEST_DELAY = 10e-6
"""Links are not slowed down by less: the kernel's own delay is more than that."""
_STATE = Path("/run/danlu-lab")


class LabError(RuntimeError):
    """A lab cannot be made, or there is none of that name; the message says why."""


@dataclass(frozen=True)
class LabLevel:
    """One level of the network: a switch that joins hosts, or switches of the level below."""

    name: str
    fanout: int
    rate: float
    """Bytes per second of each link into it, in either direction."""
    delay: float = 0.0
    """Seconds that such a link adds to a message."""


@dataclass(frozen=True)
class LabHost:
    """A namespace that stands for one node."""

    name: str
    namespace: str
    address: str

    @property
    def enter(self) -> tuple[str, ...]:
        """Prefix of a command that runs on this host."""
        return "ip", "netns", "exec", self.namespace

    @property
    def machine(self) -> tuple[str, ...]:
        """The same as on a machine of its own: processes, name and /dev/shm; it ends with whoever started it."""
        network = ("setpriv", "--pdeathsig", "KILL", "nsenter", f"--net=/run/netns/{self.namespace}")
        apart = ("unshare", "--pid", "--fork", "--uts", "--mount", "--mount-proc", "--kill-child")
        # A shell stays between: unshare itself says no more than "failed" of a command that a signal ended.
        inside = f'hostname {self.name} && mount -t tmpfs tmpfs /dev/shm && "$@"; exit $?'
        return *network, *apart, "sh", "-c", inside, "sh"


@dataclass(frozen=True)
class NetworkLab:
    """A network that is up."""

    name: str
    levels: tuple[LabLevel, ...]
    """The innermost first: the one that joins hosts."""
    hosts: tuple[LabHost, ...]
    """In order of the network: neighbors share the lowest switch."""
    slower: float = 1.0
    """How many times as long as on the cluster a message takes here."""
    remark: str = ""
    """What of the levels the kernel cannot do; empty if nothing."""
    cluster: str = ""
    """File, or name in the catalog, of the cluster that it is the network of, if its chips are like this machine's."""

    def port(self, level: str, number: int) -> tuple[str, str]:
        """Namespace and name of the port by which the `number`-th unit below a level reaches it."""
        depth = [each.name for each in self.levels].index(level)
        if depth == 0:
            return self.hosts[number].namespace, INTERFACE
        return _switch_name(self.name, self.levels[depth - 1].name, number), _UPLINK


def why_no_lab() -> str:
    """Why no lab can be made here; empty if one can."""
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


def levels_of(cluster: Cluster, slower: float = 1.0) -> tuple[LabLevel, ...]:
    """The levels above the nodes of a cluster, with links `slower` times as slow as its own: rates and delays alike.

    A link carries what all chips below it may send at once, divided by the level's oversubscription. What the levels
    below it add to a message's latency is subtracted from its own.
    """
    chips, below, found = cluster.chips_per_node, 0.0, []
    for level in cluster.levels[1:]:
        rate = chips * level.bandwidth / level.oversubscription / slower
        delay = max(0.0, (level.latency - below) / 2 * slower)  # up and down again
        found.append(LabLevel(level.name, level.fanout, rate, delay))
        chips, below = chips * level.fanout, max(below, level.latency)
    return tuple(found)


def lab_up(name: str, levels: Sequence[LabLevel], slower: float = 1.0, cluster: str = "") -> NetworkLab:
    """Make the network; `LabError` if one of this name is there, or the kernel refuses.

    `cluster`: the file, or the name in the catalog, of what the levels are of.
    """
    if reason := why_no_lab():
        raise LabError(reason)
    if not re.fullmatch(r"[a-z0-9-]{1,32}", name):
        raise LabError(f'the name of a lab must be of a-z, 0-9 and "-", but is "{one_line(name)}"')
    count = prod(level.fanout for level in levels)
    if not levels or count < 2 or count > MAX_HOSTS:
        raise LabError(f"a lab must have 2 to {MAX_HOSTS} hosts, but this cluster has {count}: use a smaller fan-out")
    if _namespaces(name):
        raise LabError(f'lab "{name}" is up already: end it with `danlu lab down {name}`')
    made, remark = _without_delays(levels)
    hosts: list[LabHost] = []
    try:
        _make_unit(name, made, len(made), 0, hosts)
    except BaseException:
        lab_down(name)
        raise
    lab = NetworkLab(name, tuple(made), tuple(hosts), slower, remark, cluster)
    _STATE.mkdir(mode=0o700, exist_ok=True)
    (_STATE / f"{name}.json").write_text(json.dumps(asdict(lab)))
    return lab


def lab_down(name: str) -> int:
    """Remove a network; how many namespaces it had. Processes in it keep running, cut off from each other."""
    found = _namespaces(name)
    for namespace in found:
        _run("ip", "netns", "del", namespace)
    (_STATE / f"{name}.json").unlink(missing_ok=True)
    return len(found)


def find_lab(name: str) -> NetworkLab:
    """A network that is up; `LabError` without one."""
    try:
        raw = json.loads((_STATE / f"{name}.json").read_text())
    except FileNotFoundError:
        up = ", ".join(sorted(path.stem for path in _STATE.glob("*.json"))) or "none"
        raise LabError(f'there is no lab "{name}" (up: {up}): make one with `danlu lab up CLUSTER.toml`') from None
    levels = tuple(LabLevel(**level) for level in raw["levels"])
    hosts = tuple(LabHost(**host) for host in raw["hosts"])
    return NetworkLab(raw["name"], levels, hosts, raw["slower"], raw["remark"], raw.get("cluster", ""))


def sent_bytes(namespace: str, port: str) -> int:
    """Bytes that a port has sent so far, as the kernel counts them; from any namespace."""
    command = ["ip", "-n", namespace, "-s", "-j", "link", "show", "dev", port]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(json.loads(shown.stdout)[0]["stats64"]["tx"]["bytes"])


def _without_delays(levels: Sequence[LabLevel]) -> tuple[Sequence[LabLevel], str]:
    """The levels as this kernel can make them, and what it cannot: delays need a module that some kernels lack."""
    longest = max(level.delay for level in levels)
    if longest < _SHORTEST_DELAY:
        return levels, ""
    name = f"danlu-try-{os.getpid()}"
    _add_namespace(name)
    try:
        _run("tc", "-n", name, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
    except LabError:
        remark = (
            f"this kernel has no netem: links have their rates, but not their delays of up to {1e6 * longest:.0f} us"
        )
        return [replace(level, delay=0.0) for level in levels], remark
    finally:
        _run("ip", "netns", "del", name)
    return levels, ""


def _make_unit(lab: str, levels: Sequence[LabLevel], depth: int, number: int, hosts: list[LabHost]) -> str:
    """The namespace of a host, for depth 0, or of a switch with all that it joins."""
    if depth == 0:
        index = len(hosts)
        host = LabHost(f"{lab}-{index}", f"{_prefix(lab)}{index}", f"10.213.{index // 250}.{index % 250 + 1}")
        _add_namespace(host.namespace)
        hosts.append(host)
        return host.namespace
    level = levels[depth - 1]
    switch = _switch_name(lab, level.name, number)
    _add_namespace(switch)
    _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
    _run("ip", "-n", switch, "link", "set", "bridge", "up")
    for child in range(level.fanout):
        below = _make_unit(lab, levels, depth - 1, number * level.fanout + child, hosts)
        _join(below, INTERFACE if depth == 1 else _UPLINK, switch, f"down{child}", level)
        if depth == 1:
            _run("ip", "-n", below, "addr", "add", f"{hosts[-1].address}/16", "dev", INTERFACE)
        else:
            _run("ip", "-n", below, "link", "set", _UPLINK, "master", "bridge")
    return switch


def _join(lower: str, plug: str, upper: str, socket: str, level: LabLevel) -> None:
    """A cable between two namespaces, with the rate and the delay of the level in both directions."""
    _run("ip", "-n", lower, "link", "add", plug, "type", "veth", "peer", "name", socket, "netns", upper)
    for namespace, end in ((lower, plug), (upper, socket)):
        _run("ip", "-n", namespace, "link", "set", end, "mtu", _MTU, "up")
        qdisc, parent = ("tc", "-n", namespace, "qdisc", "add", "dev", end), ["root"]
        if level.delay >= _SHORTEST_DELAY:
            _run(*qdisc, "root", "handle", "1:", "netem", "delay", f"{1e6 * level.delay:.0f}us", "limit", "100000")
            parent = ["parent", "1:1", "handle", "10:"]
        shaped = ["rate", f"{8 * level.rate:.0f}bit", "burst", _BURST, "latency", f"{1e3 * _QUEUE_SECONDS:.0f}ms"]
        _run(*qdisc, *parent, "tbf", *shaped)
    _run("ip", "-n", upper, "link", "set", socket, "master", "bridge")


def _add_namespace(name: str) -> None:
    _run("ip", "netns", "add", name)
    _run("ip", "-n", name, "link", "set", "lo", "up")


def _prefix(lab: str) -> str:
    return f"danlu.{lab}."


def _switch_name(lab: str, level: str, number: int) -> str:
    return f"{_prefix(lab)}{level}-{number}"


def _namespaces(lab: str) -> list[str]:
    listed = subprocess.run(["ip", "-j", "netns", "list"], capture_output=True, text=True, check=True).stdout
    names = [str(each["name"]) for each in json.loads(listed or "[]")]
    return [name for name in names if name.startswith(_prefix(lab))]


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LabError(f"{' '.join(command)}: {done.stderr.strip()}")
