"""Train one small model three times: in bf16, with fp8 products, and with mxfp8 products; the losses over all steps.

    python benchmarks/fp8_curve.py --svg docs/pictures/fp8-curve.svg --report docs/reports/fp8_curve.json
    python benchmarks/fp8_curve.py --quick    # 60 steps of each

Everything else is equal: initial values, data and its order, schedule. Products are emulated here, with the numbers
that the format defines. The three train beside each other, in a process each. Exits with 1 if the mean loss of the last
tenth is further from that of bf16 than the bar.
"""

import argparse
import multiprocessing
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import Empty, Queue

import torch
from loss_curves import draw, mean, thinned
from reports import add_report_option, write_report
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "multiprocess"))
from training import KeptSteps

from danlu.comm.mesh import build_mesh
from danlu.comm.rendezvous import RankInfo, rendezvous
from danlu.comm.world import World
from danlu.framework.batch_loader import BatchLoader
from danlu.framework.build import build_train_state
from danlu.framework.loop import TrainStages, run_training_loop
from danlu.framework.stages import FixedData
from danlu.spec.event import Event, StepEvent
from danlu.spec.model import Model
from danlu.spec.plan import Plan
from danlu.spec.recipe import (
    BatchConfig,
    DataConfig,
    LRSchedule,
    MatmulFormat,
    OptimizerConfig,
    PrecisionConfig,
    Recipe,
)
from danlu.storage.data.build import build_dataset
from danlu.storage.data.token_shards import ShuffledDataset, TokenShards
from danlu.storage.data.tokenizer import BytesTokenizer

BAR = 0.02
"""Largest difference of the last losses, relative to that of bf16."""
BLOCK = 32
"""Elements of a block in both formats: a matrix of this small model has several."""
FORMATS: dict[str, MatmulFormat] = {"bf16": "none", "fp8": "fp8", "mxfp8": "mxfp8"}
COLORS = {"bf16": "#444", "fp8": "#c2410c", "mxfp8": "#2563eb"}


def recipe(matmul: MatmulFormat, steps: int, shards: Path) -> Recipe:
    """Two layers on bytes of Python's standard library, in bf16."""
    return Recipe(
        name="fp8-curve",
        seed=1,
        steps=steps,
        model=Model(name="two-layers", vocabulary=264, layers=2, width=64, heads=4, mlp_width=128, sequence=64),
        data=DataConfig(shards=str(shards)),
        batch=BatchConfig(sequences=2, length=64),
        optimizer=OptimizerConfig(learning_rate=3e-3),
        schedule=LRSchedule(kind="cosine", warmup=100),
        precision=PrecisionConfig(compute="bf16", matmul=matmul, block=None if matmul == "none" else BLOCK),
    )


class WatchedSteps(KeptSteps):
    """Keeps steps, and moves a progress bar."""

    def __init__(self, steps: list[StepEvent], advance: Callable[[], None]) -> None:
        super().__init__(steps)
        self.advance = advance

    def write(self, event: Event) -> None:
        """Keep one step; what the guard of spikes warns of is no step."""
        if isinstance(event, StepEvent):
            super().write(event)
            self.advance()


def train(name: str, steps: int, shards: Path, done: "Queue[str]") -> list[float]:
    """The loss of every step; each must be applied, and puts the name of its run into `done`."""
    torch.set_num_threads(1)
    world, made = World.join(RankInfo(), "gloo", rendezvous(RankInfo())), recipe(FORMATS[name], steps, shards)
    try:
        return _train(made, lambda: done.put(name))
    finally:
        world.shutdown()


def _train(made: Recipe, advance: Callable[[], None]) -> list[float]:
    plan = Plan()
    mesh = build_mesh(plan, World.adopt(), None, experts=False)
    state, forward_backward = build_train_state(made, plan, mesh)
    shards = TokenShards.open(Path(made.data.shards))
    samples = ShuffledDataset(shards, made.batch.length, made.seed)
    data = FixedData(BatchLoader(samples, made.batch, made.model.vocabulary, mesh))
    steps: list[StepEvent] = []
    run_training_loop(made, state, mesh, TrainStages(data, forward_backward, events=WatchedSteps(steps, advance)))
    skipped = [step.step for step in steps if not step.committed]
    if skipped or len(steps) != made.steps:
        raise RuntimeError(f"{made.precision.label}: {len(steps)} steps of {made.steps}, skipped {skipped}")
    return [step.loss for step in steps]


def main() -> int:
    """Train, compare, draw; returns the exit code."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--quick", action="store_true", help="60 steps of each instead of 2,000")
    arguments.add_argument("--svg", type=Path, help="draw the curves into this file")
    add_report_option(arguments)
    asked = arguments.parse_args()
    steps = 60 if asked.quick else 2000
    console = Console()
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    )
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        bar,
        spawn.Manager() as manager,
        ProcessPoolExecutor(len(FORMATS), spawn) as pool,
    ):
        shards, done = Path(folder) / "shards", manager.Queue()
        build_dataset(["python-stdlib"], shards, BytesTokenizer())
        tasks = {name: bar.add_task(name, total=steps) for name in FORMATS}
        runs = {name: pool.submit(train, name, steps, shards, done) for name in FORMATS}
        while not all(run.done() for run in runs.values()) or not done.empty():
            with suppress(Empty):
                bar.advance(tasks[done.get(timeout=1)])
        losses = {name: run.result() for name, run in runs.items()}
    last = {name: mean(each[-(steps // 10) :]) for name, each in losses.items()}
    apart = {name: (loss - last["bf16"]) / last["bf16"] for name, loss in last.items()}
    table = Table(title=f"Mean loss of the last {steps // 10} of {steps:,} steps")
    for heading in ("products", "loss", "against bf16"):
        table.add_column(heading, justify="right")
    for name, loss in last.items():
        table.add_row(name, f"{loss:.4f}", f"{apart[name]:+.2%}")
    console.print(table)
    curves = {name: thinned(each) for name, each in losses.items()}
    if asked.svg:
        asked.svg.write_text(draw({"training loss": curves}, steps, COLORS), encoding="utf-8")
    worst = max(abs(each) for each in apart.values())
    figures = {
        "steps": steps,
        "block": BLOCK,
        "bar": BAR,
        "first": {name: each[0] for name, each in losses.items()},
        "last": last,
        "apart": apart,
        "worst": worst,
        "curves": curves,
    }
    write_report(asked.report, "fp8_curve", figures)
    return 0 if worst <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
