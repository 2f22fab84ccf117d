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

from danlu.comm.join import Place, join, leave, meet
from danlu.spec import SpecError
from danlu.spec.plan import Degrees, Plan
from danlu.spec.recipe import Data, DataSource, Recipe
from danlu.storage.block_cache import LEAST
from danlu.storage.store_files import StoreFiles

WEIGHTS = {"code": 0.3, "prose": 0.7}
KILLED_AFTER = 3
QUICK = {"connect_timeout": "2", "read_timeout": "4", "request_timeout": "5"}


def from_bucket(folder: Path, endpoint: str, case: str) -> Recipe:
    """The mixture in the bucket, behind a cache too small for it."""
    sources = tuple(DataSource(shards=f"s3://{BUCKET}/sets/{name}", weight=weight) for name, weight in WEIGHTS.items())
    options = {"endpoint": endpoint, **QUICK}
    return mixed(Data(sources=sources, cache=str(folder / f"cache-{case}"), cache_size=LEAST, options=options))


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
    place = Place(rank=rank, world=world, local_rank=rank, store=f"127.0.0.1:{port}")
    join(place, "gloo", meet(place))
    plan = Plan(degrees=Degrees(shard=2))
    local = tuple(DataSource(shards=str(folder / name), weight=weight) for name, weight in WEIGHTS.items())
    told: dict[str, Told] = {"folder": live(mixed(Data(sources=local)), plan, rank, folder / "run-folder")}
    told["bucket"] = live(from_bucket(folder, endpoint, "bucket"), plan, rank, folder / "run-bucket")
    for case in ("back", "gone"):
        dist.barrier()
        if case == "gone":
            wait_for(folder / "up-again", 200)
            StoreFiles.__init__.__kwdefaults__["patience"] = 3.0  # instead of ten minutes
        made = from_bucket(folder, endpoint, case)
        try:
            told[case] = live(made, plan, rank, folder / f"run-{case}", after_step=partial(kill, folder, case, rank))
        except (SpecError, RuntimeError) as error:  # the rank that gives up first takes the other along
            told[case] = Told(warnings=[str(error)])
    (folder / f"told-{rank}.json").write_text(json.dumps({name: asdict(each) for name, each in told.items()}))
    leave()


if __name__ == "__main__":
    main()
