"""Load weights from files into a model at any layout: each rank reads its own shards."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from danlu.framework.custom.construct import build_meta_module
from danlu.framework.transformer import Decoder
from danlu.parallel.fsdp import local_shard
from danlu.spec.custom_model import CustomModel
from danlu.spec.model import Model
from danlu.spec.problem import SpecError
from danlu.storage.checkpoint.safetensors_io import SafetensorsReader

WEIGHTS_FILE_PREFIX = "weights"
"""Prefix of weight files with Danlu's parameter names."""
HF_FILE_PREFIX = "model"
"""Prefix of the files of a published model, with the parameter names of its module."""


def meta_model(model: Model | CustomModel) -> nn.Module:
    """The full model on the meta device."""
    if isinstance(model, CustomModel):
        return build_meta_module(model)
    with torch.device("meta"):
        return Decoder(model)


def parameter_shapes(model: Model | CustomModel) -> dict[str, torch.Size]:
    """Global name and shape of every parameter of a model; a tied head is omitted."""
    return {name: parameter.shape for name, parameter in meta_model(model).named_parameters()}


def open_weights(folder: Path, model: Model | CustomModel) -> SafetensorsReader:
    """The weights in `folder`; names or shapes that are not the model's raise `SpecError`."""
    weights = SafetensorsReader(folder, HF_FILE_PREFIX if isinstance(model, CustomModel) else WEIGHTS_FILE_PREFIX)
    named = (
        meta_model(model).state_dict() if isinstance(model, CustomModel) else {}
    )  # buffers, and second names of tied parameters
    if problems := weights.find_mismatches(parameter_shapes(model), ignored=lambda name: name in named):
        raise SpecError(problems)
    return weights


@torch.no_grad()
def load_weights(stage_modules: Iterable[nn.Module], model: Model | CustomModel, folder: Path) -> None:
    """Fill this rank's parameters; of a sharded parameter only this rank's shard is read."""
    weights = open_weights(folder, model)
    stored = set(weights.names)
    for stage_module in stage_modules:
        for name, parameter in stage_module.named_parameters():
            local, offset = local_shard(parameter)
            if local.numel():
                local.copy_(weights.read(name, offset, local.shape))
        for name, buffer in stage_module.named_buffers():
            if name in stored:
                buffer.copy_(weights.read(name))
