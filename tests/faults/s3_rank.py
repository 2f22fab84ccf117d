"""One of two ranks that train a toy and save into an object store which dies in the middle.

    python s3_rank.py RANK WORLD PORT WORK ENDPOINT

WORK is where ranks and test meet: the test kills the server when `begun` appears, and starts it again when `done-0`
does; then it writes `back`.
"""

import json
import sys
import time
from pathlib import Path

import fsspec.config
import torch
from torch import Tensor
from torch.distributed import all_reduce, barrier
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from danlu.comm.rendezvous import RankInfo, rendezvous
from danlu.comm.world import World
from danlu.storage.checkpoint.engine import CheckpointEngine
from danlu.storage.store.base import open_store

sys.path.append(str(Path(__file__).parents[1] / "engines"))

from s3_lab import BUCKET, KEY, SECRET

STEPS = 12
ROWS, COLUMNS = 1024, 1024


def trained(weight: Tensor, step: int) -> float:
    """One step of a toy: what it does depends on the step and on the weights, and both ranks take part."""
    draw = torch.Generator().manual_seed(step)
    weight.sub_(0.1 * (weight - torch.randn(weight.shape, generator=draw)))
    loss = weight.square().mean()
    all_reduce(loss)
    return float(loss)


def main() -> None:
    rank, world, port = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    work, endpoint = Path(sys.argv[4]), sys.argv[5]
    fsspec.config.conf["s3"] = {"key": KEY, "secret": SECRET}
    place = RankInfo(rank, world, rank, f"127.0.0.1:{port}", bytes(32))
    joined = World.join(place, "gloo", rendezvous(place))
    mesh = init_device_mesh("cpu", (world,))
    options = {"endpoint": endpoint, "connect_timeout": "2", "read_timeout": "4", "part_bytes": str(5 << 20)}
    store = open_store(f"s3://{BUCKET}/run", options)
    checkpoints = CheckpointEngine(store, 2, World.adopt(), staging=work / "staging", timeout=60.0)
    local = torch.zeros(ROWS // world, COLUMNS)
    state = {"weight": DTensor.from_local(local, mesh, [Shard(0)])}
    losses, failures = [], []
    for step in range(1, STEPS + 1):
        losses.append(trained(local, step))
        if step == 4:
            checkpoints.save(step, state, {"step": step})
        if step in (6, 8, 10):
            checkpoints.async_save(step, state, {"step": step})
        if step == 6 and rank == 0:
            (work / "begun").touch()
        if step > 6:
            time.sleep(0.3)
        failures += [(outcome.step, outcome.error) for outcome in checkpoints.pop_results() if outcome.error]
    checkpoints.wait_for_saves()
    failures += [(outcome.step, outcome.error) for outcome in checkpoints.pop_results() if outcome.error]
    barrier()
    (work / f"told-{rank}").write_text(json.dumps({"losses": losses, "failures": failures}))
    (work / f"done-{rank}").touch()
    while not (work / "back").exists():
        time.sleep(0.05)
    assert checkpoints.latest_step() is not None
    checkpoints.save(STEPS, state, {"step": STEPS})
    read = {"weight": DTensor.from_local(torch.zeros_like(local), mesh, [Shard(0)])}
    checkpoints.load(STEPS, read)
    assert torch.equal(read["weight"].to_local(), local)
    (work / f"steps-{rank}").write_text(json.dumps(checkpoints.checkpoint_dir.resumable_steps()))
    checkpoints.close()
    joined.shutdown()


if __name__ == "__main__":
    main()
