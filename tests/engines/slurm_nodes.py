"""The same Slurm with every node a machine of its own: network, processes, name and /dev/shm. Needs root.

A node that is switched off loses all its processes and what they kept in memory; one that is cut off keeps them, and
nobody reaches it.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

from slurm_lab import CONF, NODES, SlurmLab

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from namespaces import INTERFACE, LabHost

CONTROLLER = "control"
_DEAD_AFTER = 10
"""Seconds without an answer after which Slurm itself gives a node up."""


class SlurmNodes(SlurmLab):
    """One Slurm on hosts of `namespaces.supernodes`: the last is the controller's, the others the nodes'."""

    def __init__(self, root: Path, hosts: list[LabHost]) -> None:
        super().__init__(root)
        self.hosts = dict(zip((*NODES, CONTROLLER), (*hosts[: len(NODES)], hosts[-1]), strict=True))
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Write the configuration, start the controller and the nodes, and return when all are idle."""
        self.make_folders()
        (self.root / "hosts").write_text(
            "127.0.0.1 localhost\n" + "".join(f"{host.address} {name}\n" for name, host in self.hosts.items())
        )
        self._start_munge()
        self._write_configuration()
        conf = str(self.root / "slurm.conf")
        self._daemon(*self._machine(CONTROLLER, "slurmctld", "-D", "-c", "-f", conf), log="slurmctld")
        for node in NODES:
            self._daemon(*self._machine(node, "slurmd", "-D", "-f", conf, "-N", node), log=node)
            self.nodes[node] = self.daemons[-1]
        self._wait_until_idle()

    def power_off(self, node: str) -> None:
        """End everything on a node, at once."""
        os.killpg(self.nodes[node].pid, signal.SIGKILL)
        self.nodes[node].wait()
        self.daemons.remove(self.nodes[node])

    def cut_off(self, node: str) -> None:
        """Pull the cable of a node."""
        subprocess.run(["ip", "-n", self.hosts[node].namespace, "link", "set", INTERFACE, "down"], check=True)

    def on(self, machine: str, *command: str) -> list[str]:
        """A command that runs on a machine's network."""
        return ["nsenter", f"--net=/run/netns/{self.hosts[machine].namespace}", *command]

    def run(self, *command: str) -> str:
        """Run a command of Slurm's on the controller's network."""
        return super().run(*self.on(CONTROLLER, *command))

    def stop(self) -> None:
        """End the daemons; with those of a node everything on it ends."""
        for daemon in reversed(self.daemons):
            os.killpg(daemon.pid, signal.SIGKILL)
            daemon.wait()
        self.daemons.clear()

    def _machine(self, name: str, *command: str) -> list[str]:
        inside = (
            f"hostname {name} && mount -t tmpfs tmpfs /dev/shm && mount --bind {self.root}/hosts /etc/hosts && "
            f'exec "$@"'
        )
        apart = ["unshare", "--pid", "--fork", "--uts", "--mount", "--mount-proc", "--kill-child"]
        return self.on(name, *apart, "bash", "-c", inside, "bash", *command)

    def _write_configuration(self) -> None:
        lines = [f"NodeName={node} NodeAddr={self.hosts[node].address} CPUs=8 RealMemory=1000" for node in NODES]
        values = {"host": CONTROLLER, "user": "root", "root": self.root, "nodes": "\n".join(lines)}
        text = CONF.format(controller_port=26817, **values).replace("127.0.0.1", self.hosts[CONTROLLER].address)
        (self.root / "slurm.conf").write_text(text + f"SlurmdTimeout={_DEAD_AFTER}\n")
        self.write_topology()
