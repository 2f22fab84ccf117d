"""AdamW and the learning rate over the run."""

from collections.abc import Iterable
from math import cos, pi
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from danlu.spec.recipe import LRSchedule, OptimizerConfig


def build_optimizer(stage_modules: Iterable[nn.Module], recipe: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the parameters of this rank; no weight decay for vectors."""
    return torch.optim.AdamW(
        param_groups(stage_modules, recipe.weight_decay),
        lr=recipe.learning_rate,
        betas=(recipe.beta1, recipe.beta2),
        eps=recipe.epsilon,
        fused=True,
    )


def param_groups(stage_modules: Iterable[nn.Module], weight_decay: float) -> list[dict[str, Any]]:
    """Groups for an optimizer: weight decay for matrices, and none for vectors (norms and biases).

    Parameters are grouped by mesh as well: fused kernels need tensors of one mesh.
    """
    groups: dict[tuple[bool, DeviceMesh | None], list[nn.Parameter]] = {}
    for stage_module in stage_modules:
        for parameter in stage_module.parameters():
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            groups.setdefault((parameter.ndim > 1, mesh), []).append(parameter)
    return [
        {"params": parameters, "weight_decay": weight_decay if decays else 0.0}
        for (decays, _), parameters in groups.items()
    ]


def learning_rate(step: int, steps: int, optimizer: OptimizerConfig, schedule: LRSchedule) -> float:
    """Learning rate of step `step` (from 0) of `steps`: a pure function, so a resumed run needs no state for it."""
    return optimizer.learning_rate * _factor(step, steps, schedule)


def _factor(step: int, steps: int, schedule: LRSchedule) -> float:
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
