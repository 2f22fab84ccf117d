"""Learned routers side by side: auxiliary loss, bias, exact balance, and none. What do they learn, and how evenly?

    python benchmarks/routers.py --svg docs/pictures/routers.svg --report docs/reports/routers.json
    python benchmarks/routers.py --quick    # 40 steps of each

Each trains the same small mixture of experts with `danlu train` on two ranks, its experts on both of them: same initial
values, same bytes of Python's standard library in the same order. Every tenth file is held out; on those a token always
chooses freely, as it does when text is generated. The load is that of the busiest expert over the mean, of every step;
no router here drops a token, so that a step has as many as the batch. Exits non-zero if exact balance is not exact, or
a router's loss on held-out text is further from the auxiliary loss's than a bar. The last line is JSON.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

from loss_curves import draw, mean, thinned
from reports import add_report_option, write_report
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from danlu.spec import EvaluationEvent, StepEvent
from danlu.spec.run_folder import RunFolder
from danlu.storage.data.build import build_dataset
from danlu.storage.data.tokenizer import BytesTokenizer

STEPS, QUICK_STEPS = 2000, 40
BAR = 0.03
"""Largest difference of held-out losses from that of the auxiliary loss, relative to it."""
ROUTERS = {
    "auxiliary loss": 'balance = "loss"',
    "bias": 'balance = "bias"\nbalance_rate = 1e-3\nscore = "sigmoid"',
    "exact": 'balance = "exact"',
    "none": 'balance = "none"',
}
COLORS = {"auxiliary loss": "#444", "bias": "#2563eb", "exact": "#c2410c", "none": "#999"}
RECIPE = """
name = "{name}"
seed = 1
steps = {steps}
[model]
vocabulary = 264
layers = 3
width = 96
heads = 4
sequence = 128
[model.moe]
experts = 16
top_k = 2
width = 96
{router}
[data]
shards = "shards"
[batch]
sequences = 8
length = 128
[optimizer]
learning_rate = 3e-3
[schedule]
warmup = {warmup}
[checkpoint]
every = {steps}
[evaluation]
tokens = 65536
[[evaluation.data]]
name = "held-out"
shards = "held-out"
"""
PLAN = "[degrees]\nshard = 2\nep = 2\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps of each instead of {STEPS:,}")
    parser.add_argument("--svg", type=Path, help="draw the losses into this file")
    add_report_option(parser)
    asked = parser.parse_args()
    steps = QUICK_STEPS if asked.quick else STEPS
    columns = (TextColumn("{task.description:<16}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with tempfile.TemporaryDirectory() as made, Progress(*columns, console=Console(stderr=True)) as progress:
        folder = Path(made)
        build_data(folder)
        runs = {name: train(folder, name, steps, progress) for name in ROUTERS}
    rows = {name: told(*run) for name, run in runs.items()}
    apart = {name: row["held_out"] / rows["auxiliary loss"]["held_out"] - 1 for name, row in rows.items()}
    missed = misses(rows, apart) if not asked.quick else []
    show(rows, steps, missed)
    losses = {name: thinned([event.loss for event in run[0]]) for name, run in runs.items()}
    loads = {name: thinned([event.imbalance or 1.0 for event in run[0]]) for name, run in runs.items()}
    if asked.svg:
        panels = {"training loss": losses, "load of the busiest expert over the mean": loads}
        asked.svg.write_text(draw(panels, steps, COLORS), encoding="utf-8")
    curves = {"losses": losses, "loads": loads}
    figures = {"passed": not missed, "missed": missed, "steps": steps, "bar": BAR, "rows": rows, "apart": apart}
    write_report(asked.report, "routers", figures | curves)
    print(json.dumps({"benchmark": "routers", **figures}))
    return int(bool(missed))


def build_data(folder: Path) -> None:
    """Every tenth file of the standard library is held out."""
    files = sorted(str(file) for file in Path(sysconfig.get_path("stdlib")).glob("*.py"))
    build_dataset([file for index, file in enumerate(files) if index % 10], folder / "shards", BytesTokenizer())
    build_dataset(files[::10], folder / "held-out", BytesTokenizer())


def train(folder: Path, name: str, steps: int, progress: Progress) -> tuple[list[StepEvent], float]:
    """The steps of one router's run, and its loss on held-out text at the end."""
    run_name = name.replace(" ", "-")
    text = RECIPE.format(name=run_name, steps=steps, router=ROUTERS[name], warmup=max(1, steps // 20))
    (folder / f"{run_name}.toml").write_text(text)
    (folder / "plan.toml").write_text(PLAN)
    command = [sys.executable, "-m", "danlu", "train", f"{run_name}.toml", "--plan", "plan.toml"]
    task = progress.add_task(name, total=steps)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (folder / f"{run_name}.log").open("w") as log:
        started = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        run = RunFolder(folder / "runs" / run_name)
        while started.poll() is None:
            time.sleep(1)
            progress.update(task, completed=len(steps_of(run)))
    if started.returncode:
        sys.exit(f"{name}: danlu train ended with {started.returncode}:\n{(folder / f'{run_name}.log').read_text()}")
    progress.update(task, completed=steps)
    (held_out,) = [event.losses["held-out"] for event in run.read_events() if isinstance(event, EvaluationEvent)][-1:]
    return steps_of(run), held_out


def steps_of(run: RunFolder) -> list[StepEvent]:
    """The steps so far."""
    return [event for event in run.read_events() if isinstance(event, StepEvent)] if run.events.exists() else []


def told(steps: list[StepEvent], held_out: float) -> dict[str, Any]:
    """A run in figures: of its last tenth, but for the load, of which the most even step and the least count too."""
    last, loads = steps[-max(1, len(steps) // 10) :], [step.imbalance or 0.0 for step in steps]
    speeds = sorted(step.tokens / step.seconds for step in steps)
    return {
        "loss": mean([step.loss for step in last]),
        "held_out": held_out,
        "load": mean([step.imbalance or 0.0 for step in last]),
        "most_load": max(loads),
        "dropped": sum(step.tokens != steps[0].tokens for step in steps),
        "tokens_per_second": statistics.median(speeds),
        "slow_tenth": speeds[len(speeds) // 10],
        "fast_tenth": speeds[-len(speeds) // 10],
    }


def misses(rows: dict[str, dict[str, Any]], apart: dict[str, float]) -> list[str]:
    """What is beyond a bar."""
    found = []
    if rows["exact"]["most_load"] > 1.0:
        found.append(f"exact balance has a load of {rows['exact']['most_load']:.3f} in one step")
    for name in ("bias", "exact"):
        if apart[name] > BAR:
            found.append(f"{name}: the held-out loss is {apart[name]:.1%} above that of the auxiliary loss")
    return found


def show(rows: dict[str, dict[str, Any]], steps: int, missed: list[str]) -> None:
    table = Table(title=f"Routers after {steps:,} steps; the busiest expert over the mean")
    for column in ("router", "loss", "held out", "load, last tenth", "load, worst step", "dropped", "tokens/s"):
        table.add_column(column, justify="left" if column == "router" else "right")
    for name, row in rows.items():
        table.add_row(
            name,
            *(f"{row[key]:.4f}" for key in ("loss", "held_out")),
            *(f"{row[key]:.2f}" for key in ("load", "most_load")),
            str(row["dropped"]),
            f"{row['tokens_per_second']:,.0f} ({row['slow_tenth']:,.0f} to {row['fast_tenth']:,.0f})",
        )
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    for line in missed:
        console.print(f"missed: {line}")


if __name__ == "__main__":
    sys.exit(main())
