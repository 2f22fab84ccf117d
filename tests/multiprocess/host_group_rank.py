"""One rank of the tests of collectives through shared memory: each case as a user of `torch.distributed` calls it."""

import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from danlu.comm import own_collectives
from danlu.comm import world as world_module
from danlu.comm.chosen_collectives import ChosenCollectives, TrialChoice
from danlu.comm.flight_record import FlightWriter
from danlu.comm.flight_recorder import FlightRecorder
from danlu.comm.host_group import SLOT_BYTES, HostGroup
from danlu.comm.level_collectives import LevelCollectives
from danlu.comm.peer_failure import is_peer_failure
from danlu.comm.rank_layout import LevelSpan, common_level
from danlu.comm.rendezvous import RankInfo, rendezvous
from danlu.comm.shared_memory import HostPeerError
from danlu.comm.world import World
from danlu.torch_compat import Store, all_gather_single, all_to_all_single_autograd, reduce_scatter_single

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8)
SAYS_REDUCTION = torch.classes.c10d.ReduceOp()._has_method("op")
"""Not every minor of torch does; then the library reduces."""
SMALL, LARGE = (1, 7, 4096, 9000), (SLOT_BYTES // 4 - 1, SLOT_BYTES // 2 + 3)
"""Elements: within, around and twice what fits a slot."""


def drawn(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """The tensor of one rank; sums of these small numbers are exact in every type."""
    return torch.randint(0, 4, (size,), generator=torch.Generator().manual_seed(rank)).to(dtype)


def everybodys(size: int, dtype: torch.dtype) -> Tensor:
    return torch.stack([drawn(rank, size, dtype) for rank in range(dist.get_world_size())])


def for_each(check: Callable[[int, torch.dtype], None]) -> None:
    for dtype in DTYPES:
        for size in SMALL:
            check(size, dtype)
    for size in LARGE:
        check(size, torch.float32)


def all_reduce(rank: int, ranks: int) -> None:
    def check(size: int, dtype: torch.dtype) -> None:
        for operation, expected in (
            (dist.ReduceOp.SUM, everybodys(size, dtype).sum(0)),
            (dist.ReduceOp.MAX, everybodys(size, dtype).amax(0)),
            (dist.ReduceOp.MIN, everybodys(size, dtype).amin(0)),
        ):
            found = drawn(rank, size, dtype)
            dist.all_reduce(found, operation)
            assert torch.equal(found, expected.to(dtype)), (size, dtype, operation)

    for_each(check)
    if not SAYS_REDUCTION:
        return
    for operation in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
        spoiled = torch.tensor([float("nan") if rank == 0 else 1.0, 1.0])
        dist.all_reduce(spoiled, operation)
        assert spoiled.isnan().tolist() == [True, False], operation
    columns = torch.arange(6.0).view(2, 3)[:, 1]  # not contiguous
    dist.all_reduce(columns)
    assert columns.tolist() == [1.0 * ranks, 4.0 * ranks]


def reduce_scatter(rank: int, ranks: int) -> None:
    def check(size: int, dtype: torch.dtype) -> None:
        found = torch.empty(size, dtype=dtype)
        reduce_scatter_single(found, drawn(rank, size * ranks, dtype))
        assert torch.equal(found, everybodys(size * ranks, dtype).sum(0).to(dtype).chunk(ranks)[rank]), (size, dtype)

    for_each(check)


def all_gather(rank: int, ranks: int) -> None:
    def check(size: int, dtype: torch.dtype) -> None:
        found = torch.empty(size * ranks, dtype=dtype)
        all_gather_single(found, drawn(rank, size, dtype))
        assert torch.equal(found.view(ranks, -1), everybodys(size, dtype)), (size, dtype)
        parts = [torch.empty(size, dtype=dtype) for _ in range(ranks)]
        dist.all_gather(parts, drawn(rank, size, dtype))
        assert torch.equal(torch.stack(parts), everybodys(size, dtype)), (size, dtype)

    for_each(check)


def broadcast(rank: int, ranks: int) -> None:
    def check(size: int, dtype: torch.dtype) -> None:
        found = drawn(rank, size, dtype)
        dist.broadcast(found, src=size % ranks)
        assert torch.equal(found, drawn(size % ranks, size, dtype)), (size, dtype)

    for_each(check)


def all_to_all(rank: int, ranks: int) -> None:
    def check(size: int, dtype: torch.dtype) -> None:
        found, given = torch.empty(size * ranks, dtype=dtype), drawn(rank, size * ranks, dtype)
        dist.all_to_all_single(found, given)
        assert torch.equal(found, everybodys(size * ranks, dtype).view(ranks, ranks, size)[:, rank].flatten())
        # Rank r sends (r + s) % ranks · size rows of two to rank s: nothing, and more than the slots of one turn hold.
        counts = torch.tensor([[(r + s) % ranks * size for s in range(ranks)] for r in range(ranks)])
        rows = [drawn(r, 2 * int(counts[r].sum()), dtype).view(-1, 2) for r in range(ranks)]
        found = torch.empty(int(counts[:, rank].sum()), 2, dtype=dtype)
        dist.all_to_all_single(found, rows[rank], counts[:, rank].tolist(), counts[rank].tolist())
        expected = [rows[r].split(counts[r].tolist())[rank] for r in range(ranks)]
        assert torch.equal(found, torch.cat(expected)), (size, dtype)

    for_each(check)


def through_autograd(rank: int, ranks: int) -> None:
    given = torch.arange(2.0 * ranks).requires_grad_()
    found = all_to_all_single_autograd(given, None, None, dist.group.WORLD)
    (found * (rank + 1)).sum().backward()
    assert given.grad is not None
    assert given.grad.tolist() == [1.0 + each for each in range(ranks) for _ in range(2)]


def what_is_not_written_goes_to_the_library(rank: int, ranks: int) -> None:
    product = torch.full((3,), 2.0)
    dist.all_reduce(product, dist.ReduceOp.PRODUCT)
    assert product.tolist() == [2.0**ranks] * 3
    if rank < 2:
        message = torch.full((2,), float(rank))
        dist.send(message, 1) if rank == 0 else dist.recv(message, 0)
        assert message.tolist() == [0.0, 0.0]


def data_parallel(rank: int, ranks: int) -> None:
    """DDP takes the reduced tensors from the future of a call."""
    torch.manual_seed(0)
    alone = torch.nn.Linear(5, 3)
    module = DistributedDataParallel(torch.nn.Linear(5, 3))
    module.module.load_state_dict(alone.state_dict())
    rows = torch.stack([drawn(each, 5, torch.float32) for each in range(ranks)])
    alone(rows).sum().div(ranks).backward()
    module(rows[rank : rank + 1]).sum().backward()
    for mine, expected in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, expected.grad)


LEFT_BETWEEN_HOSTS = ("all_to_all", "through_autograd")
CASES = (all_reduce, reduce_scatter, all_gather, broadcast, all_to_all, through_autograd, data_parallel)


def ranks_that_differ_are_told(rank: int, ranks: int) -> None:
    with pytest.raises(HostPeerError, match=r"ranks do different things: all_reduce of (8|12) bytes") as told:
        dist.all_reduce(torch.ones(2 if rank == 0 else 3))
    assert is_peer_failure(told.value)


def counts_that_differ_are_told(rank: int, ranks: int) -> None:
    sent = [2] * ranks
    received = [3 if rank == 0 and peer == 1 else 2 for peer in range(ranks)]

    def exchange() -> None:
        dist.all_to_all_single(torch.empty(sum(received)), torch.ones(2 * ranks), received, sent)
        dist.barrier()  # the other ranks learn of it here

    with pytest.raises(HostPeerError, match=r"sends 8 bytes to rank 0 .* expects 12|interrupted"):
        exchange()


def a_wait_is_interrupted_from_another_thread(rank: int, ranks: int) -> None:
    if rank == ranks - 1:
        time.sleep(1.5)
        return
    threading.Timer(0.5, own_collectives.interrupt_own_collectives).start()
    began = time.monotonic()
    with pytest.raises(HostPeerError, match="interrupted"):
        dist.barrier()
    assert time.monotonic() - began < 1.4


FAULTS = (ranks_that_differ_are_told, counts_that_differ_are_told, a_wait_is_interrupted_from_another_thread)


def without_room_all_goes_over_sockets(place: RankInfo, store: Store) -> None:
    """The rank that makes the room warns; results are the same."""

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        patch.setattr(os, "posix_fallocate", full)
        world = World.join(place, "gloo", store, generation=99)
    told = [str(each.message) for each in warned]
    assert told == world.fallbacks and len(told) == (place.rank == 0)
    assert not told or ("go over sockets" in told[0] and "No space left on device" in told[0])
    before, found = turns(), torch.full((3,), place.rank + 1.0)
    dist.all_reduce(found)
    assert found.tolist() == [sum(range(1, place.world_size + 1))] * 3 and turns() == before
    world.barrier()
    world.shutdown()


def turns() -> int:
    """How often this rank passed shared memory."""
    answering = own_collectives._answered.values()
    chosen = [own for each in answering if isinstance(each, ChosenCollectives) for own in each.by_algorithm.values()]
    return sum(each._turn for each in (*answering, *chosen) if isinstance(each, HostGroup))


def traffic_is_counted_where_it_passes(world: World, each: int, blocks: tuple[int, ...]) -> None:
    """Against the bytes that every rank must send, level by level: none for what goes through a host's memory."""
    rank, ranks, rows = world.rank, world.size, 4 * 3 * 2**10
    world.pop_traffic()

    def sent(call: Callable[[], object]) -> list[float]:
        call()
        return list(world.pop_traffic().sent)

    def by_level(amounts: dict[int, float]) -> list[float]:
        """Bytes to some ranks, by the level that this rank reaches them over."""
        found = [0.0] * len(world.levels)
        for other, amount in amounts.items():
            found[common_level(rank, other, world.levels)] += amount
        return found

    share = rows * 4 / ranks
    inside = {other: share for other in range(ranks) if other != rank}
    exchanged = sent(lambda: dist.all_to_all_single(torch.empty(rows), torch.ones(rows)))
    assert exchanged == (by_level(inside) if each < ranks else [0.0] * len(world.levels))
    counts = [other + 1 for other in range(ranks)]
    given, found = torch.ones(sum(counts), 5), torch.empty((rank + 1) * ranks, 5)
    uneven = sent(lambda: dist.all_to_all_single(found, given, [rank + 1] * ranks, counts))
    to_others = {other: 20.0 * (other + 1) for other in range(ranks) if other != rank}
    assert uneven == (by_level(to_others) if each < ranks else [0.0] * len(world.levels))
    summed = sent(lambda: dist.all_reduce(torch.ones(rows)))
    expected, left = [0.0] * len(world.levels), rows * 4.0
    for inner, outer in pairwise([each, *blocks, ranks]):
        size, level = outer // inner, common_level(0, outer - 1, world.levels)
        if each > 1 and inner == each:
            left /= each  # summed in the memory of the host first
        last = outer == ranks
        expected[level] += (2 if last else 1) * left * (size - 1) / size + (0 if last else left * (size - 1) / size)
        left /= size
    assert summed == (expected if SAYS_REDUCTION or each == 1 else summed)
    if rank % 2:
        passed = sent(lambda: dist.recv(torch.empty(7), rank - 1))
    else:
        passed = sent(lambda: dist.send(torch.ones(7), rank + 1)) if rank + 1 < ranks else []
    assert sum(passed) == (28 if passed and not rank % 2 else 0)


def algorithms_are_as_chosen(world: World, trial: TrialChoice) -> None:
    """Every collective by every algorithm of the group, equal to the sums of all ranks' tensors."""
    rank, ranks = world.rank, world.size
    assert dist.group.WORLD is not None
    own = own_collectives.collectives_of(dist.group.WORLD)
    assert isinstance(own, ChosenCollectives)
    for algorithm in ("default", *own.algorithms):
        trial.algorithm = algorithm
        passed = turns()
        world.pop_traffic()
        exchanged = torch.empty(ranks * 3)
        dist.all_to_all_single(exchanged, drawn(rank, ranks * 3, torch.float32))
        assert torch.equal(
            exchanged.view(ranks, 3), everybodys(ranks * 3, torch.float32).view(ranks, ranks, 3)[:, rank]
        )
        for size in (5, 9000):
            found = drawn(rank, size, torch.float32)
            dist.all_reduce(found)
            assert torch.equal(found, everybodys(size, torch.float32).sum(0))
            gathered = torch.empty(ranks * size)
            all_gather_single(gathered, drawn(rank, size, torch.float32))
            assert torch.equal(gathered.view(ranks, -1), everybodys(size, torch.float32))
            summed = torch.empty(size)
            reduce_scatter_single(summed, drawn(rank, size * ranks, torch.float32))
            assert torch.equal(summed, everybodys(size * ranks, torch.float32).sum(0).chunk(ranks)[rank])
        if algorithm in ("library", "memory"):
            assert (turns() > passed) is (algorithm == "memory")
        sent = sum(world.pop_traffic().sent)
        assert (sent == 0) is (algorithm in ("memory", "default") and "memory" in own.algorithms and SAYS_REDUCTION)
    counts = [1 + (peer == rank) for peer in range(ranks)]  # ranks know no common size: never by a chosen algorithm
    trial.algorithm = own.algorithms[-1]
    uneven = torch.empty(sum(counts), 2)
    dist.all_to_all_single(uneven, torch.ones(sum(counts), 2), counts, counts)
    assert uneven.sum() == 2 * sum(counts)


def exchanges_are_timed_and_what_consists_of_them_is_not(world: World) -> None:
    world.pop_traffic()
    dist.all_reduce(torch.ones(2**16))  # by levels it consists of all-to-alls
    assert world.pop_traffic().all_to_all_seconds == 0.0
    world.barrier()
    began = time.perf_counter()
    if world.rank == 1:
        time.sleep(0.2)
    work = dist.all_to_all_single(torch.empty(world.size), torch.ones(world.size), async_op=True)
    assert work is not None
    work.wait()
    spent = time.perf_counter() - began
    seconds = world.pop_traffic().all_to_all_seconds
    least = 0.15 if world.rank == 0 else 0.0  # who comes late need not wait
    assert least < seconds <= spent, (least, seconds, spent)


def main() -> None:
    rank, ranks, port, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    each, blocks = int(sys.argv[5]), tuple(map(int, sys.argv[6:]))
    bounds = [*dict.fromkeys([each, *blocks, ranks])]
    levels = [LevelSpan(f"level {number}", size) for number, size in enumerate(bounds)]
    world_module.host_identity = lambda: f"host {rank // each}"  # what they cannot be on one machine
    place = RankInfo(rank, ranks, rank, f"127.0.0.1:{port}", bytes(32))
    store = rendezvous(place)
    told = folder / f"{rank}.txt"
    try:
        world = World.join(place, "gloo", store, levels=levels)
        recorder = FlightRecorder(FlightWriter(folder / f"{rank}.flight", rank))
        assert dist.group.WORLD is not None
        answering = own_collectives._answered[dist.group.WORLD.group_name]
        assert isinstance(answering, HostGroup if each == ranks else LevelCollectives)
        if isinstance(answering, LevelCollectives):
            bounds = [1, each, *blocks, ranks] if each > 1 else [1, *blocks, ranks]
            assert [level.size for level in answering.levels.levels] == [b // a for a, b in pairwise(bounds)]
        for case in CASES:
            before = turns()
            case(rank, ranks)
            left = not SAYS_REDUCTION and "reduce" in case.__name__
            left |= each < ranks and case.__name__ in LEFT_BETWEEN_HOSTS
            left |= each == 1
            assert (turns() > before) is not left, f"{case.__name__} did not go through the memory"
        before = turns()
        what_is_not_written_goes_to_the_library(rank, ranks)
        assert turns() == before
        recorder.close()
        traffic_is_counted_where_it_passes(world, each, blocks)
        exchanges_are_timed_and_what_consists_of_them_is_not(world)
        world.barrier()
        world.shutdown()
        faults = FAULTS if each == ranks and SAYS_REDUCTION else ()
        for number, fault in enumerate(faults, 1):
            world = World.join(place, "gloo", store, generation=number)
            fault(rank, ranks)
            world.shutdown()
        trial = TrialChoice()
        world = World.join(place, "gloo", store, generation=100, levels=levels, choice=trial)
        algorithms_are_as_chosen(world, trial)
        world.shutdown()
        if each == ranks:
            without_room_all_goes_over_sockets(place, store)
        told.write_text("passed")
    except BaseException:
        told.write_text(traceback.format_exc())
        raise


if __name__ == "__main__":
    main()
