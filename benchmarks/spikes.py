"""Train a small model with spikes at known places: all must be found in their own step, and cost only what is said.

    python benchmarks/spikes.py --report docs/reports/spikes.json   # 200 spikes, 5,000 clean steps
    python benchmarks/spikes.py --quick                             # a tenth of them, for CI

Spikes are garbage in the data, a loss or gradients times a factor, weights times a factor, and gradients that are not
finite; some are seen by one of two ranks alone. After its rewinds a run must equal, bit for bit, a run that looks for
nothing, on data without the samples that were passed over; a run that skips must equal one whose spikes are NaN. A run
that is killed after a rewind and resumed must equal one that was not. Exits with 1 if anything is missed, found where
nothing was put, or differs in a bit.
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from reports import add_report_option, write_report
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "multiprocess"))
from ranks import run_ranks
from spiking import (
    SEQUENCES,
    Injection,
    Kind,
    compare_with_reference,
    same_tensors,
    spike_recipe,
    trained,
    trained_with_kills,
)

from danlu.comm.rendezvous import RankInfo, rendezvous
from danlu.comm.world import World
from danlu.spec.event import Event, StepEvent
from danlu.spec.recipe import LRSchedule
from danlu.spec.spikes import SpikeConfig

LEARNING = 75
"""Batches before the first spike, so that a checkpoint 10 to 20 steps before it knows what is usual."""
BETWEEN = {"rewind": 21, "skip": 5}
"""Batches from a spike to the next: after a rewind of 10 to 20 steps the run must get past where it was."""
SMALLEST: dict[Kind, float] = {"loss": 4.0, "gradient": 100.0, "weights": 4.0}
LARGEST: dict[Kind, float] = {"loss": 1e4, "gradient": 1e6, "weights": 100.0}
DEFAULTS = {"window": SpikeConfig().window}
"""The statistics as they are without a setting."""
SCHEDULES = (
    LRSchedule(kind="wsd", warmup=100, final=0.0),
    LRSchedule(kind="cosine", warmup=300),
)
Tick = Callable[[int], None]


def draw_injections(count: int, policy: str, seed: int, ranks: int = 1) -> list[Injection]:
    """So many spikes of all kinds that the policy can deal with, of any size between a small one and a huge one."""
    draw = random.Random(seed)
    kinds: list[Kind] = ["garbage", "loss", "gradient"]
    if policy == "rewind":  # a batch that is skipped does not heal weights; NaN is no spike by statistics alone
        kinds += ["weights", "not finite"]
    injections = []
    for number in range(count):
        kind = kinds[number % len(kinds)]
        low, high = SMALLEST.get(kind, 1.0), LARGEST.get(kind, 1.0)
        alone = ranks > 1 and kind in ("loss", "gradient") and draw.random() < 0.5
        injections.append(
            Injection(
                cursor=(LEARNING + number * BETWEEN[policy] + draw.randrange(2)) * SEQUENCES,
                kind=kind,
                size=low * (high / low) ** draw.random(),
                rank=draw.randrange(ranks) if alone else None,
            )
        )
    return injections


def steps_for(count: int, policy: str) -> int:
    """Steps in which a run meets so many spikes for certain: every rewind passes over ten batches or more."""
    return LEARNING + count * (BETWEEN[policy] - (10 if policy == "rewind" else 0)) + 10


def find_in_clean_runs(steps: int, tick: Tick) -> dict[str, Any]:
    """Runs with nothing to find, at the default settings: warm-ups, decays, two seeds."""
    alarms = 0

    def count(event: Event) -> None:
        if isinstance(event, StepEvent):
            tick(1)

    for seed, schedule in enumerate(SCHEDULES):
        recipe = spike_recipe(steps // len(SCHEDULES), "warn", seed=seed, schedule=schedule, spikes=DEFAULTS)
        assert recipe.spikes == SpikeConfig(), "the defaults"
        alarms += len(trained(recipe, None, after=count).spikes)
    return {"steps": steps, "false_alarms": alarms}


def find_injected(runs: list[tuple[str, int]], folder: Path, tick: Tick) -> list[dict[str, Any]]:
    """Runs of one rank, each with its policy and its number of spikes."""
    rows = []
    for number, (policy, count) in enumerate(runs):
        injections = draw_injections(count, policy, seed=number)
        found = compare_with_reference(
            spike_recipe(steps_for(count, policy), policy, seed=number, spikes=DEFAULTS),
            folder / f"run-{number}",
            injections,
        )
        rows.append(
            _row(policy, 1, injections, found.equal, found.compared, len(found.missed), len(found.false_alarms))
            | {"lost_steps": sum(spike.lost_steps for spike in found.spikes)}
        )
        tick(count)
    return rows


def find_on_ranks(runs: list[tuple[str, int]], folder: Path, tick: Tick) -> list[dict[str, Any]]:
    """The same on two ranks, of which one alone may see the spike; both must do the same."""
    layouts = ({"shard": 2}, {"replicate": 2})
    drawn = [draw_injections(count, policy, 100 + number, ranks=2) for number, (policy, count) in enumerate(runs)]
    cases = [
        {
            "policy": policy,
            "spikes": DEFAULTS,
            "steps": steps_for(count, policy),
            "degrees": layouts[number % 2],
            "injections": [asdict(each) for each in drawn[number]],
        }
        for number, (policy, count) in enumerate(runs)
    ]
    (folder / "cases.json").write_text(json.dumps(cases))
    rank_script = Path(sys.path[0]) / "spike_rank.py"
    run_ranks(rank_script, 2, str(folder), seconds=3600)
    first, second = (json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(2))
    rows = []
    for (policy, count), injections, one, other in zip(runs, drawn, first, second, strict=True):
        equal = one["equal"] and other["equal"] and one["spikes"] == other["spikes"]
        rows.append(
            _row(policy, 2, injections, equal, one["compared"], one["missed"], one["false_alarms"])
            | {"lost_steps": sum(spike["lost_steps"] for spike in one["spikes"])}
        )
        tick(count)
    return rows


def resume_after_kills(count: int, folder: Path, tick: Tick) -> dict[str, Any]:
    """A run that dies after every rewind and is resumed, against one that lives."""
    recipe = spike_recipe(steps_for(count, "rewind"), seed=77, spikes=DEFAULTS)
    injections = draw_injections(count, "rewind", seed=77)
    through = trained(recipe, folder / "through", injections)
    killed = trained_with_kills(recipe, folder / "killed", injections, lambda spike: spike.rewound_to is not None)
    tick(count)
    equal = killed.curve() == through.curve() and same_tensors(killed.state, through.state)
    return {
        "kills": killed.kills,
        "equal": equal and killed.state.scalars() == through.state.scalars(),
    }


def _row(
    policy: str, ranks: int, injections: list[Injection], equal: bool, compared: int, missed: int, false_alarms: int
) -> dict[str, Any]:
    kinds = {kind: sum(each.kind == kind for each in injections) for kind in {each.kind for each in injections}}
    return {
        "policy": policy,
        "ranks": ranks,
        "spikes": len(injections),
        "missed": missed,
        "false_alarms": false_alarms,
        "compared_steps": compared,
        "equal": equal,
        "kinds": dict(sorted(kinds.items())),
        "one_rank_alone": sum(each.rank is not None for each in injections),
    }


@contextmanager
def _progress_bar(total: int) -> Iterator[Callable[[str], Tick]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total)

        def phase(name: str) -> Tick:
            progress.update(task, description=name)
            return lambda amount: progress.advance(task, amount)

        yield phase


def main() -> int:
    """Run all parts and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20 spikes and 300 clean steps, for CI")
    add_report_option(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.quick:
        clean, alone, together, kills = 300, [("rewind", 8), ("skip", 8)], [("rewind", 4)], 1
    else:
        clean, kills = 5000, 5
        alone, together = [("rewind", 30), ("rewind", 30), ("skip", 80)], [("rewind", 20), ("skip", 40)]
    count = sum(number for _, number in [*alone, *together])
    World.join(RankInfo(), "gloo", rendezvous(RankInfo()))
    with tempfile.TemporaryDirectory() as name, _progress_bar(clean + count + kills) as phase:
        folder = Path(name)
        rows = find_injected(alone, folder, phase("spikes, one rank"))
        rows += find_on_ranks(together, folder, phase("spikes, two ranks"))
        resumed = resume_after_kills(kills, folder, phase("killed and resumed"))
        quiet = find_in_clean_runs(clean, phase("clean steps"))
    figures = {
        "spikes": count,
        "missed": sum(row["missed"] for row in rows),
        "false_alarms_among_spikes": sum(row["false_alarms"] for row in rows),
        "compared_steps": sum(row["compared_steps"] for row in rows),
        "unequal_runs": sum(not row["equal"] for row in rows),
        "one_rank_alone": sum(row["one_rank_alone"] for row in rows),
        "smallest": {**SMALLEST},
        "clean": quiet,
        "killed": resumed,
        "runs": rows,
    }
    _print(figures)
    write_report(arguments.report, "spikes", figures)
    failures = figures["missed"] + figures["false_alarms_among_spikes"] + figures["unequal_runs"]
    passed = not failures and not quiet["false_alarms"] and resumed["equal"] and resumed["kills"] == kills
    return 0 if passed else 1


def _print(figures: dict[str, Any]) -> None:
    table = Table(box=None, pad_edge=False)
    for title in ("policy", "ranks", "spikes", "missed", "false alarms", "steps compared", "equal", "steps lost"):
        table.add_column(title, justify="left" if title == "policy" else "right")
    for row in figures["runs"]:
        keys = ("policy", "ranks", "spikes", "missed", "false_alarms", "compared_steps", "equal", "lost_steps")
        table.add_row(*(str(row[key]) for key in keys))
    console = Console()
    console.print(table)
    clean, killed = figures["clean"], figures["killed"]
    console.print(f"{clean['false_alarms']} false alarms in {clean['steps']:,} clean steps")
    console.print(f"{killed['kills']} kills right after a rewind: {'equal' if killed['equal'] else 'DIFFERENT'} bits")


if __name__ == "__main__":
    sys.exit(main())
