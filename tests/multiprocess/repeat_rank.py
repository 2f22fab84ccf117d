"""One rank of the repeat test: the same run twice, stopped and resumed, resumed at another layout."""

import json
import sys
from functools import partial
from pathlib import Path

import torch
from layouts import STEPS, recipe
from training import train_in_memory

from danlu.comm.join import Place, join, leave, meet
from danlu.framework.state import TrainState
from danlu.spec.event import StepReport
from danlu.spec.plan import Degrees, Plan
from danlu.storage.checkpoint.checkpoints import Checkpoints, open_checkpoints

STOPS = (1, 3, 5, 7, 9)


def losses(reports: list[StepReport]) -> list[str]:
    """Every bit of the losses."""
    return [report.loss.hex() for report in reports]


def resume(checkpoints: Checkpoints, step: int, state: TrainState) -> None:
    scalars, proof = checkpoints.load(step, state.tensors())
    assert proof.tensors == len(state.tensors())
    state.restore(scalars)


def main() -> None:
    rank, world, port, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    place = Place(rank=rank, world=world, local_rank=rank, store=f"127.0.0.1:{port}")
    join(place, "gloo", meet(place))
    results: dict[str, dict[str, list[str]]] = {}
    for model in ("tiny-llama", "tiny-moe"):
        made = recipe(model, str(folder / "shards"), {"balance": "bias"} if model == "tiny-moe" else {})
        plan = Plan(degrees=Degrees(shard=2, ep=2 if model == "tiny-moe" else 1))
        found = {"first": losses(train_in_memory(made, plan, rank)[0])}
        found["second"] = losses(train_in_memory(made, plan, rank)[0])
        checkpoints = open_checkpoints(folder / model, len(STOPS), torch.device("cpu"))
        for stop in STOPS:
            before, state = train_in_memory(made, plan, rank, stop_at=stop)
            checkpoints.save(state.step, state.tensors(), state.scalars())
            assert state.step == stop
            after, state = train_in_memory(made, plan, rank, partial(resume, checkpoints, stop))
            assert state.step == STEPS
            assert state.cursor == STEPS * made.batch.sequences
            found[f"stopped at {stop}"] = losses(before + after)
        other = Plan(degrees=Degrees(tp=2))
        after, _ = train_in_memory(made, other, rank, partial(resume, checkpoints, 5))
        found["resumed at 5 with tp"] = found["first"][:5] + losses(after)
        results[model] = found
    if rank == 0:
        (folder / "repeat.json").write_text(json.dumps(results))
    leave()


if __name__ == "__main__":
    main()
