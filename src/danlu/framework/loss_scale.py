"""Loss scaling for fp16, whose smallest numbers are larger than most gradients."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from danlu.framework.decoder.decoder import Decoder
from danlu.framework.decoder.moe import Router
from danlu.framework.step_metrics import StepMetrics
from danlu.spec.recipe import LossScaleConfig, PrecisionConfig
from danlu.torch_compat import foreach_mul_

MIN_SCALE, MAX_SCALE = 1.0, 2.0**24
"""The scale stays between these; at the first, gradients that are not finite are no overflow."""


class LossScaler:
    """Multiplies the loss, and with it all gradients, by a power of two that follows what fp16 can hold.

    An overflow halves it, and the step is skipped; `growth_interval` steps without one double it. All ranks decide from
    global metrics, so all have the same scale.
    """

    def __init__(self, config: LossScaleConfig) -> None:
        self.config = config
        self.scale = config.initial
        self.good_steps = 0
        """Steps since the scale last changed."""

    def apply(self, loss: Tensor) -> Tensor:
        """The loss to be differentiated."""
        return loss * self.scale

    def set_auxiliary(self, stage_modules: Iterable[nn.Module]) -> None:
        """Scale the losses of routers and of multi-token prediction too, whose gradients do not start at the loss."""
        for stage_module in stage_modules:
            if isinstance(stage_module, Decoder) and stage_module.mtp_losses is not None:
                stage_module.mtp_losses.loss_scale = self.scale
            for module in stage_module.modules():
                if isinstance(module, Router):
                    module.loss_scale = self.scale

    def unscaled(self, metrics: StepMetrics) -> StepMetrics:
        """Loss and norm as they are without the scale."""
        return replace(metrics, loss=metrics.loss / self.scale, norm=metrics.norm / self.scale)

    @torch.no_grad()
    def unscale_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Divide gradients by the scale: exact, since it is a power of two."""
        gradients = [
            each.grad.to_local() if isinstance(each.grad, DTensor) else each.grad
            for each in parameters
            if each.grad is not None
        ]
        foreach_mul_(gradients, 1 / self.scale)

    @property
    def can_back_off(self) -> bool:
        """Whether an overflow may be the scale's fault."""
        return self.scale > MIN_SCALE

    def update(self, metrics: StepMetrics) -> float:
        """Adapt the scale to a step, from its unscaled metrics; returns the scale that the step had."""
        used = self.scale
        if not (isfinite(metrics.loss) and isfinite(metrics.norm)):
            self.scale, self.good_steps = max(MIN_SCALE, used / 2), 0
            return used
        self.good_steps += 1
        if self.good_steps >= self.config.growth_interval:
            self.scale, self.good_steps = min(MAX_SCALE, used * 2), 0
        return used

    def scalars(self) -> dict[str, Any]:
        """What a checkpoint saves of it."""
        return {"loss_scale": self.scale, "loss_scale_good_steps": self.good_steps}

    def restore(self, scalars: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; one of a run without scaling starts with the usual scale."""
        self.scale = scalars.get("loss_scale", self.config.initial)
        self.good_steps = scalars.get("loss_scale_good_steps", 0)


def build_loss_scaler(precision: PrecisionConfig) -> LossScaler | None:
    """The scaler of a recipe; None if nothing is computed or reduced in fp16."""
    return LossScaler(precision.loss_scale) if precision.uses_fp16 else None
