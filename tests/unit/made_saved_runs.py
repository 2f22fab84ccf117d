"""Runs with checkpoints that no training made: weights by a seed, in the folder of a run."""

import json
from pathlib import Path

import torch
from torch import nn

from danlu.framework.decoder.decoder import Decoder
from danlu.framework.decoder.moe import Router
from danlu.spec import Model, Recipe, RunFolder, toml
from danlu.spec.custom_model import CustomModel
from danlu.spec.recipe import BatchConfig, DataConfig
from danlu.storage.checkpoint.single_writer import source_tensor, write_checkpoint
from danlu.storage.data.build import build_dataset
from danlu.storage.data.tokenizer import open_tokenizer
from danlu.storage.store.base import open_store

LLAMA = Model(name="llama", vocabulary=264, layers=2, width=32, heads=4, kv_heads=2, sequence=96)


def random_weights(module: nn.Module, seed: int) -> nn.Module:
    """Fill a module so that its texts differ by seed and are not one token repeated."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            width = parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 3.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / width + (parameter.ndim == 1))
        for each in module.modules():
            if isinstance(each, Router) and each.moe.balance == "bias":
                each.bias_E.copy_(torch.randn(each.bias_E.shape, generator=generator))
    return module


def save(run: RunFolder, step: int, module: nn.Module) -> None:
    """A complete checkpoint of one rank, without the optimizer."""
    tensors = [source_tensor(f"model.{name}", "F32", value.numpy()) for name, value in module.state_dict().items()]
    write_checkpoint(open_store(str(run.checkpoints)), step, tensors, {"step": step, "cursor": 0, "seed": 0}, layout={})


def saved_run(
    folder: Path,
    model: Model | CustomModel = LLAMA,
    steps: tuple[int, ...] = (10, 20),
    module: nn.Module | None = None,
    tokenizer: str = "bytes",
) -> RunFolder:
    """A run in `folder / "runs"` with data and a checkpoint of every step; its weights follow from the step."""
    run = RunFolder(folder / "runs" / "made")
    run.path.mkdir(parents=True)
    text = folder / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"line {number}"}) + "\n" for number in range(50)))
    build_dataset([str(text)], folder / "shards", open_tokenizer(tokenizer))
    recipe = Recipe(
        name="made",
        steps=20,
        model=model,
        data=DataConfig(shards=str(folder / "shards"), tokenizer=tokenizer),
        batch=BatchConfig(sequences=4, length=64),
    )
    run.recipe.write_text(toml.dumps(recipe))
    if module is None:
        assert isinstance(model, Model)
        module = Decoder(model)
    for step in steps:
        save(run, step, random_weights(module, step))
    return run
