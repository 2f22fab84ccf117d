"""The ranks of a run and their collectives: the only user of torch's default process group."""

import hashlib
import time
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import pairwise
from math import prod
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from danlu import torch_compat
from danlu.comm.chosen_collectives import AlgorithmChoice, ChosenCollectives
from danlu.comm.host_group import HostGroup
from danlu.comm.interrupt import shut_connections
from danlu.comm.level_collectives import LevelCollectives
from danlu.comm.level_groups import Level, LevelGroups, neighbors
from danlu.comm.own_collectives import (
    REDUCE_OPS,
    OwnCollectives,
    Reduction,
    answer_calls,
    close_own_collectives,
    interrupt_own_collectives,
    is_answered,
)
from danlu.comm.own_sockets import own_sockets
from danlu.comm.rank_layout import LevelSpan, common_level
from danlu.comm.rendezvous import TIMEOUT, RankInfo
from danlu.comm.shared_memory import SharedMemoryError, host_identity
from danlu.comm.traffic_meter import StepTraffic, TrafficMeter
from danlu.spec.cluster import CollectiveAlgorithm
from danlu.torch_compat import PrefixStore, Store

CPU = torch.device("cpu")


_FIRST_POLL, _SLOWEST_POLL = 0.002, 0.2
_OVER_SOCKETS = ("gloo",)
"""Backends that send over sockets also inside a host."""
_MOST_MEMBERS = 256
"""The hosts of larger groups are not asked for: every rank would ask for every other."""
_SLOW = "collectives of {} ranks on this host go over sockets, which takes several times as long"


MakeCollectives = Callable[[Sequence[int]], OwnCollectives]
"""Makes the collectives of some ranks, which all of them call together."""


class JoinCanceledError(RuntimeError):
    """A world that this process waited to join will never be complete."""


