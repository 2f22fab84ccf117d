"""One rank of the dry run's truth test: the same step on real ranks, then dry in the same process."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from layouts import LAYOUTS, Layout, recipe

from danlu.comm.join import Place, join, leave, meet
from danlu.comm.mesh import build_mesh
from danlu.framework.dryrun import dry_run, real_step


def layouts(world: int) -> list[Layout]:
    """The layouts of a world; compiled code keeps its collectives to itself."""
    return [layout for layout in LAYOUTS if layout.plan.degrees.world == world and not layout.plan.compile]


def main() -> None:
    rank, world, port, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    place = Place(rank=rank, world=world, local_rank=rank, store=f"127.0.0.1:{port}")
    store = meet(place)
    for number, layout in enumerate(layouts(world)):
        made = recipe(layout.model, str(folder / "shards"), layout.changes)
        join(place, "gloo", dist.PrefixStore(f"layout{number}", store))
        mesh = build_mesh(layout.plan, torch.device("cpu"), rank, layout.cluster, experts=made.model.moe is not None)
        # A dry run has only a first step, and says that later ones are alike.
        real = real_step(made, mesh, layout.cluster, warm_up=1)
        leave()
        dry = dry_run(made, layout.plan, layout.cluster, rank)
        result = {"name": layout.name, "real": real.model_dump(mode="json"), "dry": dry.model_dump(mode="json")}
        (folder / f"dry-{world}-{number}-{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
