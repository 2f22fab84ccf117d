"""One rank of the parity test: trains every layout of its world size, one after the other, in one process."""

import json
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from layouts import LAYOUTS, STEPS, recipe
from torch.distributed.tensor import DTensor
from training import train_in_memory

from danlu.comm.join import Place, join, leave, meet
from danlu.framework.state import TrainState
from danlu.spec.event import StepReport
from danlu.spec.plan import Plan


def whole_parameters(state: TrainState) -> dict[str, torch.Tensor]:
    """Every parameter this rank has a part of, gathered."""
    return {name: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for name, p in state.named_parameters()}


def main() -> None:
    rank, world, port, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    place = Place(rank=rank, world=world, local_rank=rank, store=f"127.0.0.1:{port}")
    store = meet(place)
    chosen = [layout for layout in LAYOUTS if layout.plan.degrees.world == world]
    if world == 1:
        references = {layout.reference: layout for layout in LAYOUTS}
        join(place, "gloo", store)
        for name, layout in references.items():
            reports, state = train_in_memory(recipe(layout.model, str(folder / "shards"), layout.changes), Plan(), rank)
            _write_reference(folder, name, reports, state)
        leave()
    for number, layout in enumerate(chosen):
        join(place, "gloo", dist.PrefixStore(f"layout{number}", store))
        started = time.time()
        result: dict[str, object] = {"name": layout.name}
        try:
            made = recipe(layout.model, str(folder / "shards"), layout.changes)
            reports, state = train_in_memory(made, layout.plan, rank, cluster=layout.cluster)
            result |= _compare(folder, layout.reference, reports, state)
        except Exception:
            result["error"] = traceback.format_exc()
        result["seconds"] = time.time() - started
        (folder / f"{world}-{number}-{rank}.json").write_text(json.dumps(result))
        if "error" in result:
            sys.exit(1)
        leave()


def _write_reference(folder: Path, name: str, reports: list[StepReport], state: TrainState) -> None:
    losses = {"loss": [r.loss for r in reports], "norm": [r.norm for r in reports]}
    (folder / f"{name}.json").write_text(json.dumps(losses))
    arrays = {key: value.numpy() for key, value in whole_parameters(state).items()}
    np.savez(folder / f"{name}.npz", **arrays)


def _compare(folder: Path, name: str, reports: list[StepReport], state: TrainState) -> dict[str, float]:
    expected = json.loads((folder / f"{name}.json").read_text())
    assert len(reports) == STEPS
    deviations = {
        "loss": max(abs(r.loss - e) / abs(e) for r, e in zip(reports, expected["loss"], strict=True)),
        "norm": max(abs(r.norm - e) / abs(e) for r, e in zip(reports, expected["norm"], strict=True)),
    }
    with np.load(folder / f"{name}.npz") as arrays:
        worst = max(float(abs(value.numpy() - arrays[key]).max()) for key, value in whole_parameters(state).items())
    return deviations | {"parameters": worst}


if __name__ == "__main__":
    main()
