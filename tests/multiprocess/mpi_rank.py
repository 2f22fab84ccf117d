"""One rank of the tests of MPI, which `mpirun` started: cases as a user of `torch.distributed` calls them."""

import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from host_group_rank import CASES, SAYS_REDUCTION, drawn, everybodys, what_is_not_written_goes_to_the_library
from torch import nn

import danlu
from danlu.comm import own_collectives
from danlu.comm.mpi_group import MpiGroup, join_mpi


def calls_of(case: object) -> list[str]:
    """The collectives of MPI that a case calls."""
    called: list[str] = []

    def record(name: str) -> None:
        method = getattr(MpiGroup, name)

        def recorded(self: MpiGroup, *arguments: object) -> object:
            called.append(name)
            return method(self, *arguments)

        setattr(MpiGroup, name, recorded)
        restored.append((name, method))

    restored: list[tuple[str, object]] = []
    for name in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "barrier"):
        record(name)
    try:
        case(dist.get_rank(), dist.get_world_size())  # type: ignore[operator]
    finally:
        for name, method in restored:
            setattr(MpiGroup, name, method)
    return called


def halves_sum(rank: int, ranks: int) -> None:
    """A precision that MPI has not: the sum of all ranks is rounded once."""
    found = drawn(rank, 1000, torch.bfloat16) + 0.5
    dist.all_reduce(found)
    assert torch.equal(found, (everybodys(1000, torch.float32) + 0.5).sum(0).bfloat16())


def what_is_not_a_number_stays_so(rank: int, ranks: int) -> None:
    """Whichever rank has it: MPI's own maximum may lose it."""
    for source in range(ranks):
        for operation in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
            spoiled = torch.tensor([float("nan") if rank == source else 1.0, 1.0 + rank] * ranks)
            mine = torch.empty(2)
            dist.reduce_scatter_tensor(mine, spoiled, operation)
            assert mine.isnan().tolist() == [True, False], (source, operation)
            dist.all_reduce(spoiled, operation)
            assert spoiled.isnan().tolist() == [True, False] * ranks, (source, operation)
            expected = {dist.ReduceOp.SUM: ranks * (ranks + 1) / 2, dist.ReduceOp.MAX: float(ranks)}
            assert spoiled[1] == mine[1] == expected.get(operation, 1.0), (source, operation)


def train(rank: int, ranks: int) -> None:
    """A sharded module takes the same step as a whole one."""
    torch.manual_seed(0)
    whole, sharded = nn.Linear(8, 8), nn.Linear(8, 8)
    sharded.load_state_dict(whole.state_dict())
    sharded = danlu.parallelize(sharded, danlu.plan(shard=ranks))
    rows = torch.randn(4 * ranks, 8)
    whole(rows).square().mean().backward()
    sharded(rows[4 * rank : 4 * rank + 4]).square().mean().backward()
    for name, parameter in sharded.named_parameters():
        expected = whole.get_parameter(name).grad
        assert expected is not None
        torch.testing.assert_close(parameter.grad.full_tensor(), expected)  # type: ignore[union-attr]


def main() -> None:
    folder = Path(sys.argv[1])
    world = join_mpi()
    told = folder / f"{world.rank}.txt"
    try:
        assert dist.group.WORLD is not None
        assert isinstance(own_collectives._answered[dist.group.WORLD.group_name], MpiGroup)
        cases = (*CASES, halves_sum, *([what_is_not_a_number_stays_so] if SAYS_REDUCTION else []), train)
        for case in cases:
            left = not SAYS_REDUCTION and "reduce" in case.__name__
            assert bool(calls_of(case)) is not left, f"{case.__name__} did not go through MPI"
        assert not calls_of(what_is_not_written_goes_to_the_library)
        world.barrier()
        world.shutdown()
        told.write_text("passed")
    except BaseException:
        told.write_text(traceback.format_exc())
        raise


if __name__ == "__main__":
    main()
