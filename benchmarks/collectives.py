"""Collectives over a trimmed trunk: flat, by level, Open MPI's, and how near each comes to what the trunk allows.

    python benchmarks/collectives.py [--quick] [--ranks 4 8 16] [--trunk 200mbit] [--report FILE]

Four hosts in two supernodes, each host in a network namespace of its own; the kernel throttles every host's link and,
to a tenth of it, the trunk between the supernodes. Real ranks take turns: gloo's flat collective and ours, each of the
same tensors, whose results are compared. `by host` has two levels, the host and the rest; `by level` has three, as this
network, and sends large tensors in pieces. Open MPI's own collectives are measured after them on the same network, if
`mpirun` and mpi4py are there. Bytes on the trunk are those that the switch's port counted, not ours. The bound is the
time that the trunk needs for the bytes that must pass it in one direction: an all-reduce's tensor, half of what a
reduce-scatter takes or an all-gather gives, and of an all-to-all what one half of the ranks sends to the other.
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
from namespaces import (
    NetworkLab,
    add_rank_options,
    bytes_per_second,
    run_mpi_ranks,
    run_ranks,
    supernode_lab,
    why_no_lab,
    why_no_mpi,
)
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
from danlu.torch_compat import all_gather_single, reduce_scatter_single

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
MOST_BYTES = 2 << 30
"""And those whose tensors of all ranks together are larger: several results of each are held at once."""
PATIENCE = 3000.0

FLAT, BY_HOST, BY_LEVEL, OPEN_MPI = "gloo", "by host", "by level", "Open MPI"
OURS = (BY_HOST, BY_LEVEL)
METHODS = (FLAT, *OURS)

Collective = Callable[[Tensor], Tensor]


def flat_all_reduce(tensor: Tensor) -> Tensor:
    found = tensor.clone()
    dist.all_reduce(found, group=flat_group())
    return found


def flat_reduce_scatter(tensor: Tensor) -> Tensor:
    found = tensor.new_empty(tensor.numel() // dist.get_world_size())
    reduce_scatter_single(found, tensor, flat_group())
    return found


def flat_all_gather(tensor: Tensor) -> Tensor:
    mine = share(tensor)
    found = torch.empty_like(tensor)
    all_gather_single(found, mine, flat_group())
    return found


def flat_all_to_all(tensor: Tensor) -> Tensor:
    found = torch.empty_like(tensor)
    dist.all_to_all_single(found, tensor, group=flat_group())
    return found


@cache
def flat_group() -> dist.ProcessGroup:
    """A group that torch made, of all ranks: Danlu's own does not go through gloo alone."""
    return dist.new_group(list(range(dist.get_world_size())))


