"""One rank that runs one collective after the other until a file says so: RANK WORLD PORT FOLDER RANKS_ON_A_HOST CASES.

`running` in FOLDER has the case that runs; it ends when `over-CASE` is there, as all ranks agree between two calls.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from danlu.comm import world as world_module
from danlu.comm.chosen_collectives import TrialChoice
from danlu.comm.flight_record import FlightWriter, flight_path, make_flight_folder
from danlu.comm.flight_recorder import FlightRecorder
from danlu.comm.rank_layout import LevelSpan
from danlu.comm.rendezvous import RankInfo, rendezvous
from danlu.comm.world import World
from danlu.torch_compat import all_gather_single, reduce_scatter_single

ELEMENTS = 2**18


def all_reduce(rank: int, ranks: int) -> None:
    dist.all_reduce(torch.ones(ELEMENTS))


def reduce_scatter(rank: int, ranks: int) -> None:
    reduce_scatter_single(torch.empty(ELEMENTS // ranks), torch.ones(ELEMENTS))


def all_gather(rank: int, ranks: int) -> None:
    all_gather_single(torch.empty(ELEMENTS), torch.ones(ELEMENTS // ranks))


def all_to_all(rank: int, ranks: int) -> None:
    dist.all_to_all_single(torch.empty(ELEMENTS), torch.ones(ELEMENTS))


def uneven_all_to_all(rank: int, ranks: int) -> None:
    """To every rank as many rows as its number says."""
    width = ELEMENTS // ranks**2
    counts = [other + 1 for other in range(ranks)]
    given, found = torch.ones(sum(counts), width), torch.empty((rank + 1) * ranks, width)
    dist.all_to_all_single(found, given, [rank + 1] * ranks, counts)


def broadcast(rank: int, ranks: int) -> None:
    dist.broadcast(torch.ones(ELEMENTS), 1)


def barrier(rank: int, ranks: int) -> None:
    dist.barrier()


CALLS: dict[str, Callable[[int, int], None]] = {
    each.__name__: each
    for each in (all_reduce, reduce_scatter, all_gather, all_to_all, uneven_all_to_all, broadcast, barrier)
}


def main() -> None:
    rank, ranks, port, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    each, cases = int(sys.argv[5]), json.loads(sys.argv[6])
    torch.set_num_threads(1)
    levels = [LevelSpan("host", each), LevelSpan("cluster", ranks)] if each < ranks else [LevelSpan("host", ranks)]
    world_module.host_identity = lambda: f"host {rank // each}"  # what they cannot be on one machine
    place, trial = RankInfo(rank, ranks, rank, f"127.0.0.1:{port}", bytes(32)), TrialChoice()
    world = World.join(place, "gloo", rendezvous(place), levels=levels, choice=trial)
    make_flight_folder(folder)
    agreeing = dist.new_group(range(ranks), group_desc="agreeing")
    recorder = FlightRecorder(FlightWriter(flight_path(folder, rank), rank))
    for number, (algorithm, call) in enumerate(cases):
        trial.algorithm = algorithm
        if rank == 0:
            (folder / "running.tmp").write_text(str(number))
            (folder / "running.tmp").rename(folder / "running")
        over = torch.zeros(1)
        while not over:
            CALLS[call](rank, ranks)
            over.fill_((folder / f"over-{number}").exists())
            dist.all_reduce(over, dist.ReduceOp.MAX, agreeing)
    recorder.close()
    world.barrier()
    world.shutdown()


if __name__ == "__main__":
    main()
