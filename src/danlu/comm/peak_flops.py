"""The matmul peak of all ranks together: the reference for MFU where no cluster file has one."""

import socket
from dataclasses import dataclass
from pathlib import Path

import torch

from danlu.chips import host
from danlu.chips.device_benchmark import best_matmul_size, matmul_flops
from danlu.chips.peak_cache import MeasuredPeak, update_peak_cache
from danlu.comm.world import World

ROUNDS = 5
ROUND_SECONDS = 0.12
"""All ranks at once, as in training: on a CPU they share memory, clock and, if many, cores."""
SIZE_SEARCH_SECONDS = 0.3
"""Seconds to search for the best matrix size."""


@dataclass(frozen=True)
class PeakCacheKey:
    """The cache file, and what identifies the ranks in it."""

    file: Path | None
    chip: str
    dtype: str
    local_rank: int


def measure_peak(world: World, dtype: torch.dtype, cache: PeakCacheKey) -> MeasuredPeak:
    """FLOP/s of all ranks in several short rounds, with those that earlier runs measured on this machine.

    Rank 0 updates the cache; the other ranks return their fresh rates. Only a run on one machine uses the cache:
    another run's ranks may be on other machines.
    """
    device = world.device
    side = best_matmul_size(device, dtype, SIZE_SEARCH_SECONDS)
    rates = torch.zeros(ROUNDS, device=device, dtype=torch.float32)
    for number in range(ROUNDS):
        world.barrier()
        rates[number] = matmul_flops(device, dtype, side, ROUND_SECONDS)
    world.all_reduce(rates)
    fresh = tuple(rates.tolist())
    (last,) = world.all_reduce_ints([cache.local_rank], "max")
    is_one_machine = last + 1 == world.size
    if world.rank or not is_one_machine:
        return MeasuredPeak(fresh)
    return update_peak_cache(cache.file, _machine_key(cache, world.size), fresh)


def _machine_key(cache: PeakCacheKey, ranks: int) -> str:
    """What must be equal for two rates to be comparable."""
    shape = f"{ranks} ranks × {torch.get_num_threads()} threads on {host.physical_cores()} cores"
    fields = (socket.gethostname(), cache.chip, host.cpu_name(), cache.dtype, shape, f"torch {torch.__version__}")
    return ", ".join(fields)
