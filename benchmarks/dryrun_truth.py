"""Is the dry run accurate? The same step on real ranks over gloo and dry, layout by layout.

    python benchmarks/dryrun_truth.py [--quick] [--report FILE]

The real side is the training loop itself, measured by torch: the collectives are those that gloo reports, peak bytes
those of torch's allocator, both from torch's profiler (`tests/multiprocess/profiled.py`). Collectives must be the same
(operation, bytes, count), and peak bytes within the bar. Also shown is how much the resident set of the real process
grew over two unprofiled steps: that includes the allocator, libraries and the network's own buffers. Experts are loaded
evenly on both sides; one layout is run again with its real router, for information: all-to-alls and bytes differ there
by nature. Exits non-zero if a layout misses. The last line is JSON.
"""

import argparse
import ctypes
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from reports import add_report_option, write_report
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from danlu.comm.mesh import ParallelMesh, build_mesh
from danlu.comm.rendezvous import RankInfo, rendezvous
from danlu.comm.world import World
from danlu.dryrun.dry_run import assume_balanced_routing, dry_run_rank
from danlu.framework.batch_loader import BatchLoader
from danlu.framework.build import build_train_state
from danlu.framework.loop import TrainStages, run_training_loop
from danlu.framework.stages import FixedData
from danlu.report import formatting
from danlu.spec.model import Model, Moe
from danlu.spec.names import sanitize_name
from danlu.spec.plan import Degrees, PipelineConfig, Plan
from danlu.spec.recipe import BatchConfig, DataConfig, PrecisionConfig, Recipe

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "multiprocess"))
from profiled import Calls, dry_calls, profiled_loop

BAR = 0.03
"""Largest difference of peak bytes, as a share of the real ones."""
PATIENCE = 900.0
"""Seconds that the ranks of one world get for all their layouts."""


@dataclass(frozen=True)
class Layout:
    """A plan and the model it is tried with."""

    name: str
    plan: Plan
    experts: bool = False
    compute: str = "fp32"
    even: bool = True
    quick: bool = False
    """In the sample."""


def layouts() -> list[Layout]:
    def plan(schedule: str = "1f1b", per_rank: int = 1, **settings: Any) -> Plan:
        degrees = Degrees(**{axis: settings.pop(axis) for axis in list(settings) if axis in Degrees.model_fields})
        return Plan(degrees=degrees, pipeline=PipelineConfig(schedule=schedule, stages_per_rank=per_rank), **settings)

    return [
        Layout("fsdp", plan(shard=2), quick=True),
        Layout("fsdp, bf16, recompute full", plan(shard=2, recompute="full"), compute="bf16", quick=True),
        Layout("tp, recompute selective", plan(tp=2, recompute="selective"), quick=True),
        Layout("cp", plan(cp=2)),
        Layout("replicas, accumulate 2", plan(replicate=2, microbatches=2)),
        Layout("gpipe", plan("gpipe", pp=2, microbatches=4)),
        Layout("interleaved", plan("interleaved", 2, pp=2, microbatches=4), quick=True),
        Layout("zero-bubble", plan("zero-bubble", 2, pp=2, microbatches=4)),
        Layout("ep", plan(shard=2, ep=2), experts=True, quick=True),
        Layout("ep, recompute full", plan(shard=2, ep=2, recompute="full"), experts=True),
        Layout("ep, as its router wants", plan(shard=2, ep=2), experts=True, even=False, quick=True),
        Layout("hsdp, bf16", plan(replicate=2, shard=2), compute="bf16"),
        Layout("fsdp × tp, recompute full", plan(shard=2, tp=2, recompute="full")),
        Layout("1f1b, 4 places", plan(pp=4, microbatches=8)),
        Layout("zbv × tp", plan("zbv", 2, pp=2, tp=2, microbatches=4)),
        Layout("fsdp × tp × ep 4", plan(shard=2, tp=2, ep=4), experts=True),
        Layout("1f1b × ep", plan(pp=2, shard=2, ep=2, microbatches=4), experts=True),
        Layout("fsdp × tp × 1f1b", plan(pp=2, shard=2, tp=2, microbatches=4)),
        Layout("interleaved × tp × ep 4", plan("interleaved", 2, pp=2, shard=2, tp=2, ep=4, microbatches=4), True),
    ]


