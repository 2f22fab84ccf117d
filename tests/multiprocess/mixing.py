"""A run on a mixture as the product makes it: supply, loop and checkpoints, with every sample it reads noted."""

import hashlib
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist
from layouts import recipe

from danlu.comm.mesh import ParallelMesh, build_mesh
from danlu.comm.world import World
from danlu.framework.build import build_train_state
from danlu.framework.loop import TrainStages, run_training_loop
from danlu.framework.stages import IgnoreEvents, NoCheckpoints
from danlu.framework.state import TrainState
from danlu.framework.train_data import TrainData
from danlu.parallel.batch import Batch
from danlu.spec.event import Event, StepEvent
from danlu.spec.plan import Plan
from danlu.spec.recipe import DataConfig, Recipe
from danlu.spec.run_folder import RunFolder
from danlu.storage.checkpoint.engine import open_checkpoint_engine
from danlu.storage.data.build import build_dataset as build_shards
from danlu.storage.data.tokenizer import BytesTokenizer

SAVE_EVERY = 2


def write_texts(path: Path, characters: int, seed: int) -> str:
    dice = random.Random(seed)
    lines = [json.dumps({"text": "".join(dice.choices("abcdefgh \n", k=500))}) for _ in range(characters // 500)]
    path.write_text("\n".join(lines))
    return str(path)


def make_source(folder: Path, name: str, characters: int, seed: int) -> None:
    """Shards of random text."""
    build_shards(
        [write_texts(folder / f"{name}.jsonl", characters, seed)], folder / name, BytesTokenizer(), shard_tokens=100_000
    )


def mixed(data: DataConfig) -> Recipe:
    return recipe("tiny-llama", "none").model_copy(update={"data": data})


@dataclass
class Told:
    """What a rank can tell of a run."""

    losses: list[str] = field(default_factory=list)
    """Every bit of them."""
    rows: list[list[str]] = field(default_factory=list)
    """Hash of each sample this rank read, by step."""
    warnings: list[str] = field(default_factory=list)


class _Noted:
    """A data stage that notes what is read from it; warnings are collected after each step."""

    def __init__(self, data: TrainData, told: Told) -> None:
        self._data, self._told = data, told

    def pop_warnings(self) -> list[str]:
        return []

    def refresh(self, cursor: int) -> None:
        self._data.refresh(cursor)

    def at(self, cursor: int) -> Batch:
        batch = self._data.at(cursor)
        self._told.rows.append([hashlib.sha256(row.numpy().tobytes()).hexdigest()[:16] for row in batch.targets])
        return batch


def live(
    made: Recipe,
    plan: Plan,
    rank: int,
    run: Path,
    *,
    resume: int = 0,
    until: int | None = None,
    dies: bool = False,
    after_step: Callable[[int], None] = lambda step: None,
) -> Told:
    """Train from checkpoint `resume` to the end, or stop (and save) or die (and save nothing) after step `until`."""
    folder = RunFolder(run)
    folder.path.mkdir(parents=True, exist_ok=True)
    mesh: ParallelMesh = build_mesh(plan, World.adopt(), None, experts=False)
    state, forward_backward = build_train_state(made, plan, mesh)
    checkpoints = open_checkpoint_engine(run / "checkpoints", 20, World.adopt())
    if resume:
        scalars, _ = checkpoints.load(resume, state.tensors())
        state.restore_scalars(scalars)
    told = Told()
    data = TrainData(folder, made, mesh, state.cursor)

    class Saves(NoCheckpoints):
        def save_if_due(self, state: TrainState, last: bool) -> bool:
            after_step(state.step)
            told.warnings += data.pop_warnings()
            dist.barrier()
            if state.step % SAVE_EVERY == 0 or (last and not dies):
                checkpoints.save(state.step, state.tensors(), state.scalars())
                return True
            return False

    class Losses(IgnoreEvents):
        def write(self, event: Event) -> None:
            assert isinstance(event, StepEvent)
            told.losses.append(event.loss.hex())

    stages = TrainStages(
        _Noted(data, told),
        forward_backward,
        Saves(),
        events=Losses(),
        stop_requested=lambda: until is not None and state.step + 1 >= until,
    )
    run_training_loop(made, state, mesh, stages)
    checkpoints.close()
    return told


def wait_for(path: Path, seconds: float = 200) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} does not appear")
        time.sleep(0.01)
