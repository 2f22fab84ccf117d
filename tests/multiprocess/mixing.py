"""A run on a mixture as the product makes it: supply, loop and checkpoints, with every sample it reads noted."""

import hashlib
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from layouts import recipe
from torch import Tensor

from danlu.comm.mesh import Mesh, build_mesh
from danlu.framework.build import build
from danlu.framework.feed import Feed
from danlu.framework.loop import train
from danlu.framework.state import TrainState
from danlu.framework.supply import Supply
from danlu.spec.event import StepReport
from danlu.spec.plan import Plan
from danlu.spec.recipe import Data, Recipe
from danlu.spec.run import RunFolder
from danlu.storage.build import build as build_shards
from danlu.storage.checkpoint.checkpoints import open_checkpoints
from danlu.storage.tokenizer import BytesTokenizer

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


def mixed(data: Data) -> Recipe:
    return recipe("tiny-llama", "none").model_copy(update={"data": data})


@dataclass
class Told:
    """What a rank can tell of a run."""

    losses: list[str] = field(default_factory=list)
    """Every bit of them."""
    rows: list[list[str]] = field(default_factory=list)
    """Hash of each sample this rank read, by step."""
    warnings: list[str] = field(default_factory=list)


class _Noted(Feed):
    """A feed that notes what is taken from it."""

    def __init__(self, feed: Feed, told: Told) -> None:
        self._feed, self._told = feed, told

    def at(self, cursor: int) -> tuple[Tensor, Tensor]:
        tokens, targets = self._feed.at(cursor)
        self._told.rows.append([hashlib.sha256(row.numpy().tobytes()).hexdigest()[:16] for row in targets])
        return tokens, targets


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
    mesh: Mesh = build_mesh(plan, torch.device("cpu"), rank, None, experts=False)
    state, forward_backward = build(made, plan, mesh)
    checkpoints = open_checkpoints(run / "checkpoints", 20, torch.device("cpu"))
    if resume:
        scalars, _ = checkpoints.load(resume, state.tensors())
        state.restore(scalars)
    told = Told()
    supply = Supply(folder, made, mesh, state.cursor)

    def save(state: TrainState, last: bool) -> None:
        after_step(state.step)
        told.warnings += supply.warnings()
        dist.barrier()
        if state.step % SAVE_EVERY == 0 or (last and not dies):
            checkpoints.save(state.step, state.tensors(), state.scalars())
            if not last:
                supply.take_up(state.cursor)

    def report(step: StepReport) -> None:
        told.losses.append(step.loss.hex())

    train(
        made, state, forward_backward, _Noted(supply.feed, told), mesh, lambda: 0, report, save,
        lambda: until is not None and state.step + 1 >= until,
    )  # fmt: skip
    checkpoints.close()
    return told


def wait_for(path: Path, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} does not appear")
        time.sleep(0.01)
