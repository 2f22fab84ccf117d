"""One rank of the evaluation test: trains layouts with and without evaluation, in worlds of their sizes."""

import json
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from layouts import LAYOUTS, Layout, recipe
from torch import nn
from torch.distributed.tensor import DTensor
from training import KeptSteps
from worlds import Worlds

from danlu.comm.mesh import build_mesh
from danlu.comm.world import World
from danlu.framework.batch_loader import BatchLoader
from danlu.framework.build import build_train_state
from danlu.framework.evaluation import Evaluation
from danlu.framework.loop import TrainStages, run_training_loop
from danlu.framework.prompt_sampler import PromptSampler
from danlu.framework.stages import FixedData, NoEvaluation
from danlu.spec.event import EvaluationEvent, Event, StepEvent
from danlu.spec.plan import Plan
from danlu.spec.recipe import EvaluationConfig, EvaluationSource, Recipe, has_experts
from danlu.spec.samples import Sample
from danlu.storage.data.token_shards import ShuffledDataset, TokenShards
from danlu.storage.data.tokenizer import BytesTokenizer

RANK_FILE = Path(__file__)
STEPS = 3
TOKENS = {"long": 37 * 32 + 5, "short": 5 * 32 + 1}
"""37 sequences of which all are read, and 5: neither is a multiple of any layout's rows."""
READ = 32 * 32
"""Tokens that are read of each: a part of the first, all of the second."""
PROMPTS = ("The old furnace ", "", "Every morning the crane ", "No", "Rain over the harbour wall ")
"""Of several lengths: one that leaves less room than is asked for, and an empty one, which begins a document."""
SAMPLE_TOKENS = 6


MASKED = (
    "cp × interleaved",
    "tp × zbv",
    "gpt tied, tp",
    "moe hsdp × cp × ep 4",
    "fsdp, recompute full",
    "ring cp × interleaved",
)
"""Layouts that keep documents apart; the others read across their borders."""


class Kept(KeptSteps):
    """Keeps evaluations beside steps."""

    def __init__(self) -> None:
        super().__init__([])
        self.evaluations: list[EvaluationEvent] = []
        self.samples: list[list[Sample]] = []

    def write(self, event: Event) -> None:
        if isinstance(event, EvaluationEvent):
            self.evaluations.append(event)
        else:
            super().write(event)


def made_recipe(layout: Layout, folder: Path) -> Recipe:
    sets = tuple(EvaluationSource(name=name, shards=str(folder / name)) for name in TOKENS)
    evaluation = EvaluationConfig(every=1, tokens=READ, data=sets, prompts=PROMPTS, sample_tokens=SAMPLE_TOKENS)
    made = recipe(layout.model, str(folder / "shards"), layout.changes)
    data = made.data.model_copy(update={"document_mask": layout.name in MASKED})
    return made.model_copy(update={"steps": STEPS, "evaluation": evaluation, "data": data})


def reference(layout: Layout) -> str:
    """Name of the single-process run that a layout's evaluations must equal."""
    return f"{layout.reference}{', documents apart' if layout.name in MASKED else ''}"


def train(made: Recipe, plan: Plan, layout: Layout, evaluated: bool) -> tuple[Kept, list[nn.Module]]:
    mesh = build_mesh(plan, World.adopt(), layout.cluster, experts=has_experts(made.model))
    state, forward_backward = build_train_state(made, plan, mesh)
    samples = ShuffledDataset(TokenShards.open(Path(made.data.shards)), made.batch.length, made.seed)
    masked = made.data.document_mask
    batches = FixedData(BatchLoader(samples, made.batch, made.model.vocabulary, mesh, document_mask=masked))
    kept = Kept()
    sampler = PromptSampler(made, mesh, BytesTokenizer().end_of_text)
    evaluation = NoEvaluation()
    if evaluated:
        keep = lambda step, samples: kept.samples.append(samples)  # noqa: E731
        evaluation = Evaluation(made, mesh, state, kept.warn, sampler=sampler, save_samples=keep)
    stages = TrainStages(batches, forward_backward, evaluation=evaluation, events=kept)
    run_training_loop(made, state, mesh, stages)
    return kept, state.stage_modules


@torch.no_grad()
def plain_loss(model: nn.Module, folder: Path, name: str) -> float:
    """Held-out loss of a model on one process, from the bytes of the shard: none of Danlu's reading or adding up."""
    (file,) = (folder / name).glob("*.bin")
    tokens = torch.from_numpy(np.fromfile(file, dtype="<u2").astype(np.int64))
    samples = (len(tokens) - 1) // 32
    read = min(samples, READ // 32)
    chosen = [(number * samples // read) * 32 for number in range(read)]
    losses = [
        F.cross_entropy(model(tokens[None, start : start + 32])[0].double(), tokens[start + 1 : start + 33])
        for start in chosen
    ]
    return float(torch.stack(losses).mean())


@torch.no_grad()
def plain_sample(model: nn.Module, prompt: str) -> list[int]:
    """The most likely bytes after a prompt, by forward passes over it alone."""
    tokens = list(prompt.encode()) or [256]
    room = min(SAMPLE_TOKENS, 32 - len(tokens))
    for _ in range(room):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1, :257].argmax()))
        if tokens[-1] == 256:
            tokens.pop()
            break
    return tokens[max(1, len(prompt)) :]


def train_reference(layout: Layout, folder: Path) -> None:
    made = made_recipe(layout, folder)
    kept, (module,) = train(made, Plan(), layout, evaluated=True)
    plain = {name: plain_loss(module.eval(), folder, name) for name in TOKENS}
    told = {
        "evaluations": [event.losses for event in kept.evaluations],
        "plain": plain,
        "samples": texts(kept.samples),
        "plain_samples": [bytes(plain_sample(module, prompt)).decode(errors="replace") for prompt in PROMPTS],
    }
    (folder / f"{reference(layout)}.json").write_text(json.dumps(told))


def texts(samples: list[list[Sample]]) -> list[list[str]]:
    return [[each.text for each in step] for step in samples]


def train_layout(layout: Layout, rank: int, folder: Path) -> None:
    made = made_recipe(layout, folder)
    without, _ = train(made, layout.plan, layout, evaluated=False)
    kept, modules = train(made, layout.plan, layout, evaluated=True)

    def figures(steps: list[StepEvent]) -> list[tuple[float, float, float | None]]:
        return [(step.loss, step.norm, step.imbalance) for step in steps]

    told = {
        "name": layout.name,
        "evaluations": [event.losses for event in kept.evaluations],
        "steps": [event.step for event in kept.evaluations],
        "tokens": kept.evaluations[0].tokens,
        "samples": texts(kept.samples),
        "ends": [each.ended for each in kept.samples[-1]],
        "sharded": all(isinstance(each, DTensor) for module in modules for each in module.parameters()),
        "undisturbed": figures(kept.steps) == figures(without.steps),
    }
    (folder / f"evaluation-{LAYOUTS.index(layout)}-{rank}.json").write_text(json.dumps(told))


def main() -> None:
    rank, processes, port, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    selected = [layout for layout in LAYOUTS if layout.name in json.loads(sys.argv[5])]
    worlds = Worlds(rank, processes, port)
    for layout in {reference(layout): layout for layout in selected}.values():
        worlds.within(1, partial(train_reference, layout, folder))
    for layout in selected:
        worlds.within(layout.plan.degrees.world, partial(train_layout, layout, rank, folder))


if __name__ == "__main__":
    main()
