"""One rank of the resharding test: every layout saves, every layout loads what every other saved."""

import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from layouts import recipe

from danlu.comm.join import Place, join, leave, meet
from danlu.comm.mesh import build_mesh
from danlu.framework.build import build
from danlu.framework.feed import Feed
from danlu.framework.loop import train
from danlu.framework.state import TrainState
from danlu.spec.event import StepReport
from danlu.spec.plan import Degrees, Pipeline, Plan
from danlu.spec.recipe import Recipe, has_experts
from danlu.storage.checkpoint.checkpoints import open_checkpoints
from danlu.storage.tokens import Dataset, TokenShards

SAVED = 2
"""Step of the checkpoints; the one after it is compared."""


def _plan(**settings: Any) -> Plan:
    pipeline = Pipeline(schedule=settings.pop("schedule", "1f1b"), stages_per_rank=settings.pop("per_rank", 1))
    microbatches = 2 if settings.get("pp", 1) > 1 else 1
    return Plan(degrees=Degrees(**settings), pipeline=pipeline, microbatches=microbatches)


DENSE = {
    "one": _plan(),
    "fsdp 2": _plan(shard=2),
    "tp 2": _plan(tp=2),
    "pp 2": _plan(pp=2),
    "cp 2": _plan(cp=2),
    "hsdp 2 × 2": _plan(replicate=2, shard=2),
    "fsdp 2 × tp 2": _plan(shard=2, tp=2),
    "pp 2 × fsdp 2": _plan(pp=2, shard=2),
    "fsdp 8": _plan(shard=8),
    "pp 2 × fsdp 2 × tp 2": _plan(pp=2, shard=2, tp=2),
}
EXPERTS = {
    "one": _plan(),
    "ep 2": _plan(shard=2, ep=2),
    "fsdp 2": _plan(shard=2),
    "tp 2": _plan(tp=2),
    "pp 2": _plan(pp=2),
    "fsdp 4 × ep 4": _plan(shard=4, ep=4),
    "hsdp 2 × 2 × ep 2": _plan(replicate=2, shard=2, ep=2),
    "pp 2 × fsdp 2 × ep 2": _plan(pp=2, shard=2, ep=2),
    "fsdp 8 × ep 4": _plan(shard=8, ep=4),
    "fsdp 4 × tp 2 × ep 2": _plan(shard=4, tp=2, ep=2),
}
LAYOUTS = {"tiny-llama": DENSE, "tiny-moe": EXPERTS}
QUICK = {
    "tiny-llama": ("one", "tp 2", "hsdp 2 × 2", "pp 2 × fsdp 2"),
    "tiny-moe": ("one", "ep 2", "fsdp 4 × ep 4", "pp 2 × fsdp 2 × ep 2"),
}
"""The sample for every change; all pairs by `--all`."""


class Rank:
    """This process in worlds of several sizes, one after the other."""

    def __init__(self, rank: int, processes: int, port: str, folder: Path) -> None:
        self.rank = rank
        self.processes = processes
        self.folder = folder
        self.store = meet(Place(rank=rank, world=processes, local_rank=rank, store=f"127.0.0.1:{port}"))
        self.worlds = 0

    def within(self, world: int, act: Callable[[], None]) -> None:
        """Do something as one of the first `world` processes; the others wait."""
        self.worlds += 1
        if self.rank < world:
            place = Place(rank=self.rank, world=world, local_rank=self.rank)
            join(place, "gloo", dist.PrefixStore(f"world{self.worlds}", self.store))
            act()
            leave()
        done, everyone = f"done{self.worlds}", f"everyone{self.worlds}"
        self.store.add(done, 1)
        if self.rank == 0:
            while self.store.add(done, 0) < self.processes:
                time.sleep(0.02)
            self.store.set(everyone, b"1")
        self.store.wait([everyone], timedelta(seconds=600))


class Trained:
    """A model laid out one way, which takes steps from where its state is."""

    def __init__(self, made: Recipe, plan: Plan, rank: int) -> None:
        self.made = made
        self.mesh = build_mesh(plan, torch.device("cpu"), rank, None, experts=has_experts(made.model))
        self.state, self.forward_backward = build(made, plan, self.mesh)
        shards = TokenShards.open(Path(made.data.shards))
        data = Dataset(shards, made.batch.length, made.seed)
        self.feed = Feed(data, made.batch, made.model.vocabulary, self.mesh)

    def until(self, step: int) -> list[float]:
        """Losses of the steps up to this one."""
        reports: list[StepReport] = []
        state: TrainState = self.state
        train(
            self.made, state, self.forward_backward, self.feed, self.mesh, lambda: 0, reports.append,
            lambda state, last: None, lambda: state.step + 1 >= step,
        )  # fmt: skip
        return [report.loss for report in reports]


def main() -> None:
    rank, processes, port, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    chosen = {model: QUICK[model] if sys.argv[5] == "quick" else tuple(LAYOUTS[model]) for model in LAYOUTS}
    torch.set_num_threads(1)
    me = Rank(rank, processes, port, folder)
    progress, unresumed = folder / "progress", dict[str, float]()
    resumed: dict[str, float] = {}
    for model, names in chosen.items():
        made = recipe(model, str(folder / "shards"), {"balance": "bias"} if model == "tiny-moe" else {})
        kept = {name: folder / f"saved-{model}" / str(number) for number, name in enumerate(names)}

        def save(name: str, model: str = model, made: Recipe = made, kept: dict[str, Path] = kept) -> None:
            plan = LAYOUTS[model][name]
            trained = Trained(made, plan, rank)
            trained.until(SAVED)
            checkpoints = open_checkpoints(kept[name], 1, torch.device("cpu"), plan.degrees.model_dump())
            checkpoints.save(SAVED, trained.state.tensors(), trained.state.scalars())
            checkpoints.close()
            unresumed[f"{model}: {name}"] = trained.until(SAVED + 1)[-1]

        def load(name: str, model: str = model, made: Recipe = made, kept: dict[str, Path] = kept) -> None:
            trained = Trained(made, LAYOUTS[model][name], rank)
            for other, folder in kept.items():
                checkpoints = open_checkpoints(folder, 1, torch.device("cpu"))
                held = trained.state.tensors()
                scalars, proof = checkpoints.load(SAVED, held)
                assert proof.tensors >= len(held)
                assert trained.state.optimizer.state, "the optimiser was compared too"
                trained.state.restore(scalars)
                resumed[f"{model}: {other} → {name}"] = trained.until(SAVED + 1)[-1]
                if rank == 0:
                    progress.write_text(str(len(resumed)))

        for name in names:
            me.within(LAYOUTS[model][name].degrees.world, lambda name=name: save(name))  # type: ignore[misc]
        for name in names:
            me.within(LAYOUTS[model][name].degrees.world, lambda name=name: load(name))  # type: ignore[misc]
    if rank == 0:
        (folder / "reshard.json").write_text(json.dumps({"unresumed": unresumed, "resumed": resumed}))


if __name__ == "__main__":
    main()
