"""One rank of the dry run's truth test: the real loop under torch's profiler, then dry in the same process."""

import json
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from layouts import LAYOUTS, Layout, recipe
from profiled import dry_calls, dry_products, profiled_loop

from danlu.comm.mesh import ParallelMesh, build_mesh
from danlu.comm.rendezvous import RankInfo, rendezvous
from danlu.comm.world import World
from danlu.dryrun.dry_run import dry_run_rank
from danlu.framework.batch_loader import PREFETCH_BATCHES, BatchLoader
from danlu.spec.recipe import Recipe
from danlu.storage.data.token_shards import ShuffledDataset, TokenShards


def set_device_guard() -> None:
    """Let FakeTensors be made after real steps in torch 2.10 and 2.11 with CUDA, on a machine without.

    They set this guard themselves, and the process ends with a segmentation fault if that comes late.
    """
    if torch.version.cuda and not torch.cuda.is_available() and hasattr(torch._C, "_ensureCUDADeviceGuardSet"):
        torch._C._ensureCUDADeviceGuardSet()


def layouts(world: int) -> list[Layout]:
    """The layouts of a world; compiled code is not what a dry run runs."""
    return [layout for layout in LAYOUTS if layout.plan.degrees.world == world and not layout.plan.compile]


def prepare(layout: Layout, made: Recipe, shards: Path) -> tuple[ParallelMesh, BatchLoader]:
    """The groups of a layout, and its batches."""
    mesh = build_mesh(layout.plan, World.adopt(shares_memory=False), layout.cluster, experts=made.model.moe is not None)
    samples = ShuffledDataset(TokenShards.open(shards), made.batch.length, made.seed)
    return mesh, BatchLoader(samples, made.batch, made.model.vocabulary, mesh)


def main() -> None:
    rank, world, port, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    set_device_guard()
    place = RankInfo(rank=rank, world_size=world, local_rank=rank, endpoint=f"127.0.0.1:{port}", token=bytes(32))
    store = rendezvous(place)
    chosen = sys.argv[5].split("|") if sys.argv[5] else [layout.name for layout in layouts(world)]
    for number, layout in enumerate(layout for layout in layouts(world) if layout.name in chosen):
        made = recipe(layout.model, str(folder / "shards"), layout.changes)
        joined = World.join(place, "gloo", dist.PrefixStore(f"layout{number}", store), shares_memory=False)
        real = profiled_loop(made, partial(prepare, layout, made, folder / "shards"))
        joined.shutdown()
        dry = dry_run_rank(made, layout.plan, layout.cluster, rank)
        # Tokens and targets of a batch. Between two steps the loader's prefetched ones are alive; a dry run has
        # none; in the step the current one is not seen, because on a CPU its memory is numpy's.
        batch = 2 * 8 * made.batch.tokens // layout.plan.degrees.dp // layout.plan.degrees.cp
        result = {
            "name": layout.name,
            "calls": [sorted(calls.items()) for calls in (dry_calls(dry), real.calls)],
            "products": [sorted(products.items()) for products in (dry_products(dry), real.products)],
            "dry_peak": dry.peak.total,
            "peaks": [peak - PREFETCH_BATCHES * batch + batch for peak in real.peaks],
            "largest_call": max(call.payload * (call.ranks + 1) for call in dry.collectives),
        }
        (folder / f"dry-{world}-{number}-{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
