"""What a dry run of a real job costs: seconds and memory of one process for each rank that differs, at full size.

    python benchmarks/dryrun_scale.py [--quick] [--case NAME] [--report FILE]

Every rank is run by a separate process, one after the other. Four published jobs at their real number of ranks, then
one model whose ranks grow from 1,024 to 102,400 while each keeps its work. Exits non-zero if a bar is missed: seconds
and memory of a rank, and how much longer the largest world takes than the smallest (in CPU seconds, which other load on
the machine does not lengthen). A job that does not fit its chips is reported, but misses no bar. The last line is JSON.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from reports import add_report_option, write_report
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from danlu.comm.rank_layout import dense_ranks
from danlu.report import formatting
from danlu.spec import Cluster, load_cluster
from danlu.spec.check import load_run_spec
from danlu.spec.load import load_model
from danlu.spec.plan import DENSE_AXES, Degrees, Plan
from danlu.spec.recipe import BatchConfig, DataConfig, PrecisionConfig, Recipe

SECONDS, MEMORY, GROWTH = 120.0, 8 * 2**30, 2.0
"""The bars: wall seconds and resident bytes of a rank's process; CPU seconds of the largest world over the smallest."""
PATIENCE = 5
"""A rank may take so many times the bar before it is killed: how far it is off is worth knowing."""
RECIPES = Path(__file__).parents[1] / "recipes"
WORLDS = (1_024, 10_240, 102_400)


@dataclass(frozen=True)
class Job:
    """A recipe and a plan of this repository on a cluster of the catalog."""

    recipe: str
    plan: str
    cluster: str

    def read(self) -> tuple[Recipe, Plan, Cluster]:
        """The three files, checked against each other."""
        checked = load_run_spec(RECIPES / self.recipe, RECIPES / "plans" / self.plan, self.cluster)
        assert checked.cluster is not None
        return checked.recipe, checked.plan, checked.cluster


CASES = {
    "llama3-70b": Job("llama3-70b.toml", "llama3-70b-h100-4096.toml", "h100-pod"),
    "llama3-405b": Job("llama3-405b.toml", "llama3-405b-h100.toml", "h100-pod"),
    "deepseek": Job("deepseek.toml", "deepseek-h100.toml", "h100-pod"),
    "bagualu": Job("bagualu.toml", "bagualu-sunway.toml", "sunway"),
}
QUICK = ("bagualu", "growth")
"""The sample for CI: the most ranks, and one pipeline rank of the case."""


@dataclass(frozen=True)
class Task:
    """One rank to run."""

    case: str
    world: int
    rank: int
    place: str
    """What distinguishes it: its pipeline rank."""


@dataclass(frozen=True)
class Result:
    """Findings and cost of one rank's process."""

    seconds: float
    """From the start of the process to its end, as its parent sees it."""
    cpu: float
    resident: int
    peak: int
    wire: dict[str, int]
    """Bytes that the rank sends over the network, by level."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a sample for CI")
    parser.add_argument("--case", choices=[*CASES, "growth"], help="only this one")
    add_report_option(parser)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        run_rank(Task(**json.loads(arguments.child)))
        return
    chosen = [arguments.case] if arguments.case else list(QUICK) if arguments.quick else [*CASES, "growth"]
    tasks = [task for case in chosen for task in tasks_of(case, arguments.quick)]
    results = dict(run_all(tasks))
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table(results))
    missed = misses(results)
    for line in missed:
        console.print(line, style="red", highlight=False)
    found = [{**asdict(task), **asdict(result)} for task, result in results.items()]
    bars = {"seconds": SECONDS, "resident": MEMORY, "growth": GROWTH}
    growth = growth_of(results)
    summary = {"benchmark": "dryrun_scale", "bars": bars, "passed": not missed, "growth": growth, "ranks": found}
    print(json.dumps(summary))
    write_report(arguments.report, "dryrun_scale", summary)
    sys.exit(1 if missed else 0)


def described(case: str, world: int) -> tuple[Recipe, Plan, Cluster]:
    """The files of a case, or the made-up job of the growing world."""
    if case != "growth":
        return CASES[case].read()
    # Llama-3 8B, matrices inside the node, states over 64 nodes, replicas as many as there are; a sequence a node.
    replicas = world // 512
    recipe = Recipe(
        name=f"growth-{world}",
        steps=1,
        model=load_model("llama3-8b"),
        data=DataConfig(shards="none"),
        batch=BatchConfig(sequences=world // 8, length=8192),
        precision=PrecisionConfig(compute="bf16"),
    )
    plan = Plan(degrees=Degrees(replicate=replicas, shard=64, tp=8), recompute="selective")
    chip = load_cluster("h100-pod")
    fabric = chip.levels[-1].model_copy(update={"fanout": 64})  # more pods than were ever joined, so that all find room
    return recipe, plan, chip.model_copy(update={"levels": (*chip.levels[:-1], fabric)})


def tasks_of(case: str, quick: bool) -> Iterator[Task]:
    """The ranks of a case: the first, the second and the last pipeline rank, or the last of all ranks."""
    if case == "growth":
        for world in (WORLDS[0], WORLDS[-1]) if quick else WORLDS:
            yield Task(case, world, world - 1, "last")
        return
    _, plan, cluster = CASES[case].read()
    firsts = dense_ranks(plan, cluster)[:, 0, 0, 0, 0].tolist()
    places = sorted({0, min(1, len(firsts) - 1), len(firsts) - 1})
    for place in places[:1] if quick else places:
        yield Task(case, plan.degrees.world, firsts[place], f"pp {place}" if len(firsts) > 1 else "any")


def run_all(tasks: list[Task]) -> Iterator[tuple[Task, Result]]:
    """Run one task after the other, with a bar."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed} of {task.total} ranks"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=len(tasks))
        for task in tasks:
            progress.update(bar, description=f"{task.case}, rank {task.rank:,} of {task.world:,}")
            yield task, start(task)
            progress.advance(bar)


