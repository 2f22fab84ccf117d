"""One rank of real ranks that save together, on disks that write every call down; see `rank_crashes.py`."""

import json
import os
import random
import sys
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from made_checkpoints import KEEP, content
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from danlu.comm.rendezvous import RankInfo, rendezvous
from danlu.comm.world import World
from danlu.storage.checkpoint.async_saver import SavePolicy
from danlu.storage.checkpoint.engine import CheckpointEngine
from danlu.storage.store.base import Buffer
from danlu.storage.store.local_store import LocalStore

STEPS = (10, 20, 30, 40)
NO_ATTEMPT = "00000000"
"""The content of a save depends on its step alone, as that of a training run does."""


class Dawdling(LocalStore):
    """Waits a moment before each file, drawn by lot: so ranks overtake each other, differently for every seed."""

    def __init__(self, folder: Path, seed: str) -> None:
        super().__init__(folder)
        self._dice = random.Random(seed)

    def write(self, path: str, parts: Iterable[Buffer]) -> None:
        time.sleep(self._dice.choice((0.0, 0.0, 0.004, 0.02)))
        super().write(path, parts)


def state(step: int) -> dict[str, Tensor]:
    """What this rank holds of a save: rows of two tensors, and a number that every rank has."""
    mesh, whole = init_device_mesh("cpu", (dist.get_world_size(),)), content(step, NO_ATTEMPT)
    return {
        name: distribute_tensor(torch.tensor(tensor), mesh, [Shard(0) if tensor.ndim else Replicate()])
        for name, tensor in whole.items()
    }


def save_all(disk: Path, staging: Path, parity: int, seed: str) -> dict[int, str]:
    """Save every step, the oldest go; marks say what the ranks know. The attempt that made each checkpoint."""
    rank, world = dist.get_rank(), dist.get_world_size()
    store = Dawdling(disk / "run", f"{seed}-{rank}")
    policy = SavePolicy(parity=parity, parity_group_size=2)
    checkpoints = CheckpointEngine(store, KEEP, World.adopt(), staging=staging, policy=policy)
    attempts = {}
    for number, step in enumerate(STEPS):
        if number >= KEEP and rank == 0:
            os.setxattr(disk, "user.mark", f"dropping {STEPS[number - KEEP]}".encode())
        dist.barrier()
        assert checkpoints.async_save(step, state(step), {"step": step}, overlap=step % 20 == 0)
        checkpoints.wait_for_saves()
        (outcome,) = checkpoints.pop_results()
        assert not outcome.error and not outcome.post_commit_error, outcome
        if rank == number % world:  # any rank that has returned may count on it
            os.setxattr(disk, "user.mark", f"saved {step}".encode())
        manifest = checkpoints.checkpoint_dir.manifest_or_none(step)
        assert manifest is not None
        attempts[step] = manifest.attempt
        dist.barrier()
    checkpoints.close()
    return attempts


def main() -> None:
    rank, world, port, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    place = RankInfo(rank=rank, world_size=world, local_rank=rank, endpoint=f"127.0.0.1:{port}", token=bytes(32))
    joined = World.join(place, "gloo", rendezvous(place), timeout=timedelta(seconds=120))
    for name, parity in json.loads((folder / "scenarios.json").read_text()):
        attempts = save_all(folder / name / "disk", folder / name / "staging", parity, name)
        if rank == 0:
            (folder / name / "attempts.json").write_text(json.dumps(attempts))
    joined.shutdown()


if __name__ == "__main__":
    main()