@dataclass(frozen=True)
class World:
    """This process among the ranks of a run, passed to code that communicates; collectives of one rank do nothing."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Number of this rank on its host."""
    device: torch.device = CPU
    """Where tensors of collectives are."""
    generation: int = 0
    """How many worlds this run had before; keys of the rendezvous store are not shared between them."""
    timeout: timedelta = TIMEOUT
    store: Store | None = None
    """Key-value store of all ranks; None where there is no rendezvous."""
    rendezvous_store: Store | None = None
    """What it is a part of: torch does not keep one that is written in Python."""
    earlier_sockets: frozenset[str] = frozenset()
    """Sockets that this process had before it joined: not the world's."""
    shares_memory: bool = False
    """Whether groups of ranks on one host communicate through its memory."""
    choice: AlgorithmChoice | None = field(default=None, compare=False)
    """By which algorithms collectives of ours run, if not by the usual ones."""
    answer: MakeCollectives | None = field(default=None, compare=False)
    """What makes the collectives of groups, of their ranks; else they are the library's, or ours on CPUs."""
    levels: tuple[LevelSpan, ...] = ()
    """The levels of the network from the host outwards; none where it is not known."""
    traffic: TrafficMeter | None = field(default=None, compare=False)
    """What this rank sends; None for one rank, and in a dry run."""
    fallbacks: list[str] = field(default_factory=list, compare=False)
    """Groups of this rank that communicate more slowly than they could, each with the reason."""

    @classmethod
    def join(
        cls,
        rank_info: RankInfo,
        backend: str,
        store: Store,
        device: torch.device = CPU,
        *,
        generation: int = 0,
        timeout: timedelta = TIMEOUT,
        canceled: Callable[[], bool] | None = None,
        shares_memory: bool = True,
        levels: Sequence[LevelSpan] = (),
        choice: AlgorithmChoice | None = None,
        answer: MakeCollectives | None = None,
    ) -> Self:
        """Become a rank; returns when every rank has joined. `shutdown` ends it, and another world may be joined.

        With `canceled`, waits for the others in steps and raises `JoinCanceledError` once it is true: a rank that is
        waited for may die meanwhile. On CPUs, groups whose ranks are all on one host communicate through its memory,
        and others inside each host and each unit of the `levels` first, unless `shares_memory` is false, `choice` has
        another algorithm, or `answer` makes the collectives of groups.
        """
        whole, store = store, PrefixStore(f"generation-{generation}", store)
        size, earlier = rank_info.world_size, frozenset(own_sockets().values())
        if canceled is not None:
            _wait_for_all(store, size, generation, canceled)
        dist.init_process_group(backend, store=store, rank=rank_info.rank, world_size=size, timeout=timeout)
        place = (rank_info.rank, size, rank_info.local_rank, device, generation, timeout)
        shares_memory = shares_memory and backend in _OVER_SOCKETS
        world = cls(
            *place,
            store=store,
            rendezvous_store=whole,
            earlier_sockets=earlier,
            shares_memory=shares_memory,
            choice=choice,
            answer=answer,
            levels=tuple(levels),
            traffic=_meter(rank_info.rank, size, levels),
        )
        try:
            world._find_host()
        except BaseException:  # a peer died meanwhile: this rank may join the next world
            world.shutdown()
            raise
        _joined[dist.group.WORLD] = world
        return world

    @classmethod
    def fake(cls, rank: int, size: int, levels: Sequence[LevelSpan] = ()) -> Self:
        """Be a rank of a world whose other ranks do not exist, and whose collectives return at once: a dry run's."""
        dist.init_process_group("fake", store=torch_compat.fake_store(), rank=rank, world_size=size)
        return cls(rank, size, levels=tuple(levels))

    @classmethod
    def adopt(cls, device: torch.device = CPU, *, shares_memory: bool = True, levels: Sequence[LevelSpan] = ()) -> Self:
        """The world that this process is a rank of already, as under torchrun; a world of one if it is of none.

        Every rank calls it.
        """
        if not dist.is_initialized():
            return cls(device=device)
        joined = _joined.get(dist.group.WORLD)
        if isinstance(joined, cls):
            shares_memory = shares_memory and joined.shares_memory
            return replace(joined, device=device, shares_memory=shares_memory, levels=tuple(levels) or joined.levels)
        place = (dist.get_rank(), dist.get_world_size(), dist.get_node_local_rank(fallback_rank=0), device)
        shares_memory = shares_memory and dist.get_backend() in _OVER_SOCKETS
        world = cls(*place, store=torch_compat.default_store(), shares_memory=shares_memory, levels=tuple(levels))
        world._find_host()
        return world

    def shutdown(self) -> None:
        """Close every group of this process; it may join another world afterwards.

        DTensor caches redistributions together with their mesh. A mesh of the next world that looks the same would
        find the closed groups there, so those caches are cleared too.
        """
        if self.traffic is not None:
            self.traffic.close()
        close_own_collectives()
        _joined.clear()
        dist.destroy_process_group()
        torch_compat.clear_dtensor_caches()

    def interrupt(self) -> None:
        """End the collectives in which this process waits, and all later ones, with an error; from any thread."""
        if dist.is_initialized() and dist.get_backend() != "gloo":
            torch_compat.abort_process_groups()
        interrupt_own_collectives()
        shut_connections(self.earlier_sockets)

    def all_reduce(self, tensor: Tensor, reduction: Reduction = "sum") -> None:
        """Reduce a tensor over all ranks, in place; not waited for before its values are read."""
        if self.size > 1:
            dist.all_reduce(tensor, REDUCE_OPS[reduction])

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Broadcast a tensor of one rank to all, in place."""
        if self.size > 1:
            dist.broadcast(tensor, src=source)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.size > 1:
            dist.barrier()

    def all_reduce_ints(self, values: Sequence[int], reduction: Reduction = "sum") -> list[int]:
        """Reduce a few integers over all ranks; sums are modulo 2^64, and results below 2^63 are exact."""
        words = torch.tensor([value - 2**64 if value >= 2**63 else value for value in values], dtype=torch.int64)
        words = words.to(self.device)
        self.all_reduce(words, reduction)
        return [int(word) for word in words.tolist()]

    def all_gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        """The values of every rank, by rank: O(size), so never in a step."""
        if self.size == 1:
            return [list(values)]
        mine = torch.tensor(values, dtype=torch.int64, device=self.device)
        everyone = torch.empty(self.size * len(values), dtype=torch.int64, device=self.device)
        torch_compat.all_gather_single(everyone, mine)
        gathered: list[list[int]] = everyone.reshape(-1, len(values)).tolist()
        return gathered

    def broadcast_int(self, compute: Callable[[], int]) -> int:
        """What rank 0 computes, on every rank."""
        value = torch.tensor(compute() if self.rank == 0 else 0, device=self.device)
        self.broadcast(value)
        return int(value)

    def pop_traffic(self) -> StepTraffic:
        """What this rank has sent since the last call; as many zeros where nothing is measured."""
        return self.traffic.pop() if self.traffic else StepTraffic(sent=(0.0,) * len(self.levels))

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return self.any_rank_each([flag])[0]

    def any_rank_each(self, flags: Sequence[bool]) -> list[bool]:
        """For each of several flags, whether it is set on any rank."""
        return [bool(flag) for flag in self.all_reduce_ints([int(flag) for flag in flags], "max")]

    def new_group(self, members: Sequence[int], name: str) -> ProcessGroup | None:
        """The group of all ranks, or a new one created by its members alone: no rank waits for a group it is not in."""
        if len(members) == self.size:
            return dist.group.WORLD
        if self.rank not in members:
            return None
        group: ProcessGroup
        members = sorted(members)  # as torch numbers them
        if self.store is not None and dist.get_backend() == "gloo":
            label, devices = _name_of_members(members), torch_compat.gloo_devices()
            group = torch_compat.gloo_group(self.store, members, self.rank, self.timeout, label, name, devices)
        else:
            group = dist.new_group(members, timeout=self.timeout, use_local_synchronization=True, group_desc=name)
        self._take_over(group)
        return group

    def level_groups(self, ranks: Sequence[int], sizes: Sequence[int], name: str) -> LevelGroups:
        """Create this rank's groups across the levels of `ranks`, which are in order of the network.

        `sizes` are those of the levels, innermost first. Ranks of other groups of the same sizes call it together with
        these, each with the ranks of its own group; `name` says in reports what the groups are for.
        """
        if prod(sizes) != len(ranks):
            raise ValueError(
                f"levels of {' × '.join(map(str, sizes))} join {prod(sizes)} ranks, but the group has {len(ranks)}"
            )
        if self.rank not in ranks:
            raise ValueError(f"rank {self.rank} must be in the group that it creates, but that has {list(ranks)}")
        levels = []
        for depth, members in neighbors(self.rank, ranks, sizes):
            group = self.new_group(members, f"{name}·{depth}")
            assert group is not None  # this rank is a member
            levels.append(Level(len(members), members.index(self.rank), group))
        return LevelGroups(tuple(levels))

    def _find_host(self) -> None:
        """Tell the others which host this rank is on."""
        if self.shares_memory and self.store is not None:
            self.store.set(f"host-{self.rank}", host_identity())
        if dist.group.WORLD is not None:
            self._take_over(dist.group.WORLD)

    def _take_over(self, group: ProcessGroup) -> None:
        """Have collectives of ours answer for a group: inside a host through its memory, between hosts by level."""
        members = ranks_of(group)
        if self.answer is not None:
            if len(members) > 1 and not is_answered(group):
                answer_calls(group, self.answer(members))
            return
        if not self.shares_memory or self.store is None or not 1 < len(members) <= _MOST_MEMBERS or is_answered(group):
            return
        hosts = [self.store.get(f"host-{member}") for member in members]
        by_algorithm: dict[CollectiveAlgorithm, OwnCollectives] = {}
        if len({*hosts}) == 1:
            if (shared := self._share_memory(group, members)) is not None:
                by_algorithm["memory"] = shared
        else:
            switches = [[member // level.ranks for member in members] for level in self.levels[1:-1]]
            sizes, sizes_of_hosts = _level_sizes([hosts, *switches]), _level_sizes([hosts])
            if len(sizes) > 1:
                by_algorithm["levels"] = LevelCollectives(self.level_groups(members, sizes, group.group_desc))
            if 1 < len(sizes_of_hosts) < len(sizes) and self.choice is not None:
                name = f"{group.group_desc} by host"
                by_algorithm["host"] = LevelCollectives(self.level_groups(members, sizes_of_hosts, name))
        if by_algorithm:
            answer_calls(group, self._choosing(by_algorithm, members))

    def _choosing(
        self, by_algorithm: dict[CollectiveAlgorithm, OwnCollectives], members: Sequence[int]
    ) -> OwnCollectives:
        """Collectives by the algorithm that this world chooses; else the first."""
        choose = None
        if self.choice is not None and self.levels:
            level = max(common_level(members[0], member, self.levels) for member in members)
            choose = self.choice.for_group(level, len(members))
        return ChosenCollectives(by_algorithm, choose) if choose else next(iter(by_algorithm.values()))

    def _share_memory(self, group: ProcessGroup, members: list[int]) -> HostGroup | None:
        """Collectives through the memory of a host; None, with a warning, where there is no room for them."""
        assert self.store is not None
        times = self.store.add(f"shared-{group.group_name}-{self.rank}", 1)  # a world may be adopted several times
        meeting = PrefixStore(f"shared-{group.group_name}-{times}", self.store)
        index = members.index(self.rank)
        try:
            return HostGroup.join(meeting, index, len(members), self.timeout)
        except SharedMemoryError as reason:
            if index == 0:
                self.fallbacks.append(f"{_SLOW.format(len(members))}: {reason}")
                warnings.warn(self.fallbacks[-1], RuntimeWarning, stacklevel=2)
            return None

    def device_mesh(
        self, groups: Sequence[ProcessGroup | None], ranks: Tensor | None = None, names: tuple[str, ...] | None = None
    ) -> DeviceMesh:
        """A mesh over groups, for FSDP, DTensor and pipelining. Meshes are created only here."""
        real = [group for group in groups if group is not None]
        if ranks is None:
            return DeviceMesh.from_group(real[0], self.device.type)
        return DeviceMesh.from_group(real, self.device.type, ranks, mesh_dim_names=names)


_joined: dict[ProcessGroup | None, World] = {}
"""The world that this process joined, by torch's group of all its ranks."""


