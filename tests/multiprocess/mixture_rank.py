"""One of two ranks on a mixture that grows in the middle: whole, stopped, killed, and resumed at another layout."""

import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from mixing import Told, live, mixed

from danlu.comm.rendezvous import RankInfo, rendezvous
from danlu.comm.world import World
from danlu.spec.plan import Degrees, Plan
from danlu.spec.recipe import DataConfig, DataSource
from danlu.storage.data.build import build_dataset
from danlu.storage.data.tokenizer import BytesTokenizer

APPENDED_AFTER = 5
STOPS = (3, 6, 9)


class Case:
    """A copy of the data and a run on it."""

    def __init__(self, folder: Path, name: str, rank: int) -> None:
        self.data, self.run, self.rank = folder / f"data-{name}", folder / f"run-{name}", rank
        if rank == 0:
            shutil.copytree(folder / "sources", self.data)
        dist.barrier()
        sources = (
            DataSource(shards=str(self.data / "code"), weight=0.3),
            DataSource(shards=str(self.data / "prose"), weight=0.7),
        )
        self.recipe = mixed(DataConfig(sources=sources))

    def live(self, plan: Plan, *, resume: int = 0, until: int | None = None, dies: bool = False) -> Told:
        return live(
            self.recipe, plan, self.rank, self.run, resume=resume, until=until, dies=dies, after_step=self._append
        )

    def _append(self, step: int) -> None:
        """While the other rank trains on; a second time adds nothing."""
        if self.rank == 0 and step == APPENDED_AFTER:
            build_dataset([str(self.data / "late.jsonl")], self.data / "code", BytesTokenizer(), append=True)


def joined(before: Told, steps: int, after: Told) -> Told:
    return Told(before.losses[:steps] + after.losses, before.rows[:steps] + after.rows)


def main() -> None:
    rank, world, port, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    place = RankInfo(rank=rank, world_size=world, local_rank=rank, endpoint=f"127.0.0.1:{port}", token=bytes(32))
    together = World.join(place, "gloo", rendezvous(place))
    plan, other = Plan(degrees=Degrees(shard=2)), Plan(degrees=Degrees(tp=2))
    told = {"whole": Case(folder, "whole", rank).live(plan)}
    for stop in STOPS:
        case = Case(folder, f"stopped-{stop}", rank)
        before = case.live(plan, until=stop)
        told[f"stopped {stop}"] = joined(before, stop, case.live(plan, resume=stop))
    case = Case(folder, "killed", rank)
    before = case.live(plan, until=7, dies=True)
    told["killed"] = joined(before, 6, case.live(plan, resume=6))
    told["killed, before"] = before
    case = Case(folder, "moved", rank)
    case.live(plan, until=6)
    told["other layout, after 6"] = case.live(other, resume=6)
    (folder / f"told-{rank}.json").write_text(json.dumps({name: asdict(each) for name, each in told.items()}))
    together.shutdown()


if __name__ == "__main__":
    main()
