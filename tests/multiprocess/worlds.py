"""One set of processes in worlds of several sizes, one after the other: importing torch is the slow part."""

import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from danlu.comm.rendezvous import RankInfo, rendezvous
from danlu.comm.world import World


class Worlds:
    """This process as a rank of one world after the other."""

    def __init__(self, rank: int, processes: int, port: str) -> None:
        self.rank = rank
        self.processes = processes
        self.store = rendezvous(
            RankInfo(rank=rank, world_size=processes, local_rank=rank, endpoint=f"127.0.0.1:{port}", token=bytes(32))
        )
        self.worlds = 0

    def within(self, world: int, act: Callable[[], None]) -> None:
        """Do something as one of the first `world` processes; the others wait."""
        self.worlds += 1
        if self.rank < world:
            place = RankInfo(rank=self.rank, world_size=world, local_rank=self.rank)
            joined = World.join(place, "gloo", dist.PrefixStore(f"world{self.worlds}", self.store))
            act()
            joined.shutdown()
        done, everyone = f"done{self.worlds}", f"everyone{self.worlds}"
        self.store.add(done, 1)
        if self.rank == 0:
            while self.store.add(done, 0) < self.processes:
                time.sleep(0.02)
            self.store.set(everyone, b"1")
        self.store.wait([everyone], timedelta(seconds=1500))
