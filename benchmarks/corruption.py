"""A bit of a gradient flips and the value stays finite: how often is it noticed?

    python benchmarks/corruption.py [--flips 400] [--report FILE]

One process trains a small model under its usual guard (`spikes.policy = "skip"`). Every few steps one bit of one
element of the gradients flips, both drawn at random, between the backward pass and the norm. It is found if the guard
calls that step a spike, or not finite. Most bits change next to nothing: reported are the recall of all flips and of
those that change the norm of the whole gradient by a tenth or more, and how often a step without a flip was called a
spike. There is no bar: this is what the guard sees today. The last line is JSON.
"""

import argparse
import json
import random
import sys
import tempfile
from dataclasses import dataclass, field
from math import isfinite, sqrt
from pathlib import Path
from typing import Any

import torch
from reports import add_report_option, write_report
from rich.progress import Progress
from torch import Tensor

from danlu.comm.mesh import build_mesh
from danlu.comm.rendezvous import RankInfo, rendezvous
from danlu.comm.world import World
from danlu.framework.batch_loader import BatchLoader
from danlu.framework.build import ForwardBackward, build_train_state
from danlu.framework.injected_faults import FlippedBit, flip_gradient_bit
from danlu.framework.loop import TrainStages, run_training_loop
from danlu.framework.stages import FixedData
from danlu.framework.state import TrainState
from danlu.parallel.batch import Batch
from danlu.spec import load_recipe
from danlu.spec.event import Event, SpikeEvent, StepEvent
from danlu.spec.plan import Plan
from danlu.storage.data.build import build_dataset
from danlu.storage.data.token_shards import ShuffledDataset, TokenShards
from danlu.storage.data.tokenizer import BytesTokenizer

WARM_UP, EVERY = 100, 5
HARMFUL = 0.1
RECIPE = """
name = "corruption"
steps = {steps}
[model]
base = "tiny-llama"
vocabulary = 264
[data]
shards = "shards"
[batch]
sequences = 8
length = 32
[spikes]
policy = "skip"
"""


@dataclass
class Flips:
    """A forward and backward after which a bit flips now and then; hears what the loop says about the step."""

    inner: ForwardBackward
    state: TrainState
    progress: Progress
    task: Any
    flips: dict[int, tuple[FlippedBit, float]] = field(default_factory=dict)
    """By step: what flipped, and the norm without it."""
    found: set[int] = field(default_factory=set)
    dice: random.Random = field(default_factory=lambda: random.Random(0))

    def __call__(self, batch: Batch, counted: Tensor | None = None) -> Tensor:
        """Forward and backward of one batch, and a flip if one is due."""
        loss = self.inner(batch, counted)
        step = self.state.step + 1
        if step > WARM_UP and step % EVERY == 0:
            gradients = [each.grad for each in self.state.parameters() if each.grad is not None]
            norm = float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(each) for each in gradients])))
            flipped = flip_gradient_bit(self.state.parameters(), self.dice)
            assert flipped is not None
            self.flips[step] = flipped, norm
            self.progress.advance(self.task)
        return loss

    def write(self, event: Event) -> None:
        """Remember the steps that the guard objects to."""
        if isinstance(event, SpikeEvent) or (isinstance(event, StepEvent) and event.reason):
            self.found.add(event.step)

    def warn(self, message: str) -> None:
        """Nothing else is to be said."""
        raise AssertionError(message)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flips", type=int, default=400)
    add_report_option(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, Progress(disable=not sys.stdout.isatty()) as progress:
        steps = WARM_UP + EVERY * arguments.flips
        flips = train(Path(folder), steps, progress, progress.add_task("flips", total=arguments.flips))
    figures = summarize(flips, steps)
    print(
        f"{figures['found']} of {figures['flips']} flips found ({figures['recall']:.1%}); of {figures['harmful']} that "
        f"change the norm by a tenth or more {figures['harmful_found']} ({figures['harmful_recall']:.1%}); "
        f"{figures['false_alarms']} of {figures['clean_steps']} other steps were called spikes"
    )
    write_report(arguments.report, "corruption", figures)
    print(json.dumps({"benchmark": "corruption", **figures}))
    return 0


def train(folder: Path, steps: int, progress: Progress, task: Any) -> Flips:
    (folder / "recipe.toml").write_text(RECIPE.format(steps=steps))
    build_dataset(["python-stdlib"], folder / "shards", BytesTokenizer())
    world = World.join(RankInfo(), "gloo", rendezvous(RankInfo()))
    recipe = load_recipe(folder / "recipe.toml")
    mesh = build_mesh(Plan(), world, None, experts=False)
    state, forward_backward = build_train_state(recipe, Plan(), mesh)
    dataset = ShuffledDataset(TokenShards.open(folder / "shards"), recipe.batch.length, recipe.seed)
    flips = Flips(forward_backward, state, progress, task)
    data = FixedData(BatchLoader(dataset, recipe.batch, recipe.model.vocabulary, mesh))
    run_training_loop(recipe, state, mesh, TrainStages(data, flips, events=flips))
    world.shutdown()
    return flips


def summarize(flips: Flips, steps: int) -> dict[str, Any]:
    def changes(flipped: FlippedBit, norm: float) -> bool:
        squared = norm**2 - flipped.before**2 + flipped.after**2
        return not isfinite(squared) or abs(sqrt(max(0.0, squared)) / norm - 1) >= HARMFUL

    harmful = {step for step, (flipped, norm) in flips.flips.items() if changes(flipped, norm)}
    found = flips.found & flips.flips.keys()
    by_bit: dict[str, list[int]] = {}
    for step, (flipped, _) in flips.flips.items():
        kind = "sign" if flipped.bit == 31 else "exponent" if flipped.bit > 22 else "mantissa"
        counts = by_bit.setdefault(kind, [0, 0])
        counts[0] += 1
        counts[1] += step in found
    return {
        "flips": len(flips.flips),
        "found": len(found),
        "recall": len(found) / len(flips.flips),
        "harmful": len(harmful),
        "harmful_found": len(harmful & found),
        "harmful_recall": len(harmful & found) / max(1, len(harmful)),
        "false_alarms": len({step for step in flips.found if step > WARM_UP} - flips.flips.keys()),
        "clean_steps": steps - WARM_UP - len(flips.flips),
        "by_bit": by_bit,
    }


if __name__ == "__main__":
    sys.exit(main())
