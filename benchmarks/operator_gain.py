"""What an implementation of an operator gains: as `danlu ops tune` predicts it, and in steps of the training loop.

    python benchmarks/operator_gain.py [--quick] [--report FILE]

A decoder of 7 M parameters in bf16 on one core. First its operators are tuned. Then steps are taken in turns: as they
are, and with one operator at a time run by torch's own operators instead. The gain that was predicted is the sum over
the operator's calls; the one that was measured is the difference of steps' lower quartiles, since noise only adds; how
sure that is, a bootstrap over turns says. Exits non-zero if one is off by more than 15 %. The last line is JSON.
"""

import argparse
import json
import random
import statistics
import sys
import time
from typing import Any

import torch
from reports import add_report_option, write_report
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from step_speed import SameBatch

from danlu.chips.registry import find_chip
from danlu.comm.mesh import build_mesh
from danlu.comm.rendezvous import RankInfo, rendezvous
from danlu.comm.world import World
from danlu.dryrun.dry_run import dry_run_ranks
from danlu.dryrun.operator_tuning import tune_operators
from danlu.framework.build import build_train_state
from danlu.framework.loop import TrainStages, take_step
from danlu.framework.stages import FixedData
from danlu.ops.operators.routing import route_operators
from danlu.spec.model import Model
from danlu.spec.operator_table import OperatorTable, RoutedOperator
from danlu.spec.plan import Plan
from danlu.spec.recipe import BatchConfig, DataConfig, LRSchedule, PrecisionConfig, Recipe

BAR = 0.15
TURNS, QUICK_TURNS = 40, 3
RESAMPLED = 1000
TUNE_SECONDS, QUICK_TUNE_SECONDS = 40.0, 4.0
LENGTH, SEQUENCES = 512, 2
RECIPE = Recipe(
    name="operator-gain", steps=10**6, data=DataConfig(shards="none"),
    model=Model(vocabulary=8192, layers=4, width=256, heads=8, mlp_width=768, sequence=LENGTH, tied=False),
    batch=BatchConfig(sequences=SEQUENCES, length=LENGTH),
    schedule=LRSchedule(kind="constant"), precision=PrecisionConfig(compute="bf16"),
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer turns, and no bar")
    add_report_option(parser)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    chip, plan = find_chip("cpu"), Plan()
    run = dry_run_ranks(RECIPE, plan, None, [0])
    with Progress() as progress:
        tuning = progress.add_task("tuning")
        table = tune_operators(
            run,
            chip,
            QUICK_TUNE_SECONDS if asked.quick else TUNE_SECONDS,
            lambda name, done, total: progress.update(tuning, completed=done + 1, total=total),
        )
        turns = QUICK_TURNS if asked.quick else TURNS
        steps = progress.add_task("turns", total=turns)
        measured = measure_steps(list(table.fastest), turns, lambda: progress.advance(steps))
    rows = compare(table, measured)
    show(rows)
    missed = [] if asked.quick else [row["operator"] for row in rows if abs(row["error"]) > BAR]
    figures = {"bar": BAR, "turns": turns, "rows": rows, "missed": missed}
    write_report(asked.report, "operator_gain", figures)
    print(json.dumps({"benchmark": "operator_gain", **figures}))
    return int(bool(missed))


def measure_steps(operators: list[RoutedOperator], turns: int, advance: Any) -> dict[str, list[float]]:
    """Seconds of a step as it is (under ""), and with each operator run by torch, in turns."""
    find_chip("cpu").runtime.set_device(0)
    place = RankInfo()
    world = World.join(place, "gloo", rendezvous(place))
    mesh = build_mesh(Plan(), world, None, experts=False)
    state, passes = build_train_state(RECIPE, Plan(), mesh)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(RECIPE.decoder.vocabulary, (SEQUENCES, LENGTH + 1), generator=generator)
    stages = TrainStages(FixedData(SameBatch(tokens)), passes)
    contenders = ["", *operators]
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(-1, turns):
        for name in contenders if turn % 2 else contenders[::-1]:
            route_operators({name: "torch"} if name else {}, mesh.device)
            began = time.perf_counter()
            take_step(RECIPE, state, mesh, stages)
            if turn >= 0:
                seconds[name].append(time.perf_counter() - began)
        advance()
    world.shutdown()
    return seconds


def compare(table: OperatorTable, measured: dict[str, list[float]]) -> list[dict[str, Any]]:
    rows = []
    for name, best in table.fastest.items():
        by_torch, by_best = table.seconds(name, "torch"), table.seconds(name, best)
        assert by_torch is not None
        assert by_best is not None
        gain = lower_quartile(measured[name]) - lower_quartile(measured[""])
        low, high = interval(measured[name], measured[""])
        rows.append(
            {
                "operator": name,
                "implementation": best,
                "predicted": by_torch - by_best,
                "measured": gain,
                "low": low,
                "high": high,
                "error": (by_torch - by_best) / gain - 1,
                "step": statistics.median(measured[""]),
                "times_faster": by_torch / by_best,
            }
        )
    return rows


def lower_quartile(values: list[float]) -> float:
    return statistics.quantiles(values, n=4)[0]


def interval(slower: list[float], faster: list[float]) -> tuple[float, float]:
    """Nine of ten resampled differences of lower quartiles lie between."""
    drawn = random.Random(1)
    differences = sorted(
        lower_quartile(drawn.choices(slower, k=len(slower))) - lower_quartile(drawn.choices(faster, k=len(faster)))
        for _ in range(RESAMPLED)
    )
    return differences[RESAMPLED // 20], differences[-RESAMPLED // 20]


def show(rows: list[dict[str, Any]]) -> None:
    table = Table("operator", "implementation", "× torch", "gain predicted", "measured", "nine of ten", "error")
    for row in rows:
        table.add_row(
            row["operator"],
            row["implementation"],
            f"{row['times_faster']:.1f}",
            f"{1e3 * row['predicted']:.1f} ms",
            f"{1e3 * row['measured']:.1f} ms",
            f"{1e3 * row['low']:.1f} to {1e3 * row['high']:.1f} ms",
            f"{row['error']:+.0%}",
        )
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
