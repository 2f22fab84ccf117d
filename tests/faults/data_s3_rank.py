"""One of two ranks that read a mixture from a folder, from a bucket, from one that dies for a while, and for good.

    python data_s3_rank.py RANK WORLD PORT FOLDER ENDPOINT

FOLDER is where ranks and test meet: the test kills the server when `kill-…` appears and then writes `killed-…`.
"""

import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

import fsspec.config
import torch
import torch.distributed as dist

sys.path += [str(Path(__file__).parents[1] / room) for room in ("engines", "multiprocess")]

from mixing import Told, live, mixed, wait_for
from s3_lab import BUCKET, KEY, SECRET

from danlu.comm.rendezvous import RankInfo, rendezvous
from danlu.comm.world import World
from danlu.spec import SpecError
from danlu.spec.plan import Degrees, Plan
from danlu.spec.recipe import DataConfig, DataSource, Recipe
from danlu.storage.data.block_cache import MIN_CACHE_BYTES
from danlu.storage.data.store_shard_reader import StoreShardReader

WEIGHTS = {"code": 0.3, "prose": 0.7}
KILLED_AFTER = 3
QUICK = {"connect_timeout": "2", "read_timeout": "4", "request_timeout": "5"}


def from_bucket(folder: Path, endpoint: str, case: str) -> Recipe:
    """The mixture in the bucket, behind a cache too small for it."""
    sources = tuple(DataSource(shards=f"s3://{BUCKET}/sets/{name}", weight=weight) for name, weight in WEIGHTS.items())
    options = {"endpoint": endpoint, **QUICK}
    return mixed(
        DataConfig(sources=sources, cache=str(folder / f"cache-{case}"), cache_size=MIN_CACHE_BYTES, options=options)
    )


def kill(folder: Path, case: str, rank: int, step: int) -> None:
    """Have the server killed."""
    if step == KILLED_AFTER:
        if rank == 0:
            (folder / f"kill-{case}").touch()
        wait_for(folder / f"killed-{case}", 200)


def main() -> None:
    rank, world, port = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    folder, endpoint = Path(sys.argv[4]), sys.argv[5]
    fsspec.config.conf["s3"] = {"key": KEY, "secret": SECRET}
    torch.set_num_threads(1)
    place = RankInfo(rank=rank, world_size=world, local_rank=rank, endpoint=f"127.0.0.1:{port}", token=bytes(32))
    joined = World.join(place, "gloo", rendezvous(place))
    plan = Plan(degrees=Degrees(shard=2))
    local = tuple(DataSource(shards=str(folder / name), weight=weight) for name, weight in WEIGHTS.items())
    told: dict[str, Told] = {"folder": live(mixed(DataConfig(sources=local)), plan, rank, folder / "run-folder")}
    told["bucket"] = live(from_bucket(folder, endpoint, "bucket"), plan, rank, folder / "run-bucket")
    for case in ("back", "gone"):
        dist.barrier()
        if case == "gone":
            wait_for(folder / "up-again", 200)
            StoreShardReader.__init__.__kwdefaults__["timeout"] = 3.0  # instead of ten minutes
        made = from_bucket(folder, endpoint, case)
        try:
            told[case] = live(made, plan, rank, folder / f"run-{case}", after_step=partial(kill, folder, case, rank))
        except (SpecError, RuntimeError) as error:  # the rank that gives up first takes the other along
            told[case] = Told(warnings=[str(error)])
    (folder / f"told-{rank}.json").write_text(json.dumps({name: asdict(each) for name, each in told.items()}))
    joined.shutdown()


if __name__ == "__main__":
    main()