def share(tensor: Tensor) -> Tensor:
    """What one rank gives to an all-gather that gives as much as the tensor."""
    return tensor[: tensor.numel() // dist.get_world_size()]


def all_reduce_over(tensor: Tensor, over: LevelGroups) -> Tensor:
    found = tensor.clone()
    hierarchical.all_reduce(found, over)
    return found


FLAT_COLLECTIVES: dict[str, Collective] = {
    "all-reduce": flat_all_reduce,
    "reduce-scatter": flat_reduce_scatter,
    "all-gather": flat_all_gather,
    "all-to-all": flat_all_to_all,
}
LEVEL_COLLECTIVES: dict[str, Callable[[Tensor, LevelGroups], Tensor]] = {
    "all-reduce": all_reduce_over,
    "reduce-scatter": hierarchical.reduce_scatter,
    "all-gather": lambda tensor, over: hierarchical.all_gather(share(tensor), over).view(-1),
    "all-to-all": hierarchical.all_to_all,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two sizes, no bars, for CI")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16], help="numbers of ranks, multiples of 4")
    parser.add_argument("--trunk", default=TRUNK, help="rate of the trunk, in tc's format")
    add_report_option(parser)
    add_rank_options(parser)
    parser.add_argument("--port", help=argparse.SUPPRESS)
    parser.add_argument("--mpi", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.mpi:
        mpi_rank_main(asked)
        return 0
    if asked.rank is not None:
        rank_main(asked)
        return 0
    if reason := why_no_lab():
        print(reason, file=sys.stderr)
        return 2
    without_mpi = why_no_mpi()
    if without_mpi:
        print(f"Open MPI is not measured: {without_mpi}", file=sys.stderr)
    rows: list[dict[str, Any]] = []
    with supernode_lab(INSIDE, asked.trunk, nodes=2, hosts_each=HOSTS // 2) as lab, Progress() as progress:
        task = progress.add_task("numbers of ranks", total=len(asked.ranks))
        for ranks in asked.ranks:
            rows += measure(lab, ranks, asked.trunk, asked.quick, not without_mpi)
            progress.advance(task)
    missed = [] if asked.quick else misses(rows)
    show(rows, missed)
    figures = {"inside": INSIDE, "trunk": asked.trunk, "bar": BAR, "rows": rows, "missed": missed}
    write_report(asked.report, "collectives", figures)
    print(json.dumps({"benchmark": "collectives", **figures}))
    return int(bool(missed))


def measure(lab: NetworkLab, ranks: int, trunk: str, quick: bool, with_mpi: bool) -> list[dict[str, Any]]:
    """Start the ranks on their hosts, and let them measure everything."""
    with tempfile.TemporaryDirectory() as folder:
        port = "/".join(lab.port("trunk", 0))
        told = ["--folder", folder, "--trunk", trunk, "--port", port, *(["--quick"] if quick else [])]
        run_ranks(lab.hosts, ranks, [__file__, *told], PATIENCE)
        rows: list[dict[str, Any]] = json.loads((Path(folder) / f"{FLAT}.json").read_text())
        if with_mpi:
            run_mpi_ranks(lab.hosts, ranks, [__file__, *told, "--mpi", "--world", str(ranks)], Path(folder), PATIENCE)
            rows += json.loads((Path(folder) / f"{OPEN_MPI}.json").read_text())
        return rows


def rank_main(asked: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    each = asked.world // HOSTS
    place = RankInfo(asked.rank, asked.world, asked.rank % each, asked.store, bytes(32))
    world = World.join(place, "gloo", rendezvous(place))
    levels = {
        BY_HOST: world.level_groups(range(asked.world), (each, HOSTS), "by host"),
        BY_LEVEL: world.level_groups(range(asked.world), (each, HOSTS // 2, 2), "by level"),
    }

    def collectives(operation: str) -> dict[str, Collective]:
        over = LEVEL_COLLECTIVES[operation]

        def by(groups: LevelGroups) -> Collective:
            return lambda tensor: over(tensor, groups)

        return {FLAT: FLAT_COLLECTIVES[operation], **{method: by(groups) for method, groups in levels.items()}}

    def slowest(seconds: float) -> float:
        taken = torch.tensor(seconds, dtype=torch.float64)
        world.all_reduce(taken, "max")
        return float(taken)

    rows = measure_all(asked, asked.rank, collectives, world.barrier, slowest)
    if asked.rank == 0:
        (asked.folder / f"{FLAT}.json").write_text(json.dumps(rows))
    world.barrier()
    world.shutdown()


def mpi_rank_main(asked: argparse.Namespace) -> None:
    """A rank that `mpirun` started."""
    from mpi4py import MPI  # it may not be there

    torch.set_num_threads(1)
    everyone = MPI.COMM_WORLD
    ranks = everyone.Get_size()

    def all_reduce(tensor: Tensor) -> Tensor:
        found = torch.empty_like(tensor)
        everyone.Allreduce(tensor.numpy(), found.numpy())
        return found

    def reduce_scatter(tensor: Tensor) -> Tensor:
        found = tensor.new_empty(tensor.numel() // ranks)
        everyone.Reduce_scatter_block(tensor.numpy(), found.numpy())
        return found

    def all_gather(tensor: Tensor) -> Tensor:
        found = torch.empty_like(tensor)
        everyone.Allgather(tensor[: tensor.numel() // ranks].numpy(), found.numpy())
        return found

    def all_to_all(tensor: Tensor) -> Tensor:
        found = torch.empty_like(tensor)
        everyone.Alltoall(tensor.numpy(), found.numpy())
        return found

    methods = {
        "all-reduce": all_reduce,
        "reduce-scatter": reduce_scatter,
        "all-gather": all_gather,
        "all-to-all": all_to_all,
    }
    rank = everyone.Get_rank()
    rows = measure_all(
        asked,
        rank,
        lambda operation: {OPEN_MPI: methods[operation]},
        everyone.Barrier,
        lambda seconds: everyone.allreduce(seconds, MPI.MAX),
    )
    if rank == 0:
        (asked.folder / f"{OPEN_MPI}.json").write_text(json.dumps(rows))


def measure_all(
    asked: argparse.Namespace,
    rank: int,
    collectives: Callable[[str], dict[str, Collective]],
    barrier: Callable[[], None],
    slowest: Callable[[float], float],
) -> list[dict[str, Any]]:
    """Every operation and size, by every method in turn; `slowest` is the largest of all ranks' values."""
    namespace, _, interface = asked.port.partition("/")

    def port_bytes(size: int) -> int:
        return sent_bytes(namespace, interface) if rank == 0 and size >= LARGE else 0

    rows = []
    for operation in FLAT_COLLECTIVES:
        methods = collectives(operation)
        for size in QUICK_SIZES if asked.quick else SIZES:
            least = trunk_bytes(operation, size, asked.world)
            bound = least / bytes_per_second(asked.trunk)
            if bound > MOST_SECONDS or size * asked.world > MOST_BYTES:
                continue
            torch.manual_seed(rank)
            tensor = torch.randint(0, 4, (size // 4,)).float()
            expected, *others = methods.values()
            result = expected(tensor)  # warms up, too
            if any(not torch.equal(other(tensor), result) for other in others):
                raise RuntimeError(f"{operation} of {size} bytes: methods differ")
            del result
            seconds: dict[str, list[float]] = {name: [] for name in methods}
            counted: dict[str, list[int]] = {name: [] for name in methods}
            for turn in range(max(2, min(15, round(3.0 / max(bound, 0.01))))):
                for name in sorted(methods, reverse=bool(turn % 2)):
                    barrier()
                    before, began = port_bytes(size), time.perf_counter()
                    methods[name](tensor)
                    seconds[name].append(slowest(time.perf_counter() - began))
                    counted[name].append(port_bytes(size) - before)
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
                        "least_trunk_bytes": least,
                        "trunk_bytes": statistics.median(counted[name]) if size >= LARGE else None,
                    }
                )
    return rows


def trunk_bytes(operation: str, size: int, ranks: int) -> float:
    """Bytes that must pass the trunk in one direction."""
    return {"all-reduce": size, "all-to-all": ranks // 2 * size / 2}.get(operation, size / 2)


def misses(rows: list[dict[str, Any]]) -> list[str]:
    """What is below its bar: large messages against the bound, small ones against the flat collective."""
    found = []
    for (operation, ranks, size), here in by_case(rows).items():
        ours, flat, bound = here[chosen(size)]["seconds"], here[FLAT]["seconds"], here[FLAT]["bound"]
        what = f"{operation} of {format_bytes(size)} on {ranks} ranks"
        if size >= LARGE and bound / ours < BAR:
            found.append(f"{what}: {bound / ours:.0%} of the bound")
        if size <= SMALL and ours > flat:
            found.append(f"{what}: {ours / flat:.2f} × the flat collective's time")
    return found


def chosen(size: int) -> str:
    """Which of ours is held to the bars: small messages take as few steps as they can."""
    return BY_LEVEL if size >= LARGE else BY_HOST


def by_case(rows: list[dict[str, Any]]) -> dict[tuple[str, int, int], dict[str, dict[str, Any]]]:
    """The rows of every operation, number of ranks and size, by method."""
    cases: dict[tuple[str, int, int], dict[str, dict[str, Any]]] = {}
    for row in rows:
        cases.setdefault((row["operation"], row["ranks"], row["bytes"]), {})[row["method"]] = row
    return cases


def show(rows: list[dict[str, Any]], missed: list[str]) -> None:
    methods = [method for method in (*METHODS, OPEN_MPI) if any(row["method"] == method for row in rows)]
    table = Table(title="Collectives over two supernodes")
    for column in ("operation", "ranks", "bytes", *methods, "bound", f"× the least on the trunk: {', '.join(methods)}"):
        table.add_column(column, justify="left" if column == "operation" else "right")
    for (operation, ranks, size), here in by_case(rows).items():
        times = [f"{1e3 * here[method]['seconds']:,.1f} ms" for method in methods]
        sent = [here[method]["trunk_bytes"] for method in methods]
        least = here[FLAT]["least_trunk_bytes"]
        shown = "" if None in sent else ", ".join(f"{each / least:.2f}" for each in sent)
        table.add_row(operation, str(ranks), format_bytes(size), *times, f"{1e3 * here[FLAT]['bound']:,.1f} ms", shown)
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    for line in missed:
        console.print(f"missed: {line}")


if __name__ == "__main__":
    sys.exit(main())
