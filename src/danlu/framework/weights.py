"""Weights from files into a model that may be spread over ranks: each rank reads its own slices."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from danlu.framework.transformer import Decoder
from danlu.spec.model import Model
from danlu.spec.problem import SpecError
from danlu.storage.weights import Weights

STEM = "weights"
"""How the files of weights under Danlu's own names begin."""


def parameter_shapes(model: Model) -> dict[str, torch.Size]:
    """Global name and shape of every parameter of a model; a tied head is its embedding."""
    with torch.device("meta"):
        return {name: parameter.shape for name, parameter in Decoder(model).named_parameters()}


def open_weights(folder: Path, model: Model) -> Weights:
    """The weights in `folder`; names and shapes that are not the model's raise `SpecError`."""
    weights = Weights(folder, STEM)
    if problems := weights.differences(parameter_shapes(model)):
        raise SpecError(problems)
    return weights


@torch.no_grad()
def load_weights(parts: Iterable[nn.Module], model: Model, folder: Path) -> None:
    """Fill the parameters this rank holds; of a parameter that is spread over ranks only its own slice is read."""
    weights = open_weights(folder, model)
    for part in parts:
        for name, parameter in part.named_parameters():
            local, offset = _held(parameter)
            if local.numel():
                local.copy_(weights.read(name, offset, local.shape))


def _held(parameter: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """What this rank holds of a parameter, and where in the whole it begins."""
    if not isinstance(parameter, DTensor):
        return parameter, (0,) * parameter.ndim
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return parameter.to_local(), tuple(offset)
