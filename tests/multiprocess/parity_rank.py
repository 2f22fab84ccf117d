"""One rank of the parity test: trains the selected layouts one after the other, in worlds of their sizes."""

import json
import sys
import time
import traceback
from functools import partial
from pathlib import Path

import torch
from deviations import compare, whole_parameters, write_reference
from layouts import FP8_LAYOUTS, FP8_MOE_LAYOUTS, FP16_LAYOUTS, LAYOUTS, STEPS, Layout, recipe
from training import train_in_memory
from worlds import Worlds

from danlu.spec.plan import Plan

EVERY = [*LAYOUTS, *FP16_LAYOUTS, *FP8_LAYOUTS, *FP8_MOE_LAYOUTS]


def train_reference(layout: Layout, folder: Path) -> None:
    made = recipe(layout.model, str(folder / "shards"), layout.changes)
    reports, state = train_in_memory(made, Plan(), 0)
    losses, norms = [report.loss for report in reports], [report.norm for report in reports]
    write_reference(folder, layout.reference, losses, norms, whole_parameters(state))


def train_layout(layout: Layout, rank: int, folder: Path) -> None:
    started = time.time()
    try:
        made = recipe(layout.model, str(folder / "shards"), layout.changes)
        reports, state = train_in_memory(made, layout.plan, rank, cluster=layout.cluster)
        assert len(reports) == STEPS
        result = {"name": layout.name} | compare(folder, layout.reference, reports, state)
    except Exception:
        raise RuntimeError(f"{layout.name}: {traceback.format_exc()}") from None
    result["seconds"] = time.time() - started
    (folder / f"parity-{EVERY.index(layout)}-{rank}.json").write_text(json.dumps(result))


def main() -> None:
    rank, processes, port, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    selected = [layout for layout in EVERY if layout.name in json.loads(sys.argv[5])]
    worlds = Worlds(rank, processes, port)
    for layout in {layout.reference: layout for layout in selected}.values():
        worlds.within(1, partial(train_reference, layout, folder))
    for layout in selected:
        worlds.within(layout.plan.degrees.world, partial(train_layout, layout, rank, folder))


if __name__ == "__main__":
    main()
