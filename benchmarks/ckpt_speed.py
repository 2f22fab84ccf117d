"""How long a checkpoint holds the training up, and how close writing and reading come to the disk.

    python benchmarks/ckpt_speed.py [--quick] [--folder DIR]

Two ranks hold a state of 2 GiB (512 MiB with --quick). In every round, in turns, in the same processes: a plain copy of
the same bytes into memory that is there already; a save of ours that waits for its copy; one whose copy runs beside the
next forward; a load from the copy in memory, and one by somebody who finds none there; PyTorch's `dcp.save`,
`dcp.async_save` and `torch.save`; and fio with O_DIRECT on the same disk. Times are those of the slower rank. Exits
non-zero if a bar is missed. The last line is JSON.
"""

import argparse
import json
import mmap
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from danlu.comm.join import Place, join, leave, meet
from danlu.storage.checkpoint.checkpoints import Checkpoints, open_checkpoints
from danlu.storage.store import open_store

RANKS = 2
ROWS, COLUMNS = 4096, 4096
BARS: Mapping[str, tuple[str, float]] = {
    "stall": ("≤", 1.05),
    "first stall": ("≤", 1.05),
    "stall beside a forward": ("≤", 0.15),
    "persist": ("≥", 0.85),
    "load": ("≥", 0.85),
}


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--quick", action="store_true", help="a quarter of the state and fewer rounds")
    options.add_argument("--folder", type=Path, default=Path(), help="where to write; must be on the disk in question")
    options.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    asked = options.parse_args()
    if asked.rank is not None:
        _be_rank(asked.rank, asked.port, asked.work, asked.quick)
        return 0
    if shutil.which("fio") is None:
        sys.stderr.write("fio must be there, for the disk's own bandwidth; install it (Debian: apt-get install fio)\n")
        return 2
    work = Path(tempfile.mkdtemp(prefix="ckpt-speed-", dir=asked.folder))
    try:
        return _tell(_run(work, asked.quick))
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _run(work: Path, quick: bool) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, __file__, "--port", str(port), "--work", str(work), *(["--quick"] if quick else [])]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ranks = [subprocess.Popen([*command, "--rank", str(rank)], env=environment) for rank in range(RANKS)]
    if sum(rank.wait() for rank in ranks):
        raise SystemExit("a rank failed")
    return dict(json.loads((work / "result.json").read_text()))


# --- one rank


def _be_rank(rank: int, port: int, work: Path, quick: bool) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    place = Place(rank=rank, world=RANKS, local_rank=rank, store=f"127.0.0.1:{port}")
    join(place, "gloo", meet(place))
    tensors = _state(32 if not quick else 8)
    held = sum(tensor.to_local().nbytes for tensor in tensors.values())
    fake = Forward(seconds=held / 3e9)
    figures: dict[str, list[float]] = {}
    checkpoints = open_checkpoints(work / "ours", 1, torch.device("cpu"))
    checkpoints.prepare(tensors)
    copy = Copy(tensors, held)
    for turn in range(2 if quick else 5):
        _round(turn, work, tensors, checkpoints, copy, fake, held, figures)
        if rank == 0:
            print(f"round {turn + 1}", file=sys.stderr)
    checkpoints.close()
    if rank == 0:
        (work / "result.json").write_text(json.dumps({"bytes": RANKS * held, "figures": figures}))
    leave()


