"""One rank that starts from weights in files, at every layout of its world size, and trains a few steps."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from layouts import recipe
from parity_rank import whole_parameters
from training import train_in_memory

from danlu.comm.join import Place, join, leave, meet
from danlu.framework.hf import MODEL
from danlu.framework.state import TrainState
from danlu.framework.weights import STEM, load_weights, parameter_shapes
from danlu.spec import toml
from danlu.spec.model import Model
from danlu.spec.plan import Degrees, Plan
from danlu.storage.weights import Entry, Weights, write_weights

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
        entries.append(Entry(name, shape, torch.float32, lambda tensor=tensor: iter([tensor])))
    write_weights(folder, STEM, entries, shard_bytes=200_000)
    (folder / MODEL).write_text(toml.dumps(model))


def train(name: str, plan: Plan, rank: int, folder: Path) -> tuple[dict[str, list[float]], TrainState]:
    base, changes = MODELS[name]
    made = recipe(base, str(folder / "shards"), changes)

    def load(state: TrainState) -> None:
        load_weights(state.parts, made.model, folder / name)
        weights = Weights(folder / name, STEM)
        for parameter, value in whole_parameters(state).items():
            assert torch.equal(value, weights.read(parameter)), parameter

    reports, state = train_in_memory(made, plan, rank, restore=load, stop_at=STEPS)
    return {"loss": [report.loss for report in reports], "norm": [report.norm for report in reports]}, state


def main() -> None:
    rank, world, port, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    place = Place(rank=rank, world=world, local_rank=rank, store=f"127.0.0.1:{port}")
    store = meet(place)
    if world == 1:
        join(place, "gloo", store)
        for name, (base, changes) in MODELS.items():
            write_random(folder / name, recipe(base, str(folder / "shards"), changes).model)
            figures, state = train(name, Plan(), rank, folder)
            (folder / f"{name}.json").write_text(json.dumps(figures))
            np.savez(folder / f"{name}.npz", **{key: value.numpy() for key, value in whole_parameters(state).items()})
        leave()
        return
    for number, (name, (model, plan)) in enumerate(LAYOUTS.items()):
        if plan.degrees.world != world:
            continue
        join(place, "gloo", dist.PrefixStore(f"layout{number}", store))
        figures, state = train(model, plan, rank, folder)
        with np.load(folder / f"{model}.npz") as arrays:
            worst = max(float(abs(value.numpy() - arrays[key]).max()) for key, value in whole_parameters(state).items())
        (folder / f"{name}-{rank}.json").write_text(json.dumps(figures | {"parameters": worst}))
        leave()


if __name__ == "__main__":
    main()
