"""AdamW and the learning rate over the run."""

from collections.abc import Iterable
from math import cos, pi
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from danlu.spec.recipe import Optimizer, Schedule


def build_optimizer(parts: Iterable[nn.Module], recipe: Optimizer) -> torch.optim.AdamW:
    """AdamW over the parameters of this rank; weight decay spares vectors."""
    return torch.optim.AdamW(
        parameter_groups(parts, recipe.weight_decay),
        lr=recipe.learning_rate,
        betas=(recipe.beta1, recipe.beta2),
        eps=recipe.epsilon,
        fused=True,
    )


def parameter_groups(parts: Iterable[nn.Module], weight_decay: float) -> list[dict[str, Any]]:
    """Groups for an optimiser: weight decay for matrices, and none for vectors (norms and biases).

    Parameters are grouped by mesh as well: fused kernels take tensors of one mesh at a time.
    """
    groups: dict[tuple[bool, DeviceMesh | None], list[nn.Parameter]] = {}
    for part in parts:
        for parameter in part.parameters():
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            groups.setdefault((parameter.ndim > 1, mesh), []).append(parameter)
    return [
        {"params": parameters, "weight_decay": weight_decay if decays else 0.0}
        for (decays, _), parameters in groups.items()
    ]


def learning_rate(step: int, steps: int, optimizer: Optimizer, schedule: Schedule) -> float:
    """Learning rate of step `step` (from 0) of `steps`: a pure function, so a resumed run needs no state of it."""
    return optimizer.learning_rate * _factor(step, steps, schedule)


def _factor(step: int, steps: int, schedule: Schedule) -> float:
    if step < schedule.warmup:
        return (step + 1) / schedule.warmup
    if schedule.kind == "constant":
        return 1.0
    start = schedule.warmup
    if schedule.kind == "wsd":
        start = max(start, steps - (steps // 10 if schedule.decay is None else schedule.decay))
    if step < start:
        return 1.0
    progress = (step - start) / max(1, steps - start)
    shape = (1 + cos(pi * progress)) / 2 if schedule.kind == "cosine" else 1 - progress
    return schedule.final + (1 - schedule.final) * shape
