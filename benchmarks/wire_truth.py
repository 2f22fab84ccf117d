"""Are the dry run's bytes on the wire accurate? Compared with the kernel's counters of every rank's interface.

    python benchmarks/wire_truth.py [--quick] [--report FILE]

Every rank trains in its own network namespace, over gloo, and reads the kernel's counter of bytes that its interface
sent before and after a step of the training loop. The dry run's wire bytes must equal those, up to the bar, which
allows for Ethernet, IP and TCP headers, acknowledgements and gloo's own small messages. gloo has no reduce-scatter and
runs an all-reduce instead, which sends twice as much; the prediction is made for what gloo does. Needs root and
iproute2. Exits non-zero if a layout misses. The last line is JSON.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from dryrun_truth import AnyTokens, Layout, layouts, recipe
from namespaces import INTERFACE, LabHost, supernodes, why_no_lab
from reports import add_report_option, write_report
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from danlu.comm.mesh import ParallelMesh, build_mesh
from danlu.comm.rendezvous import RankInfo, rendezvous
from danlu.comm.world import World
from danlu.cost.collectives import wire_bytes
from danlu.dryrun.dry_run import assume_balanced_routing, dry_run_rank
from danlu.framework.batch_loader import BatchLoader
from danlu.framework.build import build_train_state
from danlu.framework.loop import TrainStages, run_training_loop
from danlu.framework.stages import FixedData
from danlu.report import formatting
from danlu.spec.recipe import Recipe
from danlu.spec.trace import Trace

OVER, UNDER = 0.03, 0.001
"""How much more, and how much less, than predicted the kernel may count, as shares of the prediction."""
STEPS = 3
RATE = "10gbit"
PORT = 29517
PATIENCE = 600.0
NAMES = ("fsdp", "tp, recompute selective", "cp", "replicas, accumulate 2", "1f1b, 4 places", "ep", "fsdp × tp × ep 4")
QUICK = ("fsdp", "tp, recompute selective", "ep")
SENT = Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the layouts of a sample, for CI")
    add_report_option(parser)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--world", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    names = QUICK if arguments.quick else NAMES
    chosen = [layout for layout in layouts() if layout.name in names]
    if arguments.rank is not None:
        rank_main(arguments, chosen)
        return
    if reason := why_no_lab():
        sys.exit(f"bytes on the wire are counted in network namespaces, which cannot be made here: {reason}")
    with tempfile.TemporaryDirectory() as folder, supernodes(RATE, RATE) as hosts:
        found = run_worlds(Path(folder), hosts, chosen, arguments.quick)
    rows = [judged(layout, found[layout.name]) for layout in chosen]
    Console(width=None if sys.stdout.isatty() else 140).print(table(rows))
    missed = [row["layout"] for row in rows if not row["passed"]]
    summary = {"benchmark": "wire_truth", "bars": [-UNDER, OVER], "passed": not missed, "missed": missed, "rows": rows}
    print(json.dumps(summary))
    write_report(arguments.report, "wire_truth", summary)
    sys.exit(1 if missed else 0)


def run_worlds(
    folder: Path, hosts: list[LabHost], chosen: list[Layout], quick: bool
) -> dict[str, list[dict[str, Any]]]:
    """Start every world size once, one rank per host."""
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("layouts", total=sum(layout.plan.degrees.world for layout in chosen))
        for world in sorted({layout.plan.degrees.world for layout in chosen}):
            progress.update(bar, description=f"{world} ranks")
            ranks = [
                start_rank(folder, host, number, world, hosts[0], quick) for number, host in enumerate(hosts[:world])
            ]
            deadline = time.monotonic() + PATIENCE
            try:
                while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
                    if time.monotonic() > deadline:
                        sys.exit(f"{world} ranks took more than {PATIENCE:.0f} s")
                    progress.update(bar, completed=len(list(folder.glob("*.json"))))
                    time.sleep(0.2)
            finally:
                for rank in ranks:
                    if rank.poll() is None:
                        rank.kill()
            if any(rank.wait() for rank in ranks):
                sys.exit(f"ranks ended with exit codes {[rank.returncode for rank in ranks]}")
    results: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(folder.glob("*.json")):
        result = json.loads(file.read_text())
        results.setdefault(result["layout"], []).append(result)
    return results


def start_rank(
    folder: Path, host: LabHost, rank: int, world: int, first: LabHost, quick: bool
) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, "--world", str(world), "--rank", str(rank), "--folder", str(folder)]
    command += ["--store", f"{first.address}:{PORT + world}", *(["--quick"] if quick else [])]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE}
    return subprocess.Popen([*host.enter, *command], env=environment)


def rank_main(arguments: argparse.Namespace, chosen: list[Layout]) -> None:
    torch.set_num_threads(1)
    rank, world = arguments.rank, arguments.world
    place = RankInfo(rank=rank, world_size=world, local_rank=0, endpoint=arguments.store, token=bytes(32))
    store = rendezvous(place)
    for number, layout in enumerate(chosen):
        if layout.plan.degrees.world != world:
            continue
        made = recipe(layout)
        joined = World.join(place, "gloo", dist.PrefixStore(f"layout{number}", store))
        mesh = build_mesh(layout.plan, World.adopt(), None, experts=layout.experts)
        counted = kernel_bytes(made, mesh)
        joined.shutdown()
        dry = dry_run_rank(made, layout.plan, None, rank)
        result = {
            "layout": layout.name,
            "payload": sum(call.total_payload for call in dry.collectives if call.operation != "receive"),
            "wire": sum(call.total_wire for call in dry.collectives),
            "predicted": gloo_bytes(dry),
            "counted": counted,
        }
        (arguments.folder / f"{number:02}-{rank}.json").write_text(json.dumps(result))


def kernel_bytes(made: Recipe, mesh: ParallelMesh) -> int:
    """Bytes that this host's interface sent in a step, the median of a few."""
    state, forward_backward = build_train_state(made, mesh.plan, mesh)
    assume_balanced_routing(state)
    batches = BatchLoader(AnyTokens(made), made.batch, made.model.vocabulary, mesh)
    counts = []
    for step in range(1, STEPS + 2):
        dist.barrier()
        before = int(SENT.read_text())
        stages = TrainStages(FixedData(batches), forward_backward)
        run_training_loop(made.model_copy(update={"steps": step}), state, mesh, stages)
        dist.barrier()  # a few hundred bytes more
        counts.append(int(SENT.read_text()) - before)
    return round(statistics.median(counts[1:]))


