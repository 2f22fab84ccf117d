"""The state of a training run as one value."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from danlu.framework.ema import ParameterEma
from danlu.framework.layer_seeds import LayerSeeds, hash_seed
from danlu.framework.loss_scale import LossScaler
from danlu.framework.owned_parameters import owned_parameters, owned_tensors
from danlu.framework.step_guard import StepGuard


@dataclass
class TrainState:
    """Everything a run needs to continue: this rank's shards, under global names.

    The learning rate, the order of the data and the random numbers of a step are pure functions of
    seed and step, so they need no state.
    """

    stage_modules: list[nn.Module]
    optimizer: torch.optim.Optimizer
    seed: int
    step: int = 0
    cursor: int = 0
    """Index of the next sample."""
    layer_seeds: list[LayerSeeds] = field(default_factory=list)
    """Seeds of the layers that may draw random numbers."""
    ema: ParameterEma | None = None
    """The average of the parameters, if the recipe has one."""
    loss_scaler: LossScaler | None = None
    """The scale of the loss, if anything is fp16."""
    guard: StepGuard = field(default_factory=StepGuard)
    """Decides which steps are applied; what it learned from earlier ones is part of the state."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter that this rank holds a shard of, by global name."""
        for stage_module in self.stage_modules:
            yield from owned_parameters(stage_module)

    def parameters(self) -> list[nn.Parameter]:
        """The same, without names."""
        return [parameter for _, parameter in self.named_parameters()]

    def seed_step(self, data_index: int) -> None:
        """Seed the random numbers of this step: the same after a resume as without one.

        Ranks that hold shards of the same sequences have one `data_index`, and draw the same.
        """
        torch.manual_seed(hash_seed(self.seed, self.step, data_index))
        for seeds in self.layer_seeds:
            seeds.begin_step(self.seed, self.step, data_index)

    def optimizer_step(self, learning_rate: float) -> None:
        """Take an optimizer step."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate * group.get("learning_rate_factor", 1.0)
        if self.ema is not None:
            self.ema.start(self.parameters())
        self.optimizer.step()
        if self.ema is not None:
            self.ema.update(self.parameters())

    def next_step(self, samples: int) -> None:
        """Advance to the next step, whether or not this one was applied."""
        self.optimizer.zero_grad()
        self.step += 1
        self.cursor += samples

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the state by global name, the optimizer's included (created first if it has none yet)."""
        if not self.optimizer.state:
            self._prime_optimizer()
        tensors = self.model_tensors()
        moved = {parameter for group in self.optimizer.param_groups for parameter in group["params"]}
        for name, parameter in self.named_parameters():
            state = self.optimizer.state.get(parameter, {})
            if not state and parameter in moved and self.optimizer.state:
                raise RuntimeError(f"parameter {name} must have optimizer state to be saved, but has none")
            tensors |= {f"optimizer.{name}.{key}": value for key, value in state.items() if isinstance(value, Tensor)}
        if self.ema is not None:
            tensors |= {f"ema.{name}": mean for name, mean in self.ema.tensors.items()}
        return tensors

    def model_tensors(self) -> dict[str, Tensor]:
        """The tensors of the model by global name, without the optimizer's."""
        return {
            f"model.{name}": tensor
            for stage_module in self.stage_modules
            for name, tensor in owned_tensors(stage_module).items()
        }

    def scalars(self) -> dict[str, Any]:
        """The scalars of the state."""
        scalars = {"step": self.step, "cursor": self.cursor, "seed": self.seed, **self.guard.scalars()}
        if self.ema is not None:
            scalars["ema_updates"] = self.ema.updates
        return scalars | (self.loss_scaler.scalars() if self.loss_scaler else {})

    def restore_scalars(self, scalars: Mapping[str, Any]) -> None:
        """Restore the scalars of a checkpoint whose tensors have been read; its data order must be this run's."""
        if scalars["seed"] != self.seed:
            raise ValueError(
                f"`seed` must be that of the checkpoint ({scalars['seed']}), but is {self.seed} instead: "
                "the order of the data depends on it"
            )
        self.step, self.cursor = scalars["step"], scalars["cursor"]
        self.guard.restore(scalars)
        if self.ema is not None:
            self.ema.updates = scalars["ema_updates"]
        if self.loss_scaler:
            self.loss_scaler.restore(scalars)

    def _prime_optimizer(self) -> None:
        """Make the optimizer create its state with a step of zero length, so that a checkpoint can be read into it."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for state in self.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    value.zero_()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
