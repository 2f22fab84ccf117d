"""Collectives over a trimmed trunk: flat, hierarchical, and how near each comes to what the trunk allows.

    python benchmarks/collectives.py [--quick] [--ranks 4 8 16] [--trunk 200mbit] [--report FILE]

Four hosts in two supernodes, each host in a network namespace of its own; the kernel throttles every host's link and,
to a tenth of it, the trunk between the supernodes. Real ranks take turns: gloo's flat collective and
ours over the levels of this network, each of the same tensors, whose results are compared. Bytes on the trunk are those
that the switch's port counted, not ours. The bound is the time that the trunk needs for the bytes that must pass it: an
all-reduce's tensor once in each direction, and of an all-to-all what one half of the ranks sends to the other.
Needs root and iproute2. Exits non-zero if a bar is missed. The last line is JSON.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from namespaces import NetworkLab, bytes_per_second, run_ranks, supernode_lab, why_no_lab
from reports import add_report_option, write_report
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from danlu.comm import hierarchical
from danlu.comm.level_groups import LevelGroups
from danlu.comm.rendezvous import RankInfo, rendezvous
from danlu.comm.world import World
from danlu.scheduler.network_lab import sent_bytes
from danlu.spec.byte_format import format_bytes

HOSTS = 4
INSIDE, TRUNK = "2gbit", "200mbit"
SIZES = tuple(4**power << 10 for power in range(10))
"""Bytes of one rank's tensor: 1 KiB to 256 MiB."""
QUICK_SIZES = (4 << 10, 4 << 20)
LARGE, SMALL = 16 << 20, 64 << 10
"""From where on the bound counts, and up to where being faster than the flat collective does."""
BAR = 0.9
MOST_SECONDS = 12.0
"""Sizes whose bound is longer are left out."""
PATIENCE = 3000.0

Method = Callable[[Tensor, LevelGroups], Tensor]


def flat_all_reduce(tensor: Tensor, _: LevelGroups) -> Tensor:
    found = tensor.clone()
    dist.all_reduce(found, group=flat_group())
    return found


def hierarchical_all_reduce(pieces: int) -> Method:
    def run(tensor: Tensor, over: LevelGroups) -> Tensor:
        found = tensor.clone()
        hierarchical.all_reduce(found, over, pieces)
        return found

    return run


def flat_all_to_all(tensor: Tensor, _: LevelGroups) -> Tensor:
    found = torch.empty_like(tensor)
    dist.all_to_all_single(found, tensor, group=flat_group())
    return found


@cache
def flat_group() -> dist.ProcessGroup:
    """A group that torch made, of all ranks: Danlu's own does not go through gloo alone."""
    return dist.new_group(list(range(dist.get_world_size())))


def hierarchical_all_to_all(pieces: int) -> Method:
    return lambda tensor, over: hierarchical.all_to_all(tensor, over, pieces)


