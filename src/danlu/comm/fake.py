"""A world of any size in one process: collectives that return at once, for the dry run."""

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


def join_fake(rank: int, world: int) -> None:
    """Make this process rank `rank` of a world whose other ranks do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
