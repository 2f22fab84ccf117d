"""Loss on held-out data and samples of text, on any layout, between two steps."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from danlu.comm.mesh import ParallelMesh
from danlu.framework.batch_loader import BatchLoader
from danlu.framework.forward_only import evaluation_mode, make_forward, microbatch_rows
from danlu.framework.prompt_sampler import PromptSampler
from danlu.framework.stages import NoProgress, ProgressStage
from danlu.framework.state import TrainState
from danlu.parallel.batch import IGNORE_INDEX, Batch
from danlu.parallel.loss import cross_entropy_sum
from danlu.spec.event import EvaluationEvent
from danlu.spec.recipe import Recipe
from danlu.spec.samples import Sample
from danlu.storage.data.held_out import HeldOutSamples
from danlu.storage.data.open_shards import open_shards
from danlu.storage.data.token_shards import OnWarning

SaveSamples = Callable[[int, list[Sample]], None]
"""Keeps the samples of a step; called on every rank."""


@dataclass
class _HeldOut:
    """One data set and how far this rank has read it."""

    samples: HeldOutSamples
    loader: BatchLoader
    rows: int
    """Samples that all ranks read at once."""
    cursor: int = 0
    """Grows from one evaluation to the next: what is prefetched at the end of one is the beginning of the next."""


class Evaluation:
    """Evaluates held-out data sets and continues prompts. All ranks create one, and call it, together."""

    def __init__(
        self,
        recipe: Recipe,
        mesh: ParallelMesh,
        state: TrainState,
        on_warning: OnWarning,
        report_phase: Callable[[str], None] = lambda phase: None,
        sampler: PromptSampler | None = None,
        save_samples: SaveSamples = lambda step, samples: None,
        progress: ProgressStage | None = None,
    ) -> None:
        """`report_phase` is told what is being evaluated, and nothing when training goes on; `progress` every batch."""
        self.report_phase, self._progress = report_phase, progress or NoProgress()
        self._sampler, self._save_samples = sampler, save_samples
        self.every, self.steps = recipe.evaluation.every, recipe.steps
        self._mesh, self._modules = mesh, state.stage_modules
        self._vocabulary, self._length = recipe.model.vocabulary, recipe.batch.length
        self._forward = make_forward(recipe, mesh, state.stage_modules)
        self._microbatch = microbatch_rows(recipe, mesh)
        self._sets = {source.name: self._open(recipe, source.shards, on_warning) for source in recipe.evaluation.data}

    def _open(self, recipe: Recipe, where: str, on_warning: OnWarning) -> _HeldOut:
        shards = open_shards(where, recipe.data, check_sizes=self._mesh.rank == 0, on_warning=on_warning)
        samples = HeldOutSamples(shards, recipe.batch.length, recipe.evaluation.tokens)
        plan = self._mesh.plan
        least = self._microbatch * plan.degrees.dp
        # A pipeline is filled with as many microbatches as in training; without one a microbatch at a time is as fast.
        together = min(plan.microbatches, -(-samples.count // least)) if plan.degrees.pp > 1 else 1
        samples.pad_to_multiple(least * together)
        batch = recipe.batch.model_copy(update={"sequences": least * together, "ramp": ()})
        loader = BatchLoader(
            samples,
            batch,
            self._vocabulary,
            self._mesh,
            document_mask=recipe.data.document_mask,
            loss_mask=shards.index.has_loss_mask,
        )
        return _HeldOut(samples, loader, batch.sequences)

    def run_if_due(self, state: TrainState) -> EvaluationEvent | None:
        """Evaluate and sample if it is time to: at step 0 and every `every` steps, and at the end of the run."""
        if state.step != self.steps and not (self.every and state.step % self.every == 0):
            return None
        if self._sampler is not None:
            self.report_phase("sampling")
            with evaluation_mode(self._modules):
                samples = self._sampler.run(self._forward)
            self._save_samples(state.step, samples)
            self.report_phase("")
        return self.run(state.step) if self._sets else None

    def run(self, step: int) -> EvaluationEvent:
        """Evaluate every data set; `step` is that of the event."""
        started = time.perf_counter()
        with evaluation_mode(self._modules):
            found = [self._sums(name, held_out, step) for name, held_out in self._sets.items()]
        # A tp group computes one loss; counts are integers, so that those of trillions of tokens are exact.
        counts = torch.tensor([count for _, count in found], device=self._mesh.device)
        self._mesh.world.all_reduce(counts)
        counts //= self._mesh.size("tp")
        shares = [total / self._mesh.size("tp") for total, _ in found]
        means = (torch.tensor(shares, dtype=torch.float64) / counts.cpu()).to(self._mesh.device, torch.float32)
        self._mesh.world.all_reduce(means)
        self.report_phase("")
        return EvaluationEvent(
            time=time.time(),
            step=step,
            losses=dict(zip(self._sets, means.tolist(), strict=True)),
            tokens=dict(zip(self._sets, counts.tolist(), strict=True)),
            seconds=time.perf_counter() - started,
        )

    def _sums(self, name: str, held_out: _HeldOut, step: int) -> tuple[float, int]:
        """The sum of a data set's losses on this rank, and how many targets are in it."""
        self.report_phase(f"evaluating on {name}")
        losses: list[Tensor] = []
        counted = 0
        for _ in range(held_out.samples.padded // held_out.rows):
            self._progress.enter_phase("evaluating", step)  # for the watch a rank moves, with collectives or without
            batch = held_out.loader.at(held_out.cursor)
            first = held_out.cursor % held_out.samples.padded + self._mesh.dp_rank * len(batch.tokens)
            real = max(0, held_out.samples.count - first)  # rows of this rank that count; the rest fill up
            losses += self._losses(batch, real)
            counted += int((batch.targets[:real] != IGNORE_INDEX).sum())
            held_out.cursor += held_out.rows
        if not losses:
            return 0.0, 0
        return float(torch.stack(losses).cpu().double().sum()), counted

    def _losses(self, batch: Batch, real: int) -> list[Tensor]:
        """Losses of the microbatches of this rank's rows, of which the first `real` count."""

        def loss(logits: Tensor, microbatch: int) -> Tensor:
            rows = min(self._microbatch, real - microbatch * self._microbatch)
            if rows <= 0:
                return torch.zeros((), device=logits.device)
            wanted = batch.targets[microbatch * self._microbatch :][:rows]
            group = None if logits.shape[-1] == self._vocabulary else self._mesh.group("tp")
            return cross_entropy_sum(logits[:rows], wanted, group)

        return self._forward(batch.microbatches(len(batch.tokens) // self._microbatch), loss)
