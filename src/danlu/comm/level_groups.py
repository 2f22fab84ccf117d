"""The groups of one rank by level of the network, for hierarchical collectives.

The ranks of a group are a grid: with four hosts of two ranks in two supernodes, rank 5 is `(1, 0, 1)` on the levels
host, supernode and trunk. Across each level a rank talks to those that differ from it there alone, so that it holds
connections to a few ranks of every level and not to all of the group.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import prod

import numpy as np
from torch.distributed import ProcessGroup

from danlu.comm.rendezvous import TIMEOUT
from danlu.torch_compat import Store, gloo_devices, gloo_group


@dataclass(frozen=True)
class Level:
    """One level of the network, as one rank sees it."""

    size: int
    """Ranks, or blocks of ranks, that it joins."""
    coordinate: int
    """Which of them this rank is, or is in."""
    group: ProcessGroup
    """The ranks that differ from this one here alone, in order."""


@dataclass(frozen=True)
class LevelGroups:
    """This rank's levels, innermost first; those that join only one are left out."""

    levels: tuple[Level, ...]
    store: Store | None = None
    """Where members found each other, if no world keeps it: torch does not keep a store that is written in Python."""

    @property
    def size(self) -> int:
        """Ranks of the whole group."""
        return prod(level.size for level in self.levels)

    @property
    def index(self) -> int:
        """Which of them this rank is: inner levels count first."""
        index = 0
        for level in reversed(self.levels):
            index = index * level.size + level.coordinate
        return index


def join_level_groups(
    store: Store, rank: int, sizes: Sequence[int], name: str = "all", timeout: timedelta = TIMEOUT
) -> LevelGroups:
    """Become a rank of as many as the levels join, on CPUs, with no world of all ranks.

    In a world of gloo every rank is connected to every other before anything else happens, which takes minutes with a
    few hundred ranks on a host and fails with a few thousand. Here a rank is connected to its neighbors on each level
    alone. Levels that join many can be given as several that join few: 32 as `(4, 8)` is 10 connections, not 31.
    """
    if not 0 <= rank < prod(sizes):
        raise ValueError(f"rank must be below the {prod(sizes)} that the levels join, but is {rank}")
    levels = []
    devices = gloo_devices()  # the same for all groups
    for depth, members in neighbors(rank, range(prod(sizes)), sizes):
        label = f"{name}·{depth}"
        group = gloo_group(store, members, rank, timeout, f"{label}·{members[0]}", label, devices)
        levels.append(Level(len(members), members.index(rank), group))
    return LevelGroups(tuple(levels), store)


def neighbors(rank: int, ranks: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """The ranks that differ from this one at one level alone, and it, for every level that joins more than one."""
    grid = np.array(ranks).reshape(tuple(reversed(sizes)))
    here = np.argwhere(grid == rank)[0].tolist()
    for depth, size in enumerate(sizes):
        axis = len(sizes) - 1 - depth
        if size > 1:
            along = tuple(slice(None) if each == axis else here[each] for each in range(len(sizes)))
            yield depth, grid[along].tolist()
