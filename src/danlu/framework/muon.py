"""Muon: momentum whose matrices are orthogonalized by Newton–Schulz iterations, wherever their shards are."""

from collections.abc import Callable, Iterable, Sequence
from math import sqrt
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from danlu.parallel.whole_matrices import Matrix, WholeMatrices

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration: they bring singular values near 1 in few steps (Jordan, "Muon", 2024)."""
EPSILON = 1e-7
"""Least norm that a matrix is divided by."""
LRAdjustment = Literal["original", "match_rms_adamw"]


def orthogonalize(matrix: Tensor, steps: int) -> Tensor:
    """Move all singular values of a matrix near 1, in its own dtype; operation by operation as `torch.optim.Muon`."""
    linear, cubic, quintic = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=EPSILON)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=cubic, alpha=quintic), x, beta=linear)
    return x.T if tall else x


def adjusted_rate(rate: float, adjustment: LRAdjustment, outputs: int, inputs: int) -> float:
    """The learning rate of a matrix with so many outputs and inputs."""
    if adjustment == "original":
        return rate * sqrt(max(1, outputs / inputs))
    return rate * (0.2 * sqrt(max(outputs, inputs)))


class Muon(torch.optim.Optimizer):
    """`torch.optim.Muon` for matrices and stacks of matrices that may be sharded over ranks in any way.

    A stack has the shape experts × inputs × outputs, the transpose of a linear layer's weight; each of its matrices
    is orthogonalized by itself. A step changes the gradients, to need no memory for another copy of them.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        weight_decay: float,
        momentum: float,
        nesterov: bool,
        steps: int,
        dtype: torch.dtype,
        adjustment: LRAdjustment,
    ) -> None:
        """`steps` are Newton–Schulz iterations, computed and sent in `dtype`."""
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.momentum, self.nesterov = momentum, nesterov
        self.iterations, self.dtype, self.adjustment = steps, dtype, adjustment
        self._matrices: tuple[list[Tensor], WholeMatrices] | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; a collective of the ranks that share them."""
        assert closure is None, "the loss is computed by the caller"
        moved: list[Tensor] = []
        rates: list[float] = []
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                self._add_to_momentum(parameter)
                if group["lr"]:  # a rate of 0 moves nothing: the step that creates the states of a checkpoint
                    _local(parameter).mul_(1 - group["lr"] * group["weight_decay"])
                    moved.append(parameter)
                    rates.append(group["lr"])
        if moved:
            self._move(moved, rates)

    def _add_to_momentum(self, parameter: Tensor) -> None:
        """Leaves the direction to be orthogonalized in the gradient."""
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        assert parameter.grad is not None
        gradient, momentum = _local(parameter.grad), _local(state["momentum_buffer"])
        momentum.lerp_(gradient, 1 - self.momentum)
        if self.nesterov:
            gradient.lerp_(momentum, self.momentum)

    def _move(self, parameters: list[Tensor], rates: Sequence[float]) -> None:
        if self._matrices is None or not _same(self._matrices[0], parameters):
            self._matrices = parameters, WholeMatrices(parameters, self.iterations, self.dtype)

        def read(matrix: Matrix) -> Tensor:
            parameter = parameters[matrix.parameter]
            assert parameter.grad is not None
            direction: Tensor = parameter.grad if self.nesterov else self.state[parameter]["momentum_buffer"]
            return _shard(direction, matrix)

        def write(matrix: Matrix, update: Tensor) -> None:
            parameter, (rows, columns) = parameters[matrix.parameter], matrix.shape
            sides = (rows, columns) if parameter.ndim == 2 else (columns, rows)
            rate = adjusted_rate(rates[matrix.parameter], self.adjustment, *sides)
            _shard(parameter, matrix).add_(update, alpha=-rate)

        self._matrices[1].apply(read, lambda whole: orthogonalize(whole, self.iterations), write)


def _same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _shard(tensor: Tensor, matrix: Matrix) -> Tensor:
    """This rank's shard of one matrix of a tensor; empty if the rank has none."""
    local = _local(tensor)
    if not local.numel():
        return local.reshape(matrix.local)
    return local[matrix.index] if tensor.ndim == 3 else local
