"""One rank of `start_up.py`: RANK WORLD PORT FOLDER STORE SIZES. Joins by level, or a world, and sums its number."""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from danlu.comm.hierarchical import all_reduce
from danlu.comm.level_groups import Level, LevelGroups, join_level_groups
from danlu.comm.own_sockets import own_sockets
from danlu.comm.rendezvous import RankInfo, rendezvous
from danlu.comm.world import World


def main() -> None:
    began = time.monotonic()
    rank, world_size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[4])
    endpoint, token = sys.argv[5].split()
    sizes = [int(size) for size in sys.argv[6].split("x") if size]
    torch.set_num_threads(1)
    place = RankInfo(rank, world_size, rank, endpoint, bytes.fromhex(token), is_served=True)
    earlier, store = set(own_sockets().values()), rendezvous(place)
    if sizes:
        levels = join_level_groups(store, rank, sizes)
    else:
        World.join(place, "gloo", store)
        levels = LevelGroups((Level(world_size, rank, dist.group.WORLD),))
    grouped = time.monotonic()
    total = torch.tensor([float(rank)])
    all_reduce(total, levels)
    assert total.item() == world_size * (world_size - 1) / 2, total
    summed = time.monotonic()
    all_reduce(total, levels)
    again = time.monotonic()
    found = {
        "began": began,
        "grouped": grouped,
        "summed": summed,
        "again": again,
        "sockets": len(set(own_sockets().values()) - earlier),
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
