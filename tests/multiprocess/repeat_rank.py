"""One rank of the repeat test: the same run twice, stopped and resumed, resumed at another layout."""

import json
import sys
from functools import partial
from pathlib import Path

import brought_layouts
import torch
from brought_layouts import MAP, Brought
from layouts import STEPS, recipe
from training import train_in_memory

from danlu.comm.rendezvous import RankInfo, rendezvous
from danlu.comm.world import World
from danlu.framework.state import TrainState
from danlu.spec.event import StepEvent
from danlu.spec.plan import Degrees, Plan
from danlu.spec.recipe import Recipe
from danlu.storage.checkpoint.engine import CheckpointEngine, open_checkpoint_engine

STOPS = {"tiny-llama": (1, 3, 5, 7, 9), "tiny-moe": (1, 3, 5, 7, 9), "dropout": (5,)}
RESUMED_AT = 5
"""Where also another layout goes on."""


def recipe_of(model: str, shards: str) -> Recipe:
    if model == "dropout":
        layout = Brought(model, "PlainModel", Plan(), {"dropout": 0.2, "layers": 2}, MAP)
        return brought_layouts.recipe(layout, shards).model_copy(update={"steps": STEPS})
    return recipe(model, shards, {"balance": "bias"} if model == "tiny-moe" else {})


def losses(reports: list[StepEvent]) -> list[str]:
    """Every bit of the losses."""
    return [report.loss.hex() for report in reports]


def resume(checkpoints: CheckpointEngine, step: int, state: TrainState) -> None:
    scalars, proof = checkpoints.load(step, state.tensors())
    assert proof.tensors_verified == len(state.tensors())
    state.restore_scalars(scalars)


def main() -> None:
    rank, world, port, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    place = RankInfo(rank=rank, world_size=world, local_rank=rank, endpoint=f"127.0.0.1:{port}", token=bytes(32))
    joined = World.join(place, "gloo", rendezvous(place))
    results: dict[str, dict[str, list[str]]] = {}
    for model, stops in json.loads(sys.argv[5]).items():
        made = recipe_of(model, str(folder / "shards"))
        plan = Plan(degrees=Degrees(shard=2, ep=2 if model == "tiny-moe" else 1))
        found = {"first": losses(train_in_memory(made, plan, rank)[0])}
        found["second"] = losses(train_in_memory(made, plan, rank)[0])
        checkpoints = open_checkpoint_engine(folder / model, len(stops) + 1, World.adopt())
        for stop in sorted({*stops, RESUMED_AT}):
            before, state = train_in_memory(made, plan, rank, stop_at=stop)
            checkpoints.save(state.step, state.tensors(), state.scalars())
            assert state.step == stop
            after, state = train_in_memory(made, plan, rank, partial(resume, checkpoints, stop))
            assert state.step == STEPS
            assert state.cursor == STEPS * made.batch.sequences
            found[f"stopped at {stop}"] = losses(before + after)
        other = Plan(degrees=Degrees(tp=2), microbatches=2)  # as many microbatches in all: dropout draws for each
        after, _ = train_in_memory(made, other, rank, partial(resume, checkpoints, RESUMED_AT))
        found["resumed with tp"] = found["first"][:RESUMED_AT] + losses(after)
        results[model] = found
    if rank == 0:
        (folder / "repeat.json").write_text(json.dumps(results))
    joined.shutdown()


if __name__ == "__main__":
    main()