def start(task: Task) -> Result:
    """Run a rank in a separate process, on one core."""
    started = time.monotonic()
    child = subprocess.run(
        [sys.executable, __file__, "--child", json.dumps(asdict(task))],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE * SECONDS,
        check=False,
    )
    if child.returncode:
        sys.exit(f"{task.case}: rank {task.rank} ended with exit code {child.returncode}")
    return Result(seconds=time.monotonic() - started, **json.loads(child.stdout.splitlines()[-1]))


def run_rank(task: Task) -> None:
    """The child process; its last line has the fields of a `Result` except `seconds`."""
    from danlu.dryrun.dry_run import dry_run_rank

    recipe, plan, cluster = described(task.case, task.world)
    before = time.process_time()
    trace = dry_run_rank(recipe, plan, cluster, task.rank)
    wire = dict.fromkeys((level.name for level in cluster.levels), 0)
    for call in trace.collectives:
        wire[call.level] += call.total_wire
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    cpu = time.process_time() - before
    print(json.dumps({"cpu": cpu, "resident": resident, "peak": trace.peak.total, "wire": wire}))


def table(results: dict[Task, Result]) -> Table:
    """All ranks, one per row."""
    shown = Table(title="Dry runs, one process a rank", title_justify="left")
    for heading in ("case", "ranks", "layout", "rank"):
        shown.add_column(heading, justify="right" if heading == "ranks" else "left")
    for heading in ("seconds", "of CPU", "resident", "peak of the rank", "of its chip", "wire in a step, by level"):
        shown.add_column(heading, justify="left" if heading.startswith("wire") else "right")
    for task, result in results.items():
        _, plan, cluster = described(task.case, task.world)
        share = result.peak / cluster.chip.memory
        fits = formatting.percent(share) if share <= 1 else f"[red]{formatting.percent(share)}, does not fit[/]"
        shown.add_row(
            task.case,
            f"{task.world:,}",
            layout(plan),
            f"{task.rank:,} ({task.place})",
            f"{result.seconds:.1f}",
            f"{result.cpu:.1f}",
            formatting.size(result.resident),
            formatting.size(result.peak),
            fits,
            ", ".join(f"{level} {formatting.size(size)}" for level, size in result.wire.items() if size),
        )
    return shown


def layout(plan: Plan) -> str:
    """Degrees above one, and what else shapes a rank's work."""
    axes = (*DENSE_AXES, "ep")
    degrees = " · ".join(f"{axis} {getattr(plan.degrees, axis):,}" for axis in axes if getattr(plan.degrees, axis) > 1)
    return f"{degrees}; {plan.microbatches} microbatches, recompute {plan.recompute}"


def growth_of(results: dict[Task, Result]) -> float | None:
    """CPU seconds of the largest world over those of the smallest."""
    grown = {task.world: result.cpu for task, result in results.items() if task.case == "growth"}
    return grown[max(grown)] / grown[min(grown)] if len(grown) > 1 else None


def misses(results: dict[Task, Result]) -> list[str]:
    """A sentence for every bar that is missed."""
    found = []
    for task, result in results.items():
        name = f"{task.case}, rank {task.rank:,} of {task.world:,}"
        if result.seconds > SECONDS:
            found.append(f"{name}: took {result.seconds:.0f} s ({result.cpu:.0f} s of CPU), the bar is {SECONDS:.0f} s")
        if result.resident > MEMORY:
            found.append(f"{name}: held {formatting.size(result.resident)}, the bar is {formatting.size(MEMORY)}")
    growth = growth_of(results)
    if growth is not None and growth >= GROWTH:
        found.append(
            f"growth: {WORLDS[-1]:,} ranks took {growth:.2f} times as long as {WORLDS[0]:,}, the bar is {GROWTH}"
        )
    return found


if __name__ == "__main__":
    main()