def gloo_bytes(trace: Trace) -> int:
    """Bytes on the wire of a rank's step as gloo sends them."""
    as_gloo = {"reduce_scatter": "all_reduce"}
    return round(
        sum(
            call.count * wire_bytes(as_gloo.get(call.operation, call.operation), call.ranks, call.payload)
            for call in trace.collectives
        )
    )


def judged(layout: Layout, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """A layout by its worst rank."""
    worst = max(ranks, key=lambda rank: abs(rank["counted"] / rank["predicted"] - 1))
    difference = worst["counted"] / worst["predicted"] - 1
    passed = -UNDER <= difference <= OVER and len(ranks) == layout.plan.degrees.world
    return worst | {"ranks": len(ranks), "difference": difference, "passed": passed}


def table(rows: list[dict[str, Any]]) -> Table:
    made = Table(title="Bytes that a rank sends in a step (worst rank)", title_justify="left")
    made.add_column("layout")
    for name in ("ranks", "payload", "wire, by rings", "wire, as gloo does", "counted by the kernel", "difference"):
        made.add_column(name, justify="right")
    made.add_column("")
    for row in rows:
        sizes = (formatting.size(row[name]) for name in ("payload", "wire", "predicted", "counted"))
        verdict = "passed" if row["passed"] else "[red]missed"
        made.add_row(row["layout"], str(row["ranks"]), *sizes, f"{row['difference']:+.2%}", verdict)
    return made


if __name__ == "__main__":
    main()
