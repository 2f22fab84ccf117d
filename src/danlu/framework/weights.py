"""Load weights from files into a model at any layout: each rank reads its own shards."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from danlu.framework.custom.construct import build_meta_module
from danlu.framework.decoder.decoder import Decoder
from danlu.parallel.fsdp import local_shard
from danlu.spec.custom_model import CustomModel
from danlu.spec.model import Model
from danlu.spec.problem import SpecError, problem_at
from danlu.spec.run_folder import RunFolder
from danlu.storage.checkpoint.checkpoint_dir import CheckpointDir
from danlu.storage.checkpoint.local_shards import local_shards
from danlu.storage.checkpoint.reader import CheckpointReader
from danlu.storage.checkpoint.restore import fill_tensors
from danlu.storage.checkpoint.run_store import open_run_store
from danlu.storage.checkpoint.safetensors_io import SafetensorsReader
from danlu.storage.store.base import open_store

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


def buffer_shapes(model: Model) -> dict[str, torch.Size]:
    """Global name and shape of every buffer of a decoder that checkpoints and weight files may hold."""
    module = meta_model(model)
    saved = module.state_dict().keys()
    return {name: buffer.shape for name, buffer in module.named_buffers() if name in saved}


def open_weights(folder: Path, model: Model | CustomModel) -> SafetensorsReader:
    """The weights in `folder`; names or shapes that are not the model's raise `SpecError`."""
    weights = SafetensorsReader(folder, HF_FILE_PREFIX if isinstance(model, CustomModel) else WEIGHTS_FILE_PREFIX)
    # Buffers, and of a custom model second names of tied parameters.
    named = meta_model(model).state_dict() if isinstance(model, CustomModel) else buffer_shapes(model)
    if problems := weights.find_mismatches(parameter_shapes(model), ignored=lambda name: name in named):
        raise SpecError(problems)
    return weights


def newest_checkpoint(folder: Path) -> CheckpointReader | None:
    """The newest checkpoint of a run folder; None if the folder holds weight files instead."""
    run = RunFolder(folder)
    if run.recipe.is_file():
        store = open_run_store(run)
    elif run.checkpoints.is_dir():
        store = open_store(str(run.checkpoints))
    else:
        return None
    steps = CheckpointDir(store, keep=1).resumable_steps()
    return CheckpointReader(store, steps[-1]) if steps else None


def check_checkpoint_weights(reader: CheckpointReader, model: Model | CustomModel) -> None:
    """Raise `SpecError` if a checkpoint lacks a parameter of the model, or has it in another shape."""
    saved, folder = reader.manifest.tensors, Path(reader.store.name)
    problems = []
    for name, shape in parameter_shapes(model).items():
        found = saved.get(f"model.{name}")
        if found is None or tuple(found.shape) != tuple(shape):
            has = "is missing" if found is None else f"has shape {list(found.shape)}, but the model needs {list(shape)}"
            problems.append(problem_at(folder, 1, name, has, "weights of this model, or the model of these weights"))
    if problems:
        raise SpecError(problems[:8])


@torch.no_grad()
def load_weights(stage_modules: Iterable[nn.Module], model: Model | CustomModel, folder: Path) -> None:
    """Fill this rank's parameters; of a sharded parameter only this rank's shard is read.

    `folder` holds weight files, or is the folder of a run, whose newest checkpoint is read.
    """
    stage_modules = list(stage_modules)
    if (reader := newest_checkpoint(folder)) is not None:
        check_checkpoint_weights(reader, model)
        tensors = {f"model.{name}": each for module in stage_modules for name, each in module.state_dict().items()}
        saved = {name: each for name, each in tensors.items() if name in reader.manifest.tensors}
        fill_tensors(reader, saved, local_shards(saved))
        return
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
