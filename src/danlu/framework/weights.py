"""Weights from files into a model that may be spread over ranks: each rank reads its own slices."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from danlu.framework.own.factory import make_empty
from danlu.framework.transformer import Decoder
from danlu.parallel.shard import held_slice
from danlu.spec.model import Model
from danlu.spec.own_model import OwnModel
from danlu.spec.problem import SpecError
from danlu.storage.weights import Weights

STEM = "weights"
"""How the files of weights under Danlu's own names begin."""
OWN_STEM = "model"
"""How the files of a published model begin, whose names are those of its own module."""


def empty_model(model: Model | OwnModel) -> nn.Module:
    """The whole model with parameters that take no memory."""
    if isinstance(model, OwnModel):
        return make_empty(model)
    with torch.device("meta"):
        return Decoder(model)


def parameter_shapes(model: Model | OwnModel) -> dict[str, torch.Size]:
    """Global name and shape of every parameter of a model; a tied head is its embedding."""
    return {name: parameter.shape for name, parameter in empty_model(model).named_parameters()}


def open_weights(folder: Path, model: Model | OwnModel) -> Weights:
    """The weights in `folder`; names and shapes that are not the model's raise `SpecError`."""
    weights = Weights(folder, OWN_STEM if isinstance(model, OwnModel) else STEM)
    named = empty_model(model).state_dict() if isinstance(model, OwnModel) else {}  # buffers, and second names
    if problems := weights.differences(parameter_shapes(model), ignored=lambda name: name in named):
        raise SpecError(problems)
    return weights


@torch.no_grad()
def load_weights(parts: Iterable[nn.Module], model: Model | OwnModel, folder: Path) -> None:
    """Fill the parameters this rank holds; of a parameter that is spread over ranks only its own slice is read."""
    weights = open_weights(folder, model)
    stored = set(weights.names)
    for part in parts:
        for name, parameter in part.named_parameters():
            local, offset = held_slice(parameter)
            if local.numel():
                local.copy_(weights.read(name, offset, local.shape))
        for name, buffer in part.named_buffers():
            if name in stored:
                buffer.copy_(weights.read(name))
