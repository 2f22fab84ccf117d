"""Does it pay to lay parallel axes on the right level of the network, and does the planner know which?

    python benchmarks/topology.py [--quick] [--random 10] [--seed 0] [--only sunway] [--report FILE]

Four hosts of two ranks in two supernodes, each host in a network namespace of its own; the kernel throttles every
host's link, and the trunk between the supernodes to 3/16 (as on the Sunway machine) or a tenth of what its hosts could
send. There a mixture of experts is trained in every placement of its data and expert axes on the three levels, layouts
taking turns. The planner knows the network by `danlu probe` alone: its choice is compared with the symmetric mapping,
in which both axes span all ranks, with the worst, and with the best that was measured. Then the same on networks and
models that are drawn at random. Needs root and iproute2.

Exits non-zero if a bar is missed. The last line is JSON.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from math import isclose
from pathlib import Path
from typing import Any

from namespaces import INTERFACE, why_no_lab
from probed_cluster import probe_cluster
from real_layouts import World, plan, worlds
from reports import add_report_option, write_report
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from topology_picture import SYMMETRIC_NAME as SYMMETRIC
from topology_picture import draw

from danlu.planner.request import PlanRequest, parse_constraints
from danlu.planner.search import price_plan, search
from danlu.scheduler.network_lab import LabLevel, lab_down, lab_up
from danlu.spec.cluster import Cluster
from danlu.spec.model import Model, Moe
from danlu.spec.plan import Plan
from danlu.spec.rank_placement import place_dense_axes, place_expert_axes
from danlu.spec.recipe import BatchConfig, DataConfig, LRSchedule, Recipe

RANKS = 8
LEVELS = {"host": 2, "supernode": 2, "trunk": 2}
SEARCHED = "ep=2|4|8,pp=1,cp=1,tp=1,microbatches=1,recompute=none,reshard=false,dispatcher=alltoall,chunks=1"
"""What all layouts have in common: they differ by where `replicate`, `shard` and `ep` lie."""
GAIN_BAR, LOSS_BAR = 1.6, 0.03
TURNS, QUICK_TURNS = 10, 2
SLOW = (1.6, 1.3, 1.15)
"""After the first, second and third turn, layouts whose fastest step is so many times the best one's are left out."""


@dataclass(frozen=True)
class Case:
    """A network and a model."""

    name: str
    host_rate: float
    """Bytes per second of a host's link."""
    trimmed: float
    """Oversubscription of the trunk: what the hosts of a supernode could send, over what its link carries."""
    experts: int = 8
    top_k: int = 2
    width: int = 256
    expert_width: int = 128
    layers: int = 2
    sequences: int = 32
    """Of a global batch, 128 tokens each."""

    @property
    def levels(self) -> tuple[LabLevel, ...]:
        """Of the lab."""
        trunk = LEVELS["supernode"] * self.host_rate / self.trimmed
        return LabLevel("supernode", 2, self.host_rate), LabLevel("trunk", 2, trunk)

    @property
    def recipe(self) -> Recipe:
        """A mixture of experts in every layer."""
        moe = Moe(experts=self.experts, top_k=self.top_k, width=self.expert_width)
        model = Model(vocabulary=1024, layers=self.layers, width=self.width, heads=8, sequence=128, moe=moe)
        return Recipe(
            name="topology",
            steps=10**6,
            model=model,
            data=DataConfig(shards="none"),
            batch=BatchConfig(sequences=self.sequences, length=128),
            schedule=LRSchedule(kind="constant"),
        )


FIXED = (
    Case("sunway, 16:3", 50e6, 16 / 3),
    Case("1:10", 50e6, 10.0),
)


def drawn(count: int, seed: int) -> list[Case]:
    """Networks and models at random: the trunk from full to a twentieth, tokens and experts from few to many."""
    dice = random.Random(seed)
    return [
        Case(
            f"random {number}",
            host_rate=dice.choice((50e6, 100e6, 200e6)),
            trimmed=round(dice.uniform(1, 20), 1),
            top_k=dice.choice((1, 2, 4)),
            width=dice.choice((128, 256)),
            expert_width=dice.choice((64, 256, 512)),
            sequences=dice.choice((8, 16, 32)),
        )
        for number in range(count)
    ]


@dataclass
class Mapping:
    """Where the axes lie, and how long a step takes."""

    name: str
    plan: Plan
    predicted: float = 0.0
    steps: list[float] = field(default_factory=list)

    @property
    def measured(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.steps)

    @property
    def fastest(self) -> float:
        """Seconds of the fastest step."""
        return min(self.steps)