def _state(count: int) -> dict[str, DTensor]:
    mesh = init_device_mesh("cpu", (RANKS,))
    seeded = torch.Generator().manual_seed(dist.get_rank())
    return {
        f"model.layers.{number}.weight": DTensor.from_local(
            torch.randn(ROWS // RANKS, COLUMNS, generator=seeded), mesh, [Shard(0)], run_check=False
        )
        for number in range(count)
    }


class Copy:
    """The same bytes into memory that is there already: what no save can beat."""

    def __init__(self, tensors: Mapping[str, DTensor], held: int) -> None:
        self.sources = [tensor.to_local().numpy() for tensor in tensors.values()]
        target = np.frombuffer(mmap.mmap(-1, held), dtype=np.float32)
        target[:] = 0
        starts = np.cumsum([0, *(source.size for source in self.sources)])
        self.targets = [
            target[start : start + source.size].reshape(source.shape)
            for start, source in zip(starts, self.sources, strict=False)
        ]

    def __call__(self) -> None:
        """Copy."""
        for source, target in zip(self.sources, self.targets, strict=True):
            np.copyto(target, source)


class Forward:
    """Work of about so many seconds that leaves the state alone."""

    def __init__(self, seconds: float) -> None:
        self.a = torch.randn(512, 512)
        began = time.perf_counter()
        for _ in range(20):
            self.a @ self.a
        self.times = max(1, round(seconds / ((time.perf_counter() - began) / 20)))

    def __call__(self) -> None:
        """Work."""
        for _ in range(self.times):
            self.a @ self.a


def _round(
    turn: int,
    work: Path,
    tensors: dict[str, DTensor],
    checkpoints: Checkpoints,
    copy: Copy,
    forward: Forward,
    held: int,
    figures: dict[str, list[float]],
) -> None:
    def note(name: str, seconds: float) -> None:
        figures.setdefault(name, []).append(seconds)

    def timed(name: str, act: Callable[[], Any]) -> Any:
        dist.barrier()
        began = time.perf_counter()
        found = act()
        note(name, _slowest(time.perf_counter() - began))
        return found

    step = 10 * turn + 1
    timed("copy", copy)
    dist.barrier()
    checkpoints.begin(step, tensors, {"step": step})
    checkpoints.wait()
    (ours,) = checkpoints.outcomes()
    assert not ours.failure, ours.failure
    note("stall", _slowest(ours.stall))
    note("persisted", _slowest(ours.seconds - ours.stall))
    note("disk writes", _from_rank_0(lambda: _fio(work, "write", held * RANKS)))
    timed("copy again", copy)

    timed("forward", forward)
    dist.barrier()
    began = time.perf_counter()
    checkpoints.begin(step + 1, tensors, {"step": step + 1}, overlap=True)
    waited = time.perf_counter() - began
    forward()
    waited += checkpoints.settle()
    note("stall beside a forward", _slowest(waited))
    timed("forward while draining", forward)
    checkpoints.wait()
    checkpoints.outcomes()

    note("disk reads", _from_rank_0(lambda: _fio(work, "read", held * RANKS)))
    _drop_caches(work)
    timed("load from memory", lambda: checkpoints.load(step + 1, tensors))
    assert str(work) not in "".join(checkpoints.read_from), checkpoints.read_from
    elsewhere = Checkpoints(open_store(str(work / "ours")), 1, torch.device("cpu"), staging=work / "another-host")
    timed("load", lambda: elsewhere.load(step + 1, tensors))
    assert set(elsewhere.read_from) == {str((work / "ours").resolve())}, "from the disk, and no nearer copy"
    elsewhere.close()

    plain: dict[str, Tensor] = dict(tensors)
    timed("dcp.save", lambda: dcp.save(plain, checkpoint_id=work / "dcp", no_dist=False))
    # In a group of its own: its thread's collectives would meet those of the training in any order, and hang.
    apart = dist.new_group()
    future = timed(
        "dcp.async_save, stall",
        lambda: dcp.async_save(plain, checkpoint_id=work / "dcp-async", process_group=apart),
    )
    future.result()
    dist.destroy_process_group(apart)
    local = {name: tensor.to_local() for name, tensor in tensors.items()}
    timed("torch.save", lambda: torch.save(local, work / f"torch-{dist.get_rank()}.pt"))
    dist.barrier()
    if dist.get_rank() == 0:
        for folder in ("dcp", "dcp-async"):
            shutil.rmtree(work / folder)
    (work / f"torch-{dist.get_rank()}.pt").unlink()
    os.sync()
    dist.barrier()


def _slowest(seconds: float) -> float:
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def _from_rank_0(measure: Callable[[], float]) -> float:
    dist.barrier()
    found = torch.tensor(measure() if dist.get_rank() == 0 else 0.0, dtype=torch.float64)
    dist.broadcast(found, 0)
    return float(found)


def _fio(work: Path, mode: str, size: int) -> float:
    """Seconds that fio takes for so many bytes with O_DIRECT: the best of two ways to keep a disk busy."""
    best = 0.0
    for depth, jobs in ((16, 1), (8, 2)):
        command = [
            "fio", "--name=disk", f"--rw={mode}", "--bs=4M", "--direct=1", "--ioengine=libaio", f"--iodepth={depth}",
            f"--numjobs={jobs}", f"--size={size // jobs}", f"--directory={work}", "--group_reporting",
            "--output-format=json", *(["--end_fsync=1"] if mode == "write" else ["--invalidate=1"]),
        ]  # fmt: skip
        found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        best = max(best, found["jobs"][0][mode]["bw_bytes"])
    for left in work.glob("disk.*"):
        if mode == "read":
            left.unlink()
    return size / best


def _drop_caches(work: Path) -> None:
    """Let the system forget the files, so that a read is one from the disk."""
    dist.barrier()
    for file in (work / "ours").rglob("*.pack"):
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    dist.barrier()


# --- the table


def _tell(found: dict[str, Any]) -> int:
    figures: dict[str, list[float]] = found["figures"]
    gib = found["bytes"] / 2**30
    copies = [min(pair) for pair in zip(figures["copy"], figures["copy again"], strict=True)]
    ratios = {
        "stall": _ratios(figures["stall"], copies),
        "stall beside a forward": _ratios(figures["stall beside a forward"], copies),
        "persist": _ratios(figures["disk writes"], figures["persisted"]),
        "load": _ratios(figures["disk reads"], figures["load"]),
        "load from memory": _ratios(figures["disk reads"], figures["load from memory"]),
        "forward while draining": _ratios(figures["forward while draining"], figures["forward"]),
        "dcp.save": _ratios(figures["dcp.save"], copies),
        "dcp.async_save, stall": _ratios(figures["dcp.async_save, stall"], copies),
        "torch.save": _ratios(figures["torch.save"], copies),
    }
    result = {name: median(each) for name, each in ratios.items()} | {"first stall": ratios["stall"][0]}
    table = Table(title=f"A state of {gib:.1f} GiB on {RANKS} ranks, {len(copies)} rounds")
    for column in ("", "median", "least", "most", "of"):
        table.add_column(column, justify="left" if column in ("", "of") else "right")
    disk = dict.fromkeys(("persist", "load", "load from memory"), "fio's speed")
    against = disk | {"forward while draining": "a forward alone"}
    for name, each in ratios.items():
        table.add_row(
            name, *(f"{value:.2f} ×" for value in (median(each), min(each), max(each))), against.get(name, "a copy")
        )
    seconds = Table(title="Seconds (medians)")
    for column in ("", "seconds", "GB/s"):
        seconds.add_column(column, justify="left" if not column else "right")
    for name, each in figures.items():
        speed = "" if "forward" in name else f"{found['bytes'] / median(each) / 1e9:.2f}"
        seconds.add_row(name, f"{median(each):.3f}", speed)
    bars = Table(title="Bars")
    for column in ("", "measured", "asked", ""):
        bars.add_column(column)
    missed = 0
    for name, (sign, bar) in BARS.items():
        good = result[name] <= bar if sign == "≤" else result[name] >= bar
        missed += not good
        bars.add_row(name, f"{result[name]:.2f}", f"{sign} {bar:.2f}", "reached" if good else "missed")
    console = Console(width=120)
    for each_table in (seconds, table, bars):
        console.print(each_table)
    print(json.dumps({"bytes": found["bytes"], "ratios": result, "rounds": len(copies), "missed": missed}))
    return 1 if missed else 0


def _ratios(above: list[float], below: list[float]) -> list[float]:
    return [a / b for a, b in zip(above, below, strict=True)]


if __name__ == "__main__":
    sys.exit(main())
