"""The state of a training run as one value."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class TrainState:
    """Everything a run needs to go on: what this rank holds of it, under global names.

    The learning rate, the order of the data and the random numbers of a step are pure functions of
    seed and step, so they have no state of their own.
    """

    parts: list[nn.Module]
    optimizer: torch.optim.Optimizer
    seed: int
    step: int = 0
    cursor: int = 0
    """Index of the next sample."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter this rank holds a piece of, by global name."""
        for part in self.parts:
            yield from part.named_parameters()

    def parameters(self) -> list[nn.Parameter]:
        """The same, without names."""
        return [parameter for _, parameter in self.named_parameters()]

    def seed_step(self, rank: int) -> None:
        """Start the random numbers of this step: the same after a resume as without one."""
        digest = hashlib.blake2b(f"{self.seed}/{self.step}/{rank}".encode(), digest_size=8).digest()
        torch.manual_seed(int.from_bytes(digest, "little") >> 1)

    def update(self, learning_rate: float) -> None:
        """Let the optimiser move the parameters along their gradients."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()

    def advance(self, samples: int) -> None:
        """Go on to the next step, whether or not this one moved the parameters."""
        self.optimizer.zero_grad()
        self.step += 1
        self.cursor += samples

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the state by global name, the optimiser's included (made first if it has none yet)."""
        if not self.optimizer.state:
            self._prime_optimizer()
        tensors: dict[str, Tensor] = {}
        for part in self.parts:
            tensors |= {f"model.{name}": tensor for name, tensor in part.state_dict().items()}
        moved = {parameter for group in self.optimizer.param_groups for parameter in group["params"]}
        for name, parameter in self.named_parameters():
            state = self.optimizer.state.get(parameter, {})
            if not state and parameter in moved and self.optimizer.state:
                raise RuntimeError(f"parameter {name} must have optimiser state to be saved, but has none")
            tensors |= {f"optimizer.{name}.{key}": value for key, value in state.items() if isinstance(value, Tensor)}
        return tensors

    def scalars(self) -> dict[str, Any]:
        """The rest of the state."""
        return {"step": self.step, "cursor": self.cursor, "seed": self.seed}

    def restore(self, scalars: Mapping[str, Any]) -> None:
        """Take over the scalars of a checkpoint whose tensors have been read; its data order must be this run's."""
        if scalars["seed"] != self.seed:
            raise ValueError(
                f"`seed` must be that of the checkpoint ({scalars['seed']}), but is {self.seed} instead: "
                "the order of the data depends on it"
            )
        self.step, self.cursor = scalars["step"], scalars["cursor"]

    def _prime_optimizer(self) -> None:
        """Let the optimiser make its state with a step of zero length, so that a checkpoint can be read into it."""
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
