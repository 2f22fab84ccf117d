"""How long a checkpoint delays the training in total, and how close writing and reading come to the disk's speed.

    python benchmarks/ckpt_speed.py [--quick] [--no-fio] [--folder DIR] [--report FILE]

Two ranks hold a state of 2 GiB (512 MiB with --quick). In every round, in turns, in the same processes: copies of the
same bytes into preallocated memory, in three ways of which the fastest counts; a save of ours that waits for its copy;
one whose copy overlaps the next forward, with forwards continuing until the save has ended; a load from the copy in
memory, and one without that copy; PyTorch's `dcp.save`, `dcp.async_save` with its stager kept between saves (and
prepared before the first, as ours is), the same with staging in the background, `dcp.async_save` with its defaults, and
`torch.save`; and fio with O_DIRECT on the same disk.

The cost of a save is complete: the seconds of all steps until it has ended, minus those of as many steps alone. A step
that is slower during an upload counts too. Times are those of the slower rank. Exits non-zero if a bar is missed, or
with --no-fio not measured. The last line is JSON.
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ckpt_rivals import Copy, Forward, Others, seconds_of, slowest
from reports import add_report_option, write_report
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from danlu.comm.rendezvous import RankInfo, rendezvous
from danlu.comm.world import World
from danlu.storage.checkpoint.engine import CheckpointEngine, open_checkpoint_engine
from danlu.storage.store.base import open_store

RANKS = 2
ROWS, COLUMNS = 4096, 4096
BARS: Mapping[str, tuple[str, float]] = {
    "stall": ("≤", 1.05),
    "first stall": ("≤", 1.05),
    "whole cost beside forwards": ("≤", 0.15),
    "persist": ("≥", 0.85),
    "load": ("≥", 0.85),
}


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--quick", action="store_true", help="a quarter of the state and fewer rounds")
    options.add_argument("--folder", type=Path, default=Path(), help="where to write; must be on the disk in question")
    options.add_argument("--no-fio", action="store_true", help="leave out what is compared with the disk")
    add_report_option(options)
    options.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    asked = options.parse_args()
    if asked.rank is not None:
        _be_rank(asked.rank, asked.port, asked.work, asked.quick, fio=not asked.no_fio)
        return 0
    if not asked.no_fio and shutil.which("fio") is None:
        sys.stderr.write("fio must be there, for the disk's own bandwidth; install it (Debian: apt-get install fio)\n")
        return 2
    work = Path(tempfile.mkdtemp(prefix="ckpt-speed-", dir=asked.folder))
    try:
        flags = [flag for flag, given in (("--quick", asked.quick), ("--no-fio", asked.no_fio)) if given]
        return _tell(_run(work, flags), asked.report)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _run(work: Path, flags: list[str]) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, __file__, "--port", str(port), "--work", str(work), *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ranks = [subprocess.Popen([*command, "--rank", str(rank)], env=environment) for rank in range(RANKS)]
    if sum(rank.wait() for rank in ranks):
        raise SystemExit("a rank failed")
    return dict(json.loads((work / "result.json").read_text()))


# --- one rank


def _be_rank(rank: int, port: int, work: Path, quick: bool, *, fio: bool) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    place = RankInfo(rank=rank, world_size=RANKS, local_rank=rank, endpoint=f"127.0.0.1:{port}", token=bytes(32))
    joined = World.join(place, "gloo", rendezvous(place))
    tensors = _state(32 if not quick else 8)
    held = sum(tensor.to_local().nbytes for tensor in tensors.values())
    fake = Forward(seconds=held / 3e9)
    figures: dict[str, list[float]] = {}
    checkpoints = open_checkpoint_engine(work / "ours", 1, World.adopt())
    checkpoints.allocate_staging(tensors)
    copy, others = Copy(tensors, held), Others(tensors, work)
    for turn in range(2 if quick else 5):
        _round(turn, work, tensors, checkpoints, copy, others, fake, held if fio else 0, figures)
        if rank == 0:
            print(f"round {turn + 1}", file=sys.stderr)
    others.close()
    checkpoints.close()
    if rank == 0:
        (work / "result.json").write_text(json.dumps({"bytes": RANKS * held, "figures": figures}))
    joined.shutdown()


def _state(count: int) -> dict[str, DTensor]:
    mesh = init_device_mesh("cpu", (RANKS,))
    seeded = torch.Generator().manual_seed(dist.get_rank())
    return {
        f"model.layers.{number}.weight": DTensor.from_local(
            torch.randn(ROWS // RANKS, COLUMNS, generator=seeded), mesh, [Shard(0)], run_check=False
        )
        for number in range(count)
    }


def _round(
    turn: int,
    work: Path,
    tensors: dict[str, DTensor],
    checkpoints: CheckpointEngine,
    copy: Copy,
    others: Others,
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
        note(name, slowest(time.perf_counter() - began))
        return found

    def beside(name: str, begin: Callable[[], Any], settle: Callable[[], Any], done: Callable[[], bool]) -> None:
        """Steps from the start of a save until it has ended; the time beyond as many steps alone."""
        dist.barrier()
        alone = min(seconds_of(forward) for _ in range(2))
        dist.barrier()
        began = time.perf_counter()
        begin()
        waited, steps = time.perf_counter() - began, 0
        while not steps or not done():
            forward()
            steps += 1
            if steps == 1:  # the optimizer changes the state here
                settling = time.perf_counter()
                settle()
                waited += time.perf_counter() - settling
                first = time.perf_counter() - began
        spent = time.perf_counter() - began
        note(f"{name}: waited", slowest(waited))
        note(f"{name}: first step longer by", slowest(first - alone))
        note(f"{name}: whole cost", slowest(spent - steps * alone))

    step = 10 * turn + 1
    note("copy", copy())
    dist.barrier()
    checkpoints.async_save(step, tensors, {"step": step})
    checkpoints.wait_for_saves()
    (ours,) = checkpoints.pop_results()
    assert not ours.error, ours.error
    note("stall", slowest(ours.stall))
    note("persisted", slowest(ours.seconds - ours.stall))
    if held:
        note("disk writes", _from_rank_0(lambda: _fio(work, "write", held * RANKS)))
    note("copy again", copy())

    timed("forward", forward)
    beside(
        "ours",
        lambda: checkpoints.async_save(step + 1, tensors, {"step": step + 1}, overlap=True),
        checkpoints.wait_for_staging,
        lambda: not checkpoints._saver.busy,
    )
    checkpoints.wait_for_saves()
    checkpoints.pop_results()

    if held:
        note("disk reads", _from_rank_0(lambda: _fio(work, "read", held * RANKS)))
    _drop_caches(work)
    timed("load from memory", lambda: checkpoints.load(step + 1, tensors))
    assert str(work) not in "".join(checkpoints.bytes_by_store), checkpoints.bytes_by_store
    elsewhere = CheckpointEngine(open_store(str(work / "ours")), 1, World.adopt(), staging=work / "another-host")
    timed("load", lambda: elsewhere.load(step + 1, tensors))
    assert set(elsewhere.bytes_by_store) == {str((work / "ours").resolve())}, "from the disk, and no nearer copy"
    elsewhere.close()
    _time_others(work, tensors, others, timed, beside)


def _time_others(
    work: Path,
    tensors: dict[str, DTensor],
    others: Others,
    timed: Callable[[str, Callable[[], Any]], Any],
    beside: Callable[[str, Callable[[], Any], Callable[[], Any], Callable[[], bool]], None],
) -> None:
    timed("dcp.save", lambda: dcp.save(others.tensors, checkpoint_id=work / "dcp", no_dist=False))
    timed("dcp.async_save by default: stall", lambda: others.async_save(None))()
    timed("dcp.async_save, stager kept: stall", lambda: others.async_save(others.kept))()
    ended = threading.Event()

    def begin() -> None:
        ended.clear()
        wait = others.async_save(others.beside)
        threading.Thread(target=lambda: (wait(), ended.set())).start()

    beside("dcp.async_save, staged beside", begin, lambda: others.staged.result(), ended.is_set)
    ended.wait()
    local = {name: tensor.to_local() for name, tensor in tensors.items()}
    timed("torch.save", lambda: torch.save(local, work / f"torch-{dist.get_rank()}.pt"))
    dist.barrier()
    if dist.get_rank() == 0:
        for folder in ("dcp", "dcp-async"):
            shutil.rmtree(work / folder)
    (work / f"torch-{dist.get_rank()}.pt").unlink()
    os.sync()
    dist.barrier()


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
    """Drop the files from the page cache, so that a read is from the disk."""
    dist.barrier()
    for file in (work / "ours").rglob("*.pack"):
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    dist.barrier()


# --- the table


def _tell(found: dict[str, Any], report: Path | None) -> int:
    figures: dict[str, list[float]] = found["figures"]
    gib = found["bytes"] / 2**30
    copies = [min(pair) for pair in zip(figures["copy"], figures["copy again"], strict=True)]
    of_a_copy = {
        "stall": "stall",
        "ours: waited": "waited beside forwards",
        "ours: first step longer by": "first step longer by",
        "ours: whole cost": "whole cost beside forwards",
        "dcp.save": "dcp.save",
        "dcp.async_save by default: stall": "dcp.async_save by default, stall",
        "dcp.async_save, stager kept: stall": "dcp.async_save with its stager kept, stall",
        "dcp.async_save, staged beside: waited": "dcp.async_save staged beside forwards, waited",
        "dcp.async_save, staged beside: first step longer by": "dcp.async_save staged beside, first step longer by",
        "dcp.async_save, staged beside: whole cost": "dcp.async_save staged beside forwards, whole cost",
        "torch.save": "torch.save",
    }
    ratios = {title: _ratios(figures[name], copies) for name, title in of_a_copy.items()}
    if "disk reads" in figures:
        ratios |= {
            "persist": _ratios(figures["disk writes"], figures["persisted"]),
            "load": _ratios(figures["disk reads"], figures["load"]),
            "load from memory": _ratios(figures["disk reads"], figures["load from memory"]),
        }
    result = {name: median(each) for name, each in ratios.items()} | {"first stall": ratios["stall"][0]}
    table = Table(title=f"A state of {gib:.1f} GiB on {RANKS} ranks, {len(copies)} rounds")
    for column in ("", "median", "least", "most", "of"):
        table.add_column(column, justify="left" if column in ("", "of") else "right")
    against = dict.fromkeys(("persist", "load", "load from memory"), "fio's speed")
    for name, each in ratios.items():
        table.add_row(
            name,
            *(f"{value:.2f} ×" for value in (median(each), min(each), max(each))),
            against.get(name, "the quickest copy"),
        )
    seconds = Table(title="Seconds (medians)")
    for column in ("", "seconds", "GB/s"):
        seconds.add_column(column, justify="left" if not column else "right")
    for name, each in figures.items():
        speed = "" if "forward" in name or ": " in name else f"{found['bytes'] / median(each) / 1e9:.2f}"
        seconds.add_row(name, f"{median(each):.3f}", speed)
    bars = Table(title="Bars")
    for column in ("", "measured", "asked", ""):
        bars.add_column(column)
    missed = 0
    for name, (sign, bar) in BARS.items():
        value = result.get(name)
        good = value is not None and (value <= bar if sign == "≤" else value >= bar)
        missed += not good
        verdict = "reached" if good else "missed" if value is not None else "not measured"
        bars.add_row(name, "–" if value is None else f"{value:.2f}", f"{sign} {bar:.2f}", verdict)
    console = Console(width=120)
    for each_table in (seconds, table, bars):
        console.print(each_table)
    told = {"bytes": found["bytes"], "ratios": result, "rounds": len(copies), "missed": missed}
    write_report(report, "ckpt_speed", told | {"each_round": ratios, "seconds": figures})
    print(json.dumps(told))
    return 1 if missed else 0


def _ratios(above: list[float], below: list[float]) -> list[float]:
    return [a / b for a, b in zip(above, below, strict=True)]


if __name__ == "__main__":
    sys.exit(main())