def _meter(rank: int, size: int, levels: Sequence[LevelSpan]) -> TrafficMeter | None:
    return TrafficMeter(rank, levels, ranks_of) if size > 1 else None


def _wait_for_all(store: Store, size: int, generation: int, canceled: Callable[[], bool]) -> None:
    arrived, pause = store.add("arrived", 1), _FIRST_POLL
    while arrived < size:
        if canceled():
            raise JoinCanceledError(f"generation {generation} will not be complete: {arrived} of {size} ranks came")
        time.sleep(pause)
        pause = min(1.2 * pause, _SLOWEST_POLL)
        arrived = store.add("arrived", 0)


def ranks_of(group: ProcessGroup) -> list[int]:
    """The ranks in a group, in the order the group numbers them."""
    return dist.get_process_group_ranks(group)


def _name_of_members(members: Sequence[int]) -> str:
    """The same for the same ranks in the same order, and short."""
    return hashlib.sha1("_".join(map(str, members)).encode(), usedforsecurity=False).hexdigest()


def _level_sizes(units: Sequence[Sequence[Hashable]]) -> list[int]:
    """Levels that a group of ranks is joined by, innermost first, from the unit of every rank on each level.

    A level whose units do not hold as many ranks each, one after the other, is none.
    """
    ranks, inside = len(units[0]), [1]
    for of_rank in units:
        each = of_rank.count(of_rank[0])
        if inside[-1] < each < ranks and each % inside[-1] == 0 and _are_blocks(of_rank, each):
            inside.append(each)
    return [outer // inner for inner, outer in pairwise([*inside, ranks])]


def _are_blocks(units: Sequence[Hashable], each: int) -> bool:
    """Whether every unit has so many of the ranks, one after the other."""
    blocks = [units[start : start + each] for start in range(0, len(units), each)]
    return all(len(block) == each and len({*block}) == 1 for block in blocks) and len({*units}) == len(blocks)
