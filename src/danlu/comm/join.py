"""Enter and leave the world of ranks."""

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore
from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
from torch.distributed.tensor.debug import _clear_sharding_prop_cache


@dataclass(frozen=True)
class Place:
    """Where one process stands in the run, and where all of them meet."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    store: str = ""
    """`host:port` of the meeting point that rank 0 opens; not needed by a run of one."""


def meet(place: Place, timeout: timedelta = timedelta(minutes=10)) -> Store:
    """The store through which the ranks of a run find each other; rank 0 opens it."""
    if place.world == 1:
        return HashStore()
    host, _, port = place.store.rpartition(":")
    return TCPStore(host, int(port), place.world, is_master=place.rank == 0, timeout=timeout, wait_for_workers=False)


def join(place: Place, backend: str, store: Store, timeout: timedelta = timedelta(minutes=10)) -> None:
    """Make this process a member of the world; returns when every rank has come."""
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world, timeout=timeout)


def leave() -> None:
    """Close every group of this process; it may join another world afterwards.

    DTensor remembers how it redistributed, together with the mesh it did so on. A mesh of the next world
    that looks the same would find the closed groups there, so those memories go too.
    """
    dist.destroy_process_group()
    _clear_sharding_prop_cache()
    clear_redistribute_planner_cache()
