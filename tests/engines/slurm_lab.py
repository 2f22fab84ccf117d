"""A real Slurm on loopback: munged, slurmctld and four slurmd in one folder, for the time of a test session.

No systemd, no cgroup, no root: every daemon runs in the foreground as a child of the tests and as the user who
runs them, and is ended by its own process id. The nodes' processors are declared, not counted
(`config_overrides`), so four nodes of eight fit on a laptop.
"""

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel", "sinfo")
SWITCHES = {"sn0": ("n0", "n2"), "sn1": ("n1", "n3")}
"""Leaf switches, interleaved so that the order of the names is not the order of the network."""
NODES = tuple(sorted(node for nodes in SWITCHES.values() for node in nodes))

# Below 32768, where Linux hands out ports for outgoing connections: a slurmd must find its port free.
CONTROLLER_PORTS = range(26817, 26900)
NODE_PORTS = range(27000, 27900)

# cred_expire: a requeued job waits until the credentials of its first start have run out, two minutes by default.
CONF = """\
ClusterName=danlu-test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={root}/munge/socket,cred_expire=5
CryptoType=crypto/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/pids/slurmctld
SlurmdPidFile={root}/pids/%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
TopologyPlugin=topology/tree
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=0
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
KillWait=2
MinJobAge=600
{nodes}
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing_programs() -> list[str]:
    """Programs of Slurm that this machine lacks."""
    return [program for program in PROGRAMS if shutil.which(program, path=_path()) is None]


def _path() -> str:
    """The search path with the folders of daemons, which a plain user's often lacks."""
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


def _free(ports: range) -> list[int]:
    """The ports of the range that nobody holds."""
    free = []
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("0.0.0.0", port))
            except OSError:
                continue
            free.append(port)
    return free


@dataclass
class SlurmLab:
    """One Slurm: `start`, use with `environment`, `stop`."""

    root: Path
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def environment(self) -> Mapping[str, str]:
        """What a user of this cluster has in the environment: where its configuration lies."""
        return {**os.environ, "PATH": _path(), "SLURM_CONF": str(self.root / "slurm.conf")}

    def start(self) -> None:
        """Write the configuration, start every daemon, and return when the four nodes are idle."""
        self.make_folders()
        self._start_munge()
        self._write_configuration()
        conf = str(self.root / "slurm.conf")
        self._daemon("slurmctld", "-D", "-c", "-f", conf)
        for node in NODES:
            self._daemon("slurmd", "-D", "-f", conf, "-N", node, log=node)
        self._wait_until_idle()

    def make_folders(self) -> None:
        """For what the daemons write."""
        for folder in ("munge", "state", "pids", "log", *(f"spool/{node}" for node in NODES)):
            (self.root / folder).mkdir(parents=True, mode=0o755)

    def stop(self) -> None:
        """Cancel what still runs, then end the daemons, the controller before its authentication."""
        if len(self.daemons) == 2 + len(NODES):
            user = getpass.getuser()
            subprocess.run(["scancel", "--user", user], env=self.environment, check=False, timeout=30)
            self._until(lambda: not self.run("squeue", "--noheader"), 60, "cancelled jobs to leave the queue")
        for daemon in reversed(self.daemons):
            daemon.terminate()
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self.daemons.clear()

    def run(self, *command: str) -> str:
        """Run a command of Slurm's and return what it says."""
        return subprocess.run(
            command, env=self.environment, check=True, capture_output=True, text=True, timeout=180
        ).stdout

    def _daemon(self, *command: str, log: str = "") -> None:
        with (self.root / "log" / (log or command[0])).open("wb") as output:
            program = shutil.which(command[0], path=_path())
            assert program is not None
            self.daemons.append(
                subprocess.Popen(
                    [program, *command[1:]],
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # a Ctrl-C at the tests ends them through `stop`, in order
                )
            )

    def _start_munge(self) -> None:
        folder = self.root / "munge"
        key = folder / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        files = {"key-file": key, "socket": folder / "socket", "pid-file": folder / "pid", "seed-file": folder / "seed"}
        options = [f"--{name}={path}" for name, path in files.items()]
        # --force: the folder lies under a temporary one that others may write to.
        self._daemon("munged", "--foreground", "--force", *options)
        self._until((folder / "socket").exists, 20, "munged's socket")

    def _write_configuration(self) -> None:
        host = socket.gethostname().split(".")[0]
        ports = _free(NODE_PORTS)
        lines = [
            f"NodeName={node} NodeAddr=127.0.0.1 NodeHostname={host} Port={port} CPUs=8 RealMemory=1000 State=UNKNOWN"
            for node, port in zip(NODES, ports, strict=False)
        ]
        values = {"host": host, "user": getpass.getuser(), "root": self.root, "nodes": "\n".join(lines)}
        text = CONF.format(controller_port=_free(CONTROLLER_PORTS)[0], **values)
        (self.root / "slurm.conf").write_text(text)
        self.write_topology()

    def write_topology(self) -> None:
        """Two leaf switches and a spine."""
        leaves = [f"SwitchName={switch} Nodes={','.join(nodes)}" for switch, nodes in SWITCHES.items()]
        (self.root / "topology.conf").write_text(
            "\n".join([*leaves, f"SwitchName=spine Switches={','.join(SWITCHES)}\n"])
        )

    def _wait_until_idle(self) -> None:
        def idle() -> bool:
            try:
                answer = self.run("sinfo", "--noheader", "--Node", "--format=%T")
            except subprocess.CalledProcessError:  # the controller does not answer yet
                return False
            return answer.split() == ["idle"] * len(NODES)

        self._until(idle, 60, "all nodes to be idle")

    def _until(self, condition: object, seconds: float, what: str) -> None:
        assert callable(condition)
        deadline = time.monotonic() + seconds
        while not condition():
            ended = [daemon.args for daemon in self.daemons if daemon.poll() is not None]
            if ended or time.monotonic() > deadline:
                logs = "\n".join(f"--- {log.name}\n{log.read_text()[-2000:]}" for log in (self.root / "log").iterdir())
                raise RuntimeError(f"waited {seconds} s for {what}; daemons that ended: {ended}\n{logs}")
            time.sleep(0.2)
