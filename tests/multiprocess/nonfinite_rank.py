"""One of two ranks that train on data of which some samples overflow, for one rank alone."""

import hashlib
import json
import sys
from pathlib import Path

import brought
import torch
from plain_loop import RandomRows
from torch.distributed.tensor import DTensor
from training import KeptSteps

from danlu.comm.mesh import build_mesh
from danlu.comm.rendezvous import RankInfo, rendezvous
from danlu.comm.world import World
from danlu.framework.batch_loader import BatchLoader
from danlu.framework.build import build_train_state
from danlu.framework.loop import TrainStages, run_training_loop
from danlu.framework.stages import FixedData, NoCheckpoints
from danlu.framework.state import TrainState
from danlu.framework.step_guard import DivergedError
from danlu.parallel.batch import Batch
from danlu.spec.custom_model import CustomModel
from danlu.spec.event import StepEvent
from danlu.spec.plan import Degrees, Plan
from danlu.spec.recipe import BatchConfig, DataConfig, Recipe

STEPS = 20
POISONED = (22, *(8 * step for step in range(6, STEPS)))
"""A sample of rank 1's in the third step; from the seventh step on samples of rank 0's."""


def digest(state: TrainState) -> str:
    """Of everything this rank holds of the state."""
    held = hashlib.blake2b()
    for name, tensor in sorted(state.tensors().items()):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        held.update(name.encode() + local.detach().contiguous().numpy().tobytes())
    return held.hexdigest()


class Digests(NoCheckpoints):
    """In place of a save, a digest of the state after every step."""

    def __init__(self, digests: list[str]) -> None:
        self.digests = digests

    def save_if_due(self, state: TrainState, last: bool) -> bool:
        self.digests.append(digest(state))
        return False


def main() -> None:
    rank, world, port, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    place = RankInfo(rank=rank, world_size=world, local_rank=rank, endpoint=f"127.0.0.1:{port}", token=bytes(32))
    joined = World.join(place, "gloo", rendezvous(place))
    own = CustomModel(
        factory="brought:Overflowing",
        path=str(Path(__file__).parent),
        arguments={"layers": 1},
        vocabulary=brought.VOCABULARY,
    )
    recipe = Recipe(
        name="nonfinite",
        steps=STEPS,
        model=own,
        data=DataConfig(shards="none"),
        batch=BatchConfig(sequences=8, length=16),
    )
    plan = Plan(degrees=Degrees(shard=2))
    mesh = build_mesh(plan, World.adopt(), None, experts=False)
    state, forward_backward = build_train_state(recipe, plan, mesh)
    samples = RandomRows(brought.VOCABULARY, recipe.batch.length, brought.POISON, POISONED)
    batches = BatchLoader(samples, recipe.batch, brought.VOCABULARY, mesh)
    reports: list[StepEvent] = []
    digests = [digest(state)]
    own_loss: list[bool] = []

    def watched(batch: Batch, counted: torch.Tensor | None = None) -> torch.Tensor:
        loss = forward_backward(batch, counted)
        own_loss.append(bool(loss.isfinite()))
        return loss

    ended = ""
    try:
        stages = TrainStages(FixedData(batches), watched, Digests(digests), events=KeptSteps(reports))
        run_training_loop(recipe, state, mesh, stages)
    except DivergedError as error:
        ended = str(error)
    found = {
        "committed": [report.committed for report in reports],
        "own loss finite": own_loss,
        "digests": digests,
        "cursor": state.cursor,
        "ended": ended,
    }
    (folder / f"nonfinite-{rank}.json").write_text(json.dumps(found))
    joined.shutdown()


if __name__ == "__main__":
    main()
