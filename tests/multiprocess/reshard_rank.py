"""One rank of the resharding test: every layout saves, every layout loads what every other saved."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from layouts import recipe
from training import KeptSteps
from worlds import Worlds

from danlu.comm.mesh import build_mesh
from danlu.comm.world import World
from danlu.framework.batch_loader import BatchLoader
from danlu.framework.build import build_train_state
from danlu.framework.loop import TrainStages, run_training_loop
from danlu.framework.stages import FixedData
from danlu.framework.state import TrainState
from danlu.spec.event import StepEvent
from danlu.spec.plan import Degrees, PipelineConfig, Plan
from danlu.spec.recipe import Recipe, has_experts
from danlu.storage.checkpoint.engine import open_checkpoint_engine
from danlu.storage.data.token_shards import ShuffledDataset, TokenShards

SAVED = 2
"""Step of the checkpoints."""
COMPARED = SAVED + 2
"""The loss of the step after a checkpoint does not depend on the optimizer's moments; that of the next one does."""


def _plan(**settings: Any) -> Plan:
    pipeline = PipelineConfig(schedule=settings.pop("schedule", "1f1b"), stages_per_rank=settings.pop("per_rank", 1))
    microbatches, over = 2 if settings.get("pp", 1) > 1 else 1, settings.pop("over", False)
    degrees = Degrees(**settings)
    return Plan(degrees=degrees, pipeline=pipeline, microbatches=microbatches, shard_optimizer_over_replicas=over)


DENSE = {
    "one": _plan(),
    "fsdp 2": _plan(shard=2),
    "tp 2": _plan(tp=2),
    "pp 2": _plan(pp=2),
    "cp 2": _plan(cp=2),
    "hsdp 2 × 2": _plan(replicate=2, shard=2),
    "hsdp 2 × 2, moments over all": _plan(replicate=2, shard=2, over=True),
    "hsdp 2 × 2 × tp 2, moments over all": _plan(replicate=2, shard=2, tp=2, over=True),
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
    "hsdp 2 × 2 × ep 2, moments over all": _plan(replicate=2, shard=2, ep=2, over=True),
    "pp 2 × fsdp 2 × ep 2": _plan(pp=2, shard=2, ep=2),
    "fsdp 8 × ep 4": _plan(shard=8, ep=4),
    "fsdp 4 × tp 2 × ep 2": _plan(shard=4, tp=2, ep=2),
}
MUON = {
    "one": _plan(),
    "fsdp 2 × tp 2": _plan(shard=2, tp=2),
    "hsdp 2 × 2 × ep 2": _plan(replicate=2, shard=2, ep=2),
}
LAYOUTS = {"tiny-llama": DENSE, "tiny-moe": EXPERTS, "tiny-moe by Muon, averaged": MUON}
CHANGES: dict[str, dict[str, Any]] = {
    "tiny-moe": {"balance": "bias"},
    "tiny-moe by Muon, averaged": {"optimizer": "muon", "ema": 0.5},
}
QUICK = {
    "tiny-llama": ("tp 2", "hsdp 2 × 2, moments over all", "pp 2 × fsdp 2"),
    "tiny-moe": ("one", "pp 2 × fsdp 2 × ep 2"),
    "tiny-moe by Muon, averaged": ("fsdp 2 × tp 2", "hsdp 2 × 2 × ep 2"),
}
"""The sample for every change."""


class Trained:
    """A model laid out one way, which takes steps from where its state is."""

    def __init__(self, made: Recipe, plan: Plan, rank: int) -> None:
        self.made = made
        self.mesh = build_mesh(plan, World.adopt(), None, experts=has_experts(made.model))
        self.state, self.forward_backward = build_train_state(made, plan, self.mesh)
        shards = TokenShards.open(Path(made.data.shards))
        data = ShuffledDataset(shards, made.batch.length, made.seed)
        self.batches = BatchLoader(data, made.batch, made.model.vocabulary, self.mesh)

    def until(self, step: int) -> list[float]:
        """Losses of the steps up to this one."""
        reports: list[StepEvent] = []
        state: TrainState = self.state
        stages = TrainStages(
            FixedData(self.batches),
            self.forward_backward,
            events=KeptSteps(reports),
            stop_requested=lambda: state.step + 1 >= step,
        )
        run_training_loop(self.made, state, self.mesh, stages)
        return [report.loss for report in reports]


def main() -> None:
    rank, processes, port, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    pairs = set(json.loads(sys.argv[5]))
    torch.set_num_threads(1)
    me = Worlds(rank, processes, port)
    progress, unresumed = folder / "progress", dict[str, float]()
    resumed: dict[str, float] = {}
    for model, layouts in LAYOUTS.items():
        sources = [name for name in layouts if any(f"{model}: {name} → {other}" in pairs for other in layouts)]
        targets = [name for name in layouts if any(f"{model}: {other} → {name}" in pairs for other in layouts)]
        made = recipe(model.partition(" ")[0], str(folder / "shards"), CHANGES.get(model, {}))
        kept = {name: folder / f"saved-{model}" / str(number) for number, name in enumerate(sources)}

        def save(name: str, model: str = model, made: Recipe = made, kept: dict[str, Path] = kept) -> None:
            plan = LAYOUTS[model][name]
            trained = Trained(made, plan, rank)
            trained.until(SAVED)
            checkpoints = open_checkpoint_engine(kept[name], 1, World.adopt(), plan.degrees.model_dump())
            checkpoints.save(SAVED, trained.state.tensors(), trained.state.scalars())
            checkpoints.close()
            unresumed[f"{model}: {name}"] = trained.until(COMPARED)[-1]

        def load(name: str, model: str = model, made: Recipe = made, kept: dict[str, Path] = kept) -> None:
            trained = Trained(made, LAYOUTS[model][name], rank)
            for other, folder in kept.items():
                if f"{model}: {other} → {name}" not in pairs:
                    continue
                checkpoints = open_checkpoint_engine(folder, 1, World.adopt())
                held = trained.state.tensors()
                scalars, proof = checkpoints.load(SAVED, held)
                assert proof.tensors_verified >= len(held)
                assert trained.state.optimizer.state, "the optimizer was compared too"
                trained.state.restore_scalars(scalars)
                resumed[f"{model}: {other} → {name}"] = trained.until(COMPARED)[-1]
                if rank == 0:
                    progress.write_text(str(len(resumed)))

        for name in sources:
            me.within(LAYOUTS[model][name].degrees.world, lambda name=name: save(name))  # type: ignore[misc]
        for name in targets:
            me.within(LAYOUTS[model][name].degrees.world, lambda name=name: load(name))  # type: ignore[misc]
    if rank == 0:
        (folder / "reshard.json").write_text(json.dumps({"unresumed": unresumed, "resumed": resumed}))


if __name__ == "__main__":
    main()
