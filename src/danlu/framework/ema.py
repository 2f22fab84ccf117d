"""The exponential moving average of a run's parameters."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from danlu.torch_compat import foreach_lerp_


class ParameterEma:
    """A running mean of every parameter that this rank holds a shard of, in fp32 and sharded alike: no communication.

    It starts from the parameters before the first update, whatever they were loaded from.
    """

    def __init__(self, decay: float, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Allocates the mean; `start` gives it values."""
        self.decay = decay
        self.updates = 0
        """Optimizer steps that it has followed; part of a checkpoint."""
        self.tensors: dict[str, Tensor] = {name: torch.zeros_like(each) for name, each in named_parameters}

    @torch.no_grad()
    def start(self, parameters: Iterable[nn.Parameter]) -> None:
        """Copy the parameters if this is the first update; called before the optimizer moves them."""
        if self.updates == 0:
            for mean, parameter in zip(self.tensors.values(), parameters, strict=True):
                _local(mean).copy_(_local(parameter))

    @torch.no_grad()
    def update(self, parameters: Iterable[nn.Parameter]) -> None:
        """Follow the parameters; called after the optimizer moved them."""
        means = [_local(mean) for mean in self.tensors.values()]
        foreach_lerp_(means, [_local(parameter) for parameter in parameters], 1 - self.decay)
        self.updates += 1


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
