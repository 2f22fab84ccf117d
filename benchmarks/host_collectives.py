"""Collectives of ranks on one host: through the memory that they share, and over gloo's sockets.

    python benchmarks/host_collectives.py [--quick] [--ranks 2 4] [--report FILE]

Real ranks on this machine take turns, call by call: a group of Danlu's world, and a group of gloo beside it with the
same members. Results are compared. A collective's time is that of its last rank. The last column is what a copy of the
same bytes within one process takes. The last line is JSON.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from reports import add_report_option, write_report
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from danlu.comm.rendezvous import FILE_SCHEME, RankInfo, rendezvous
from danlu.comm.world import World
from danlu.spec.byte_format import format_bytes
from danlu.torch_compat import all_gather_single, reduce_scatter_single

SIZES = tuple(8**power << 10 for power in range(7))
"""Bytes of the whole tensor, 1 KiB to 256 MiB; of an all-to-all, what is sent and what is received together."""
QUICK_SIZES = (1 << 10, 4 << 20)
SECONDS = 2.0
"""For a size of an operation, about."""
Run = Callable[[Tensor, Tensor, dist.ProcessGroup | None], None]

OPERATIONS: dict[str, Run] = {
    "all-reduce": lambda full, part, group: dist.all_reduce(full, group=group),
    "reduce-scatter": lambda full, part, group: reduce_scatter_single(part, full, group),
    "all-gather": lambda full, part, group: all_gather_single(full, part, group),
    "all-to-all": lambda full, part, group: dist.all_to_all_single(*full.chunk(2), group=group),
    "broadcast": lambda full, part, group: dist.broadcast(full, 0, group=group),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two sizes, for CI")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    add_report_option(parser)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank is not None:
        rank_main(asked.rank, asked.ranks[0], asked.folder, QUICK_SIZES if asked.quick else SIZES)
        return 0
    rows: list[dict[str, Any]] = []
    with Progress() as progress:
        task = progress.add_task("numbers of ranks", total=len(asked.ranks))
        for ranks in asked.ranks:
            rows += measure(ranks, asked.quick)
            progress.advance(task)
    show(rows)
    figures = {"rows": rows}
    write_report(asked.report, "host_collectives", figures)
    print(json.dumps({"benchmark": "host_collectives", **figures}))
    return 0


def measure(ranks: int, quick: bool) -> list[dict[str, Any]]:
    """Start the ranks, and let them measure everything."""
    with tempfile.TemporaryDirectory() as folder:
        told = ["--ranks", str(ranks), "--folder", folder, *(["--quick"] if quick else [])]
        started = [subprocess.Popen([sys.executable, __file__, *told, "--rank", str(rank)]) for rank in range(ranks)]
        codes = [process.wait() for process in started]
        if any(codes):
            raise RuntimeError(f"a rank of {ranks} failed: see above")
        return json.loads((Path(folder) / "rows.json").read_text())


def rank_main(rank: int, ranks: int, folder: Path, sizes: tuple[int, ...]) -> None:
    torch.set_num_threads(1)
    place = RankInfo(rank, ranks, rank, f"{FILE_SCHEME}{folder / 'store'}")
    world = World.join(place, "gloo", rendezvous(place))
    groups = {"memory": dist.group.WORLD, "gloo": dist.new_group(list(range(ranks)))}
    rows = []
    for operation, run in OPERATIONS.items():
        for size in sizes:
            rows.append({"operation": operation, **compare(world, groups, operation, run, size)})
    if rank == 0:
        (folder / "rows.json").write_text(json.dumps(rows))
    world.barrier()
    world.shutdown()


def compare(
    world: World, groups: dict[str, dist.ProcessGroup | None], operation: str, run: Run, size: int
) -> dict[str, Any]:
    """Both groups in turns, on the same tensors."""
    drawn = torch.randint(0, 4, (size // 4,), generator=torch.Generator().manual_seed(world.rank)).float()
    results, first = {}, 0.0
    for name, group in groups.items():  # warms up, too
        tensors = drawn.clone(), drawn.chunk(world.size)[world.rank].clone()
        first += seconds_of(partial(run, *tensors, group))
        results[name] = tensors
    if not all(map(torch.equal, results["memory"], results["gloo"])):
        raise RuntimeError(f"{operation} of {size} bytes on {world.size} ranks: memory and gloo differ")
    turns = torch.tensor([max(3, min(200, int(SECONDS / first)))])
    world.broadcast(turns)
    seconds: dict[str, list[float]] = {name: [] for name in groups}
    for turn in range(int(turns)):
        for name in sorted(groups, reverse=bool(turn % 2)):
            results[name][0].zero_()  # sums stay finite
            seconds[name].append(timed(world, partial(run, *results[name], groups[name])))
    copied = [seconds_of(partial(results["gloo"][0].copy_, drawn)) for _ in range(5)]
    memory, gloo = (statistics.median(seconds[name]) for name in ("memory", "gloo"))
    return {
        "ranks": world.size,
        "bytes": size,
        "memory": memory,
        "gloo": gloo,
        "ratio": gloo / memory,
        "copy": statistics.median(copied),
    }


def seconds_of(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def timed(world: World, act: Callable[[], None]) -> float:
    """Seconds until the last rank is done."""
    world.barrier()
    taken = torch.tensor(seconds_of(act), dtype=torch.float64)
    world.all_reduce(taken, "max")
    return float(taken)


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="Collectives inside a host")
    for column in ("operation", "ranks", "bytes", "shared memory", "gloo", "gloo / memory", "a copy"):
        table.add_column(column, justify="left" if column == "operation" else "right")
    for row in rows:
        table.add_row(
            row["operation"],
            str(row["ranks"]),
            format_bytes(row["bytes"]),
            *(f"{1e3 * row[each]:,.3f} ms" for each in ("memory", "gloo")),
            f"{row['ratio']:.2f}",
            f"{1e3 * row['copy']:,.3f} ms",
        )
    Console(width=None if sys.stdout.isatty() else 140).print(table)


if __name__ == "__main__":
    sys.exit(main())