def mappings() -> list[Mapping]:
    """Every placement of `replicate`, `shard` and `ep` on the three levels, with experts on more than one rank."""
    found = []
    for replicas in subsets(LEVELS):
        sharded = [level for level in LEVELS if level not in replicas]
        for experts in subsets(sharded):
            if experts:
                placed = {"replicate": replicas, "shard": sharded, "ep": list(experts)}
                degrees = {axis: 2 ** len(levels) for axis, levels in placed.items()}
                where = {axis: dict.fromkeys(levels, 2) for axis, levels in placed.items() if levels}
                name = (
                    f"replicate {told(replicas)}, experts {told(experts)}" if replicas else f"experts {told(experts)}"
                )
                found.append(Mapping(name, plan(**degrees, mapping=where, reshard_after_forward=False)))
    return found


def subsets(levels: Sequence[str] | dict[str, int]) -> list[tuple[str, ...]]:
    """All choices of some of the levels."""
    found: list[tuple[str, ...]] = [()]
    for level in levels:
        found += [(*chosen, level) for chosen in found]
    return found


def told(levels: Sequence[str]) -> str:
    """Levels in words."""
    return "over everything" if len(levels) == len(LEVELS) else "over " + " and ".join(levels)


def advance(progress: Progress, task: TaskID, what: str, by: int) -> None:
    """Show what is done now."""
    progress.update(task, description=what or None, advance=by)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the first network alone, few steps, no bars, for CI")
    parser.add_argument("--random", type=int, default=10, help="networks and models drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="cases whose name begins so")
    parser.add_argument(
        "--chip-from", type=Path, help="cluster file of `danlu probe --ranks 8 --threads 1` on this host"
    )
    parser.add_argument("--svg", type=Path, help="draw all layouts here")
    add_report_option(parser)
    asked = parser.parse_args()
    if reason := why_no_lab():
        print(reason, file=sys.stderr)
        return 2
    cases = [case for case in (*FIXED, *drawn(asked.random, asked.seed)) if case.name.startswith(asked.only or "")]
    cases = cases[:1] if asked.quick else cases
    if not cases:
        parser.error(f"--only: no case begins with {asked.only!r}")
    columns = (TextColumn("{task.description:<60}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    results = []
    with tempfile.TemporaryDirectory() as folder, Progress(*columns, console=Console(stderr=True)) as progress:
        turns = QUICK_TURNS if asked.quick else TURNS
        task = progress.add_task("danlu probe", total=len(cases) * (1 + len(mappings()) * (1 + turns)))
        chip = asked.chip_from or Path(folder) / "chip.toml"
        if asked.chip_from is None:
            probe_cluster(chip, RANKS, quick=asked.quick)
        for case in cases:
            results.append(measure(case, chip, Path(folder), turns, asked.quick, partial(advance, progress, task)))
            show(results[-1])
            missed = [] if asked.quick else misses(results)
            figures = {"passed": not missed, "missed": missed, "cases": results, **summary(results)}
            write_report(asked.report, "topology", figures)  # an hour in all: what is cut off has those that are done
            if asked.svg:
                asked.svg.write_text(draw(results), "utf-8")
    for line in missed:
        print(f"missed: {line}")
    print(json.dumps({"benchmark": "topology", **figures}))
    return int(bool(missed))


def measure(
    case: Case, chip: Path, folder: Path, turns: int, quick: bool, advance: Callable[[str, int], None]
) -> dict[str, Any]:
    """Probe the network of a case, whose chip is known, ask the planner, and let all layouts take turns."""
    name = f"topology{os.getpid()}"
    lab = lab_up(name, case.levels)
    try:
        hosts = [host for host in lab.hosts for _ in range(LEVELS["host"])]
        advance(f"{case.name}: danlu probe", 1)
        levels = ",".join(f"{level}:{fanout}" for level, fanout in LEVELS.items())
        cluster = probe_cluster(folder / "cluster.toml", RANKS, quick=quick, levels=levels, hosts=hosts, chip_from=chip)
        choices = mappings()
        chosen = ask_planner(case, cluster, choices)
        enter = [" ".join(host.enter) for host in hosts]
        with worlds([RANKS], enter, INTERFACE, hosts[0].address) as started:
            run(case, cluster, choices, [chosen.name, SYMMETRIC], turns, started[RANKS], advance)
    finally:
        lab_down(name)
    return judged(case, choices, chosen)


def ask_planner(case: Case, cluster: Cluster, choices: Sequence[Mapping]) -> Mapping:
    """Price all layouts, and find the one that the planner's own search chooses."""
    request = PlanRequest(
        recipe=case.recipe, cluster=cluster, chips=RANKS, constraints=parse_constraints(SEARCHED), reserve=0.0
    )
    for choice in choices:
        choice.predicted = price_plan(request, choice.plan).prediction.seconds
    answer = search(request, shown=1, tie_width=0.0).best[0]
    same = [choice for choice in choices if places(choice.plan, cluster) == places(answer.plan, cluster)]
    if len(same) != 1 or not isclose(same[0].predicted, answer.seconds):
        sys.exit(f"the planner's layout is not among those that are measured: {answer.plan!r}, {answer.seconds:.3f} s")
    return same[0]


def places(layout: Plan, cluster: Cluster) -> tuple[Any, ...]:
    """Where all axes of a plan lie."""
    return place_dense_axes(layout, cluster), place_expert_axes(layout, cluster)


def run(
    case: Case,
    cluster: Cluster,
    choices: Sequence[Mapping],
    always: Sequence[str],
    turns: int,
    world: World,
    advance: Callable[[str, int], None],
) -> None:
    """Steps of all layouts in turn. Who is far behind is left out after a turn or two, except `always` and the slowest.

    By the fastest step, as what disturbs a machine can make a step slower only: where few are left the median decides.
    """
    for choice in choices:
        advance(f"{case.name}: building {choice.name}", 1)
        world.build(choice.name, case.recipe, choice.plan, cluster)
    left = list(choices)
    for turn in range(turns):
        for choice in left:
            advance(f"{case.name}: {choice.name}", 1)
            choice.steps.append(world.step(choice.name))
        if turn < min(len(SLOW), turns - 1):
            if turn == 0:
                always = (*always, max(choices, key=lambda each: each.fastest).name)
            limit = SLOW[turn] * min(each.fastest for each in choices)
            kept = [each for each in left if each.fastest <= limit or each.name in always]
            advance("", (len(left) - len(kept)) * (turns - turn - 1))
            left = kept


def judged(case: Case, choices: Sequence[Mapping], chosen: Mapping) -> dict[str, Any]:
    """One case in figures."""
    symmetric = next(choice for choice in choices if choice.name == SYMMETRIC)
    turns = max(len(choice.steps) for choice in choices)
    compared = [choice for choice in choices if len(choice.steps) == turns]
    best, worst = min(compared, key=lambda each: each.measured), max(compared, key=lambda each: each.measured)
    return {
        "case": case.name,
        "network": asdict(case),
        "tokens_per_second": case.recipe.batch.tokens / chosen.measured,
        "chosen": chosen.name,
        "best": best.name,
        "worst": worst.name,
        "gain_over_symmetric": symmetric.measured / chosen.measured,
        "predicted_gain_over_symmetric": symmetric.predicted / chosen.predicted,
        "gain_over_worst": worst.measured / chosen.measured,
        "predicted_gain_over_worst": worst.predicted / chosen.predicted,
        "loss_to_best": chosen.measured / best.measured - 1,
        "layouts": [
            {"name": each.name, "predicted": each.predicted, "measured": each.measured, "steps": each.steps}
            for each in sorted(choices, key=lambda each: each.measured)
        ],
    }


def misses(results: Sequence[dict[str, Any]]) -> list[str]:
    """Where the planner's layout gains less than it says, or loses to another."""
    found = []
    if max(result["gain_over_symmetric"] for result in results) < GAIN_BAR:
        found.append(f"no case gains {GAIN_BAR} × over the symmetric mapping")
    for result in results:
        gain, said = result["gain_over_symmetric"], result["predicted_gain_over_symmetric"]
        if said >= GAIN_BAR > gain:
            found.append(f"{result['case']}: gains {gain:.2f} × over the symmetric mapping, {said:.2f} × was predicted")
        if result["loss_to_best"] > LOSS_BAR:
            found.append(f"{result['case']}: {result['loss_to_best']:.1%} slower than {result['best']}")
    return found


def summary(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Over all cases."""
    return {
        "most_gain_over_symmetric": max(result["gain_over_symmetric"] for result in results),
        "most_gain_over_worst": max(result["gain_over_worst"] for result in results),
        "most_loss_to_best": max(result["loss_to_best"] for result in results),
        "within_bar": sum(result["loss_to_best"] <= LOSS_BAR for result in results),
        "count": len(results),
    }


def show(result: dict[str, Any]) -> None:
    """A table of one case."""
    table = Table(title=f"{result['case']}: {result['chosen']} chosen", title_justify="left")
    for column in ("layout", "step", "fastest", "slowest", "steps", "predicted"):
        table.add_column(column, justify="left" if column == "layout" else "right")
    for row in result["layouts"]:
        mark = " (chosen)" if row["name"] == result["chosen"] else " (symmetric)" if row["name"] == SYMMETRIC else ""
        seconds = (row["measured"], min(row["steps"]), max(row["steps"]))
        shown = [f"{value:.2f} s" for value in seconds]
        table.add_row(row["name"] + mark, *shown, str(len(row["steps"])), f"{row['predicted']:.2f} s")
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    console.print(
        f"{result['gain_over_symmetric']:.2f} × the symmetric mapping (predicted "
        f"{result['predicted_gain_over_symmetric']:.2f} ×), {result['gain_over_worst']:.2f} × the worst (predicted "
        f"{result['predicted_gain_over_worst']:.2f} ×), {result['loss_to_best']:.1%} behind the best"
    )


if __name__ == "__main__":
    sys.exit(main())
