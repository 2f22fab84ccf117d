"""A plain PyTorch loop, written out: what a run at one process must equal. Nothing of Danlu's own loop is used here."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import cos, isfinite, pi, sqrt
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from danlu.spec.recipe import Recipe


class RandomRows:
    """Samples that are a function of their number; those in `poisoned` hold token `poison`, which no other does.

    Every other eight know few tokens, so that gradients are long and short by turns.
    """

    def __init__(self, vocabulary: int, length: int, poison: int = -1, poisoned: tuple[int, ...] = ()) -> None:
        self.vocabulary, self.length, self.poison, self.poisoned = vocabulary, length, poison, poisoned

    def read_samples(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.stack([self._row(int(index)) for index in indices])

    def _row(self, index: int) -> NDArray[np.int64]:
        known = 4 if index // 8 % 2 else self.vocabulary - 1
        row = np.random.default_rng(index).integers(0, known, self.length + 1)
        if index in self.poisoned:
            row[3] = self.poison
        return row


@dataclass
class PlainRun:
    """What a plain loop found, step by step."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    taken: list[bool] = field(default_factory=list)
    moments: dict[str, Tensor] = field(default_factory=dict)
    """AdamW's second moments after the last step, by parameter."""


def rate_of(step: int, recipe: Recipe) -> float:
    """Linear warm-up; then constant, cosine or linear to the end, or constant with a decay at the end."""
    schedule, steps, top = recipe.schedule, recipe.steps, recipe.optimizer.learning_rate
    bottom = schedule.final * top
    if step < schedule.warmup:
        return top * (step + 1) / schedule.warmup
    if schedule.kind == "constant":
        return top
    start = schedule.warmup
    if schedule.kind == "wsd":
        start = steps - (schedule.decay or 0)
        if step < start:
            return top
    done = (step - start) / (steps - start)
    if schedule.kind == "wsd" and schedule.shape == "1-sqrt":
        return top - (top - bottom) * sqrt(done)
    if schedule.kind == "cosine" or (schedule.kind == "wsd" and schedule.shape == "cosine"):
        return bottom + (top - bottom) * 0.5 * (1 + cos(pi * done))
    return top + (bottom - top) * done


def seed_layers(model: nn.Module, layers: nn.ModuleList) -> dict[str, Any]:
    """Before every layer, start random numbers that follow from the words returned and from the layer's number."""
    words: dict[str, Any] = {"seed": 0, "step": 0, "microbatch": 0}

    def seed(layer: object, *_: object) -> None:
        text = f"{words['seed']}/{words['step']}/{words['microbatch']}/{layer}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        torch.manual_seed(int.from_bytes(digest, "little") >> 1)

    model.register_forward_pre_hook(partial(seed, "before"))
    for number, layer in enumerate(layers):
        layer.register_forward_pre_hook(partial(seed, number))
    return words


def count_choices(model: nn.Module) -> dict[nn.Module, Tensor]:
    """Tokens that every router of `model` sent to each of its experts since they were last set to zero."""
    loads: dict[nn.Module, Tensor] = {}

    def count(router: nn.Module, _inputs: Any, output: tuple[Tensor, ...]) -> None:
        loads[router] += torch.bincount(output[0].flatten(), minlength=len(loads[router]))

    for module in model.modules():
        if isinstance(bias := getattr(module, "bias_E", None), Tensor):
            loads[module] = torch.zeros(len(bias))
            module.register_forward_hook(count)
    return loads


class Objective:
    """What a step minimizes: the cross-entropy of all tokens of its rows, divided by their number."""

    def count(self, rows: Tensor) -> int:
        """How many tokens are predicted in a whole batch."""
        return rows[:, 1:].numel()

    def loss_sum(self, model: nn.Module, rows: Tensor) -> Tensor:
        """Their cross-entropy in some of the rows, summed."""
        return F.cross_entropy(scores(model, rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")

    def further(self, model: nn.Module, rows: Tensor, sequences: int) -> Tensor | float:
        """What is minimized as well and reported apart, for some rows of a batch of so many."""
        return 0.0


def scores(model: nn.Module, tokens: Tensor) -> Tensor:
    """What a model of ours or of transformers says of tokens."""
    output = model(tokens)
    return output if isinstance(output, Tensor) else output.logits  # type: ignore[no-any-return]


def train_plainly(
    recipe: Recipe,
    model: nn.Module,
    samples: Any,
    microbatches: int = 1,
    objective: Callable[[int], Objective] = lambda first: Objective(),
) -> PlainRun:
    """Cross-entropy, accumulation, clipping by the whole norm, AdamW that decays matrices, experts evened by bias.

    `objective` gives what the step that begins with a sample minimizes. A batch that is still small has fewer
    microbatches of the same size.
    """
    settings, batch, run = recipe.optimizer, recipe.batch, PlainRun()
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=1.0, betas=(settings.beta1, settings.beta2), eps=settings.epsilon, foreach=False, fused=False,
    )  # fmt: skip
    loads = count_choices(model)
    words = seed_layers(model, model.layers) if isinstance(getattr(model, "layers", None), nn.ModuleList) else {}
    model.train()
    first = 0
    for step in range(recipe.steps):
        size = next((stage.sequences for stage in batch.ramp if step < stage.until), batch.sequences)
        rows = torch.from_numpy(samples.read_samples(np.arange(first, first + size)))
        loss, aim = 0.0, objective(first)
        first += size
        for number, piece in enumerate(rows.split(batch.sequences // microbatches)):
            words.update(seed=recipe.seed, step=step, microbatch=number)
            share = aim.loss_sum(model, piece) / aim.count(rows)
            (share + aim.further(model, piece, len(rows))).backward()
            loss += share.item()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = sqrt(sum(gradient.double().square().sum().item() for gradient in gradients))
        taken = isfinite(loss) and isfinite(norm)
        if taken:
            if norm > settings.clip:
                for gradient in gradients:
                    gradient *= settings.clip / norm
            for group in optimizer.param_groups:
                group["lr"] = rate_of(step, recipe)
            optimizer.step()
        for router, load in loads.items():
            if taken and recipe.decoder.moe.balance == "bias":  # type: ignore[union-attr]
                router.bias_E += recipe.decoder.moe.balance_rate * (load.mean() - load).sign()  # type: ignore
            load.zero_()
        optimizer.zero_grad()
        run.losses.append(loss)
        run.norms.append(norm)
        run.rates.append(rate_of(step, recipe))
        run.taken.append(taken)
    run.moments = {name: optimizer.state[p]["exp_avg_sq"] for name, p in model.named_parameters()}
    return run