def recipe(layout: Layout) -> Recipe:
    """7 M parameters (14 M with experts) and 2,048 tokens a step: enough that small change does not decide."""
    moe = Moe(experts=8, top_k=2, width=256, dense_layers=1) if layout.experts else None
    model = Model(vocabulary=2048, layers=8, width=256, heads=8, kv_heads=4, mlp_width=768, sequence=128, moe=moe)
    return Recipe(
        name=sanitize_name(layout.name),
        steps=2,
        model=model,
        data=DataConfig(shards="none"),
        batch=BatchConfig(sequences=16, length=128),
        precision=PrecisionConfig(compute=layout.compute),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the layouts of a sample, for CI")
    add_report_option(parser)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--world", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    chosen = [layout for layout in layouts() if layout.quick or not arguments.quick]
    if arguments.rank is not None:
        rank_main(arguments.rank, arguments.world, arguments.port, arguments.folder, chosen)
        return
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        results = run_worlds(Path(folder), chosen, arguments.quick)
    rows = [judged(layout, results[layout.name]) for layout in chosen]
    Console(width=None if sys.stdout.isatty() else 140).print(table(rows))
    missed = [row["layout"] for row in rows if not row["passed"]]
    summary = {
        "benchmark": "dryrun_truth",
        "bar": BAR,
        "passed": not missed,
        "missed": missed,
        "layouts": len(rows),
        "worst": max(abs(row["difference"]) for row in rows if row["judged"]),
        "seconds": round(time.monotonic() - started, 1),
        "rows": rows,
    }
    print(json.dumps(summary))
    write_report(arguments.report, "dryrun_truth", summary)
    sys.exit(1 if missed else 0)


def run_worlds(folder: Path, chosen: list[Layout], quick: bool) -> dict[str, list[dict[str, Any]]]:
    """Start every world size once, and run all its layouts in it: importing torch is slow."""
    worlds = sorted({layout.plan.degrees.world for layout in chosen})
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("layouts", total=sum(layout.plan.degrees.world for layout in chosen))
        for world in worlds:
            progress.update(bar, description=f"{world} ranks")
            ranks = start_ranks(folder, world, quick)
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
            progress.update(bar, completed=len(list(folder.glob("*.json"))))
    results: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(folder.glob("*.json")):
        result = json.loads(file.read_text())
        results.setdefault(result["layout"], []).append(result)
    return results


def start_ranks(folder: Path, world: int, quick: bool) -> list[subprocess.Popen[bytes]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, __file__, "--world", str(world), "--port", str(port), "--folder", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen([*command, "--rank", str(rank), *(["--quick"] if quick else [])], env=environment)
        for rank in range(world)
    ]


def prepare(layout: Layout, made: Recipe) -> tuple[ParallelMesh, BatchLoader]:
    """The groups of a layout, and its batches."""
    mesh = build_mesh(layout.plan, World.adopt(shares_memory=False), None, experts=layout.experts)
    return mesh, BatchLoader(AnyTokens(made), made.batch, made.model.vocabulary, mesh)


def rank_main(rank: int, world: int, port: int, folder: Path, chosen: list[Layout]) -> None:
    torch.set_num_threads(1)
    place = RankInfo(rank=rank, world_size=world, local_rank=rank, endpoint=f"127.0.0.1:{port}", token=bytes(32))
    store = rendezvous(place)
    for number, layout in enumerate(chosen):
        if layout.plan.degrees.world != world:
            continue
        made = recipe(layout)
        joined = World.join(place, "gloo", dist.PrefixStore(f"layout{number}", store), shares_memory=False)
        resident = resident_growth(made, *prepare(layout, made), layout.even)
        real = profiled_loop(made, partial(prepare, layout, made), layout.even)
        joined.shutdown()
        dry = dry_run_rank(made, layout.plan, None, rank)
        result = {
            "layout": layout.name,
            "calls": real.calls.total(),
            "same": real.calls == dry_calls(dry),
            "same_kinds": without_sizes(real.calls) == without_sizes(dry_calls(dry)),
            "real": min(real.peaks),
            "dry": dry.peak.total,
            **resident,
        }
        file = folder / f"{number:02}-{rank}"
        file.with_suffix(".part").write_text(json.dumps(result))
        file.with_suffix(".part").rename(file.with_suffix(".json"))


class AnyTokens:
    """Samples that need no files."""

    def __init__(self, made: Recipe) -> None:
        self.length, self.vocabulary = made.batch.length, made.model.vocabulary

    def read_samples(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows that differ."""
        return (indices[:, None] * 31 + np.arange(self.length + 1)) % self.vocabulary


def without_sizes(calls: Calls) -> Counter[tuple[str, int | None]]:
    """Without the sizes of all-to-alls, which follow the router."""
    counts: Counter[tuple[str, int | None]] = Counter()
    for (operation, size), count in calls.items():
        counts[operation, None if operation == "all_to_all" else size] += count
    return counts


def resident_growth(made: Recipe, mesh: ParallelMesh, batches: BatchLoader, even: bool) -> dict[str, int]:
    """By how much the resident set grows at most over two unprofiled steps of a rank, and from what."""
    before = resident_afresh()
    state, forward_backward = build_train_state(made, mesh.plan, mesh)
    if even:
        assume_balanced_routing(state)
    run_training_loop(made, state, mesh, TrainStages(FixedData(batches), forward_backward))
    grown, file = _status("VmHWM") - before["VmRSS"], _status("RssFile") - before["RssFile"]
    idle = _status("VmRSS")
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return {"resident": grown, "file_pages": file, "kept_free": idle - _status("VmRSS")}


def resident_afresh() -> dict[str, int]:
    """Free the allocator's cache, reset the high-water mark, and return the resident bytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return {key: _status(key) for key in ("VmRSS", "RssFile")}


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def judged(layout: Layout, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """A layout by its worst rank."""
    assert len(ranks) == layout.plan.degrees.world, f"{layout.name}: only {len(ranks)} ranks told"
    worst = max(ranks, key=lambda rank: abs(rank["dry"] / rank["real"] - 1))
    difference = worst["dry"] / worst["real"] - 1
    same = all(rank["same"] for rank in ranks)
    return {
        "layout": layout.name,
        "ranks": len(ranks),
        "calls": sum(rank["calls"] for rank in ranks),
        "same": same,
        "same_kinds": all(rank["same_kinds"] for rank in ranks),
        "dry": worst["dry"],
        "real": worst["real"],
        "difference": difference,
        **{name: max(rank[name] for rank in ranks) for name in ("resident", "file_pages", "kept_free")},
        "resident_ratio": max(rank["resident"] / rank["dry"] for rank in ranks),
        "judged": layout.even,
        "passed": not layout.even or (same and abs(difference) <= BAR),
    }


def table(rows: list[dict[str, Any]]) -> Table:
    made = Table(
        title="Dry run against real ranks (worst rank; experts evenly loaded unless said otherwise)",
        title_justify="left",
    )
    made.add_column("layout")
    for name in ("ranks", "collectives", "the same", "peak dry", "peak real", "difference", "resident", "of the peak"):
        made.add_column(name, justify="right")
    made.add_column("")
    for row in rows:
        sizes = "but sizes of all-to-alls" if row["same_kinds"] else "no"
        made.add_row(
            row["layout"],
            str(row["ranks"]),
            f"{row['calls']:,}",
            "yes" if row["same"] else sizes,
            formatting.size(row["dry"]),
            formatting.size(row["real"]),
            difference(row["dry"], row["real"]),
            f"+{formatting.size(row['resident'])}",
            f"{row['resident_ratio']:.1f} ×",
            "not judged" if not row["judged"] else "passed" if row["passed"] else "[red]missed",
        )
    return made


def difference(dry: int, real: int) -> str:
    """A share of the real bytes, or the bytes themselves where they are negligible."""
    share = dry / real - 1
    return f"{share:+.2%}".replace("%", " %") if abs(share) >= 5e-5 else f"{dry - real:+,} B" if dry != real else "0"


if __name__ == "__main__":
    main()