METHODS: dict[str, dict[str, Method]] = {
    "all-reduce": {
        "flat": flat_all_reduce,
        "hierarchical": hierarchical_all_reduce(1),
        "pipelined": hierarchical_all_reduce(8),
    },
    "all-to-all": {
        "flat": flat_all_to_all,
        "hierarchical": hierarchical_all_to_all(1),
        "pipelined": hierarchical_all_to_all(8),
    },
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two sizes, no bars, for CI")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16], help="numbers of ranks, multiples of 4")
    parser.add_argument("--trunk", default=TRUNK, help="rate of the trunk, in tc's format")
    add_report_option(parser)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--world", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--port", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank is not None:
        rank_main(asked)
        return 0
    if reason := why_no_lab():
        print(reason, file=sys.stderr)
        return 2
    rows: list[dict[str, Any]] = []
    with supernode_lab(INSIDE, asked.trunk, nodes=2, hosts_each=HOSTS // 2) as lab, Progress() as progress:
        task = progress.add_task("numbers of ranks", total=len(asked.ranks))
        for ranks in asked.ranks:
            rows += measure(lab, ranks, asked.trunk, asked.quick)
            progress.advance(task)
    missed = [] if asked.quick else misses(rows)
    show(rows, missed)
    figures = {"inside": INSIDE, "trunk": asked.trunk, "bar": BAR, "rows": rows, "missed": missed}
    write_report(asked.report, "collectives", figures)
    print(json.dumps({"benchmark": "collectives", **figures}))
    return int(bool(missed))


def measure(lab: NetworkLab, ranks: int, trunk: str, quick: bool) -> list[dict[str, Any]]:
    """Start the ranks on their hosts, and let them measure everything."""
    with tempfile.TemporaryDirectory() as folder:
        port = "/".join(lab.port("trunk", 0))
        told = ["--folder", folder, "--trunk", trunk, "--port", port, *(["--quick"] if quick else [])]
        run_ranks(lab.hosts, ranks, [__file__, *told], PATIENCE)
        return json.loads((Path(folder) / "rows.json").read_text())


def rank_main(asked: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    each = asked.world // HOSTS
    place = RankInfo(asked.rank, asked.world, asked.rank % each, asked.store, bytes(32))
    world = World.join(place, "gloo", rendezvous(place))
    over = world.level_groups(range(asked.world), (each, HOSTS // 2, 2), "benchmark")
    namespace, _, interface = asked.port.partition("/")
    rows = []
    for operation, methods in METHODS.items():
        for size in QUICK_SIZES if asked.quick else SIZES:
            bound = trunk_bytes(operation, size, asked.world) / bytes_per_second(asked.trunk)
            if bound > MOST_SECONDS:
                continue
            torch.manual_seed(asked.rank)
            tensor = torch.randint(0, 4, (size // 4,)).float()
            results = {name: method(tensor, over) for name, method in methods.items()}  # warms up, too
            if any(not torch.equal(result, results["flat"]) for result in results.values()):
                raise RuntimeError(f"{operation} of {size} bytes: methods differ")
            turns = max(2, min(15, round(3.0 / max(bound, 0.01))))
            seconds: dict[str, list[float]] = {name: [] for name in methods}
            counted: dict[str, list[int]] = {name: [] for name in methods}
            for turn in range(turns):
                for name in sorted(methods, reverse=bool(turn % 2)):
                    before = sent_bytes(namespace, interface) if asked.rank == 0 and size >= LARGE else 0
                    seconds[name].append(timed(world, methods[name], tensor, over))
                    if asked.rank == 0 and size >= LARGE:
                        counted[name].append(sent_bytes(namespace, interface) - before)
            for name in methods:
                rows.append(
                    {
                        "operation": operation,
                        "ranks": asked.world,
                        "bytes": size,
                        "method": name,
                        "seconds": statistics.median(seconds[name]),
                        "fastest": min(seconds[name]),
                        "slowest": max(seconds[name]),
                        "bound": bound,
                        "least_trunk_bytes": trunk_bytes(operation, size, asked.world),
                        "trunk_bytes": statistics.median(counted[name]) if counted[name] else None,
                    }
                )
    if asked.rank == 0:
        (asked.folder / "rows.json").write_text(json.dumps(rows))
    world.barrier()
    world.shutdown()


def timed(world: World, method: Method, tensor: Tensor, over: LevelGroups) -> float:
    """Seconds until the last rank is done."""
    world.barrier()
    began = time.perf_counter()
    method(tensor, over)
    taken = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    world.all_reduce(taken, "max")
    return float(taken)


def trunk_bytes(operation: str, size: int, ranks: int) -> float:
    """Bytes that must pass the trunk in one direction."""
    return size if operation == "all-reduce" else ranks // 2 * size / 2


def misses(rows: list[dict[str, Any]]) -> list[str]:
    """What is below its bar: large messages against the bound, small ones against the flat collective."""
    found = []
    cases = sorted({(row["operation"], row["ranks"], row["bytes"]) for row in rows})
    for operation, ranks, size in cases:
        here = {
            row["method"]: row
            for row in rows
            if (row["operation"], row["ranks"], row["bytes"]) == (operation, ranks, size)
        }
        ours = min(here["hierarchical"]["seconds"], here["pipelined"]["seconds"])
        what = f"{operation} of {format_bytes(size)} on {ranks} ranks"
        if size >= LARGE and here["flat"]["bound"] / ours < BAR:
            found.append(f"{what}: {here['flat']['bound'] / ours:.0%} of the bound")
        if size <= SMALL and ours > here["flat"]["seconds"]:
            found.append(f"{what}: {ours / here['flat']['seconds']:.2f} × the flat collective's time")
    return found


def show(rows: list[dict[str, Any]], missed: list[str]) -> None:
    table = Table(title="Collectives over two supernodes")
    for column in (
        "operation",
        "ranks",
        "bytes",
        "flat",
        "hierarchical",
        "pipelined",
        "bound",
        "trunk bytes: flat, ours",
    ):
        table.add_column(column, justify="left" if column == "operation" else "right")
    for row in rows:
        if row["method"] != "flat":
            continue
        same = [each for each in rows if all(each[key] == row[key] for key in ("operation", "ranks", "bytes"))]
        times = {each["method"]: each["seconds"] for each in same}
        counted = {each["method"]: each["trunk_bytes"] for each in same}
        shown = (
            f"{counted['flat'] / row['least_trunk_bytes']:.2f}, {counted['pipelined'] / row['least_trunk_bytes']:.2f}"
            if counted["flat"]
            else ""
        )
        table.add_row(
            row["operation"],
            str(row["ranks"]),
            format_bytes(row["bytes"]),
            *(f"{1e3 * times[name]:,.1f} ms" for name in ("flat", "hierarchical", "pipelined")),
            f"{1e3 * row['bound']:,.1f} ms",
            shown,
        )
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    for line in missed:
        console.print(f"missed: {line}")


if __name__ == "__main__":
    sys.exit(main())
