"""A rank is killed: how long until the run takes a new step, and how long with torchrun?

    python benchmarks/recovery.py [--kills 20] [--ranks 2] [--report FILE]

The same model trains under Danlu and in a bare loop under torchrun, which restarts all its workers from its last
checkpoint (one a step, as cheap as it can be: `torch.save` to memory). In turns, a rank of each is killed by SIGKILL:
rank 0 and others alternate. Measured from the kill to the end of the first step after it, as both write it down; for
Danlu also until the death was seen, with a warm fork server and with one that had to import torch again. Beside it,
the time of `import torch` alone. Exits non-zero if a kill is not survived, or a bar is missed: 1 s with a warm server,
1.3 times `import torch` without, 0.2 s to see it. The last line is JSON.
"""

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from reports import ROOT, add_report_option, write_report
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

sys.path.insert(0, str(ROOT / "tests" / "multiprocess"))
from chaos_campaign import ChaosRun

from danlu.comm.flight_record import read_flights
from danlu.resilience.process_state import read_process_state

WARM_BAR, COLD_BAR, SEEN_BAR = 1.0, 1.3, 0.2
_PATIENCE = 60.0
_BARE_PATIENCE = 30.0
"""Seconds after which a kill counts as not survived: torchrun takes a few, or hangs."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="of each kind")
    parser.add_argument("--ranks", type=int, default=2)
    add_report_option(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), arguments.kills, arguments.ranks)
    figures = summarize(found)
    show(figures)
    write_report(arguments.report, "recovery", figures)
    print(json.dumps({"benchmark": "recovery", **figures}))
    return 0 if figures["passed"] else 1


def measure(folder: Path, kills: int, ranks: int) -> dict[str, list[float]]:
    """Seconds from each kill to the first new step, by engine; also until it was seen, and of an import."""
    found: dict[str, list[float]] = {"warm": [], "cold": [], "seen": [], "torchrun": [], "import": []}
    with Progress() as bar:
        task = bar.add_task("kills", total=3 * kills)
        for number in range(kills):
            danlu = DanluRun(folder / f"danlu-{number}", ranks)
            for name, act in (("warm", danlu.kill), ("cold", danlu.kill_with_server)):
                step, seen = act(number % ranks)
                found[name].append(step)
                found["seen"] += [seen] if name == "warm" else []
                bar.advance(task)
            danlu.close()
            bare = TorchrunRun(folder / f"torchrun-{number}", ranks)
            found["torchrun"].append(bare.kill(number % ranks))
            bare.close()
            began = time.perf_counter()
            subprocess.run([sys.executable, "-c", "import torch"], check=True)
            found["import"].append(time.perf_counter() - began)
            bar.advance(task)
    return found


def summarize(found: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, with the slowest; a kill that was not survived is infinitely slow and counted."""
    figures: dict[str, Any] = {}
    for name, values in found.items():
        finite = [value for value in values if np.isfinite(value)]
        figures[name] = {
            "kills": len(values),
            "survived": len(finite),
            "median_s": float(np.median(finite)) if finite else None,
            "longest_s": max(finite, default=None),
        }
    warm, cold, seen, bare = (figures[name]["median_s"] or np.inf for name in ("warm", "cold", "seen", "import"))
    survived = all(figures[name]["survived"] == figures[name]["kills"] for name in ("warm", "cold"))
    figures["cold_to_import"] = cold / bare
    figures["passed"] = bool(survived and warm <= WARM_BAR and cold <= COLD_BAR * bare and seen <= SEEN_BAR)
    return figures


def show(figures: dict[str, Any]) -> None:
    table = Table("", "survived", "median", "longest")
    rows = {
        "warm": "danlu, kill to new step",
        "cold": "danlu, its fork server killed too",
        "seen": "danlu, kill to recovery begun",
        "torchrun": "torchrun, kill to new step",
        "import": "import torch",
    }
    for name, words in rows.items():
        one = figures[name]
        median, longest = (f"{one[key]:.2f} s" if one[key] else "–" for key in ("median_s", "longest_s"))
        table.add_row(words, f"{one['survived']} of {one['kills']}", median, longest)
    Console().print(table)
    print("passed" if figures["passed"] else "FAILED: a bar was missed")


class DanluRun:
    """A run of Danlu that goes on for as long as it is needed."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self._run = ChaosRun(folder, ranks, steps=1_000_000)
        self._run.prepare()
        self._run.start()
        self._run.next_step(5)

    def kill(self, rank: int) -> tuple[float, float]:
        """Seconds until the next step after the kill of a rank, and until its death was seen."""
        return self._after(self._pids()[rank : rank + 1])

    def kill_with_server(self, rank: int) -> tuple[float, float]:
        """The same, with the process that would fork a new rank at once."""
        pid = self._pids()[rank]
        return self._after([read_process_state(pid).parent, pid])

    def close(self) -> None:
        """End it."""
        self._run.interrupt()

    def _pids(self) -> list[int]:
        return [flight.pid for flight in read_flights(self._run.run.path, collectives=False)]

    def _after(self, pids: list[int]) -> tuple[float, float]:
        time.sleep(random.uniform(0.0, 0.05))
        began = time.time()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        step, recovery = self._run.first_step_after(began, _PATIENCE)
        self._run.next_step(5)
        if step is None or recovery is None:
            return np.inf, np.inf
        return step.time - began, recovery.time - recovery.seconds - began


class TorchrunRun:
    """The same model in a bare loop under torchrun, which keeps its state in memory that outlives a worker."""

    def __init__(self, folder: Path, ranks: int) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--max-restarts=3"]
        command += ["--monitor-interval=0.1", "--master-addr=127.0.0.1", f"--master-port={port}"]
        command += [str(ROOT / "benchmarks" / "bare_recovery.py"), str(folder)]
        with (folder / "output.txt").open("wb") as output:
            self._process = subprocess.Popen(
                command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=output, stderr=output, start_new_session=True
            )
        self._wait(lambda steps: len(steps) >= 5)

    def kill(self, rank: int) -> float:
        """Seconds until the next step after the kill of a rank."""
        pid = int((self._folder / f"pid-{rank}").read_text())
        time.sleep(random.uniform(0.0, 0.05))
        began = time.time()
        os.kill(pid, signal.SIGKILL)
        steps = self._wait(lambda steps: steps[-1:] and steps[-1][1] > 0, _BARE_PATIENCE)
        return min((when for when, restarts in steps if restarts > 0), default=np.inf) - began

    def close(self) -> None:
        """End it, and what it kept."""
        with suppress(ProcessLookupError):  # it may have given up
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for rank in self._pids():  # torchrun's workers are in groups of their own
            with suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)
        for kept in Path("/dev/shm").glob(f"danlu-bare-{self._folder.name}-{self._process.pid}-*"):
            kept.unlink()

    def _pids(self) -> list[int]:
        return [int(path.read_text()) for path in self._folder.glob("pid-*")]

    def _wait(self, enough: Any, seconds: float = _PATIENCE) -> list[tuple[float, int]]:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self._process.poll() is None:
            file = self._folder / "steps"
            text = file.read_text() if file.exists() else ""
            steps = [
                (float(line.split()[0]), int(line.split()[1])) for line in text.splitlines() if line.count(" ") == 1
            ]
            if enough(steps):
                return steps
            time.sleep(0.01)
        return []


if __name__ == "__main__":
    sys.exit(main())
