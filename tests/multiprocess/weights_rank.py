"""One rank that starts from weights in files, at every layout, and trains a few steps."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deviations import compare, whole_parameters, write_reference
from layouts import recipe
from training import train_in_memory
from worlds import Worlds

from danlu.framework.hf.convert import MODEL_FILE
from danlu.framework.state import TrainState
from danlu.framework.weights import WEIGHTS_FILE_PREFIX, load_weights, parameter_shapes
from danlu.spec import toml
from danlu.spec.event import StepEvent
from danlu.spec.model import Model
from danlu.spec.plan import Degrees, Plan
from danlu.storage.checkpoint.safetensors_io import SafetensorsReader, WeightEntry, write_safetensors

STEPS = 2
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": (
        "tiny-llama",
        {"qkv_bias": True, "qk_norm": True, "rope_scaling": {"factor": 4.0, "original": 16}},
    ),
    "tied": ("tiny-llama", {"qk_norm": True, "tied": True}),
    "moe": ("tiny-moe", {}),
}
LAYOUTS: dict[str, tuple[str, Plan]] = {
    "tp": ("dense", Plan(degrees=Degrees(tp=2))),
    "fsdp": ("dense", Plan(degrees=Degrees(shard=2))),
    "tied, tp": ("tied", Plan(degrees=Degrees(tp=2))),
    "1f1b": ("dense", Plan(degrees=Degrees(pp=2), microbatches=2)),
    "ep": ("moe", Plan(degrees=Degrees(shard=2, ep=2))),
    "fsdp × tp": ("dense", Plan(degrees=Degrees(shard=2, tp=2))),
}


def write_random(folder: Path, model: Model) -> None:
    """Weights that no seed of the product gives; norms and biases are random too, so that a wrong one shows."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(3)
    entries = []
    for name, shape in parameter_shapes(model).items():
        tensor = torch.randn(shape, generator=generator) * (0.2 if len(shape) == 1 else 0.05)
        tensor = tensor + 1 if "norm." in name else tensor
        entries.append(WeightEntry(name, shape, torch.float32, lambda tensor=tensor: iter([tensor])))
    write_safetensors(folder, WEIGHTS_FILE_PREFIX, entries, shard_bytes=200_000)
    (folder / MODEL_FILE).write_text(toml.dumps(model))


def train(name: str, plan: Plan, rank: int, folder: Path) -> tuple[list[StepEvent], TrainState]:
    base, changes = MODELS[name]
    made = recipe(base, str(folder / "shards"), changes)

    def load(state: TrainState) -> None:
        load_weights(state.stage_modules, made.model, folder / name)
        weights = SafetensorsReader(folder / name, WEIGHTS_FILE_PREFIX)
        for parameter, value in whole_parameters(state).items():
            assert torch.equal(value, weights.read(parameter)), parameter

    return train_in_memory(made, plan, rank, restore=load, stop_at=STEPS)


def write_references(folder: Path) -> None:
    for name, (base, changes) in MODELS.items():
        write_random(folder / name, recipe(base, str(folder / "shards"), changes).model)
        reports, state = train(name, Plan(), 0, folder)
        losses, norms = [report.loss for report in reports], [report.norm for report in reports]
        write_reference(folder, name, losses, norms, whole_parameters(state))


def train_layout(name: str, rank: int, folder: Path) -> None:
    model, plan = LAYOUTS[name]
    reports, state = train(model, plan, rank, folder)
    assert len(reports) == STEPS
    (folder / f"{name}-{rank}.json").write_text(json.dumps(compare(folder, model, reports, state)))


def main() -> None:
    rank, processes, port, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    worlds = Worlds(rank, processes, port)
    worlds.within(1, partial(write_references, folder))
    for name in json.loads(sys.argv[5]):
        worlds.within(LAYOUTS[name][1].degrees.world, partial(train_layout, name, rank, folder))


if __name__ == "__main__":
    main()
