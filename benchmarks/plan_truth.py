"""Is the planner's step time accurate? Real layouts on this machine compared with predictions from `danlu probe`.

    python benchmarks/plan_truth.py [--quick] [--json] [--only machine|supernodes] [--ranks 1,2] [--report FILE]

The machine is probed with one, two and four ranks, before, between and after rounds in which all layouts take turns,
and a layout is predicted from all the probes: the speed of a machine changes during the benchmark, by a third within
ten minutes here. Nothing is fitted on the layouts. The time of a layout is the median of its steps; a step during which
other programs took more than a twentieth of the machine is repeated. Then the same on four hosts in two supernodes,
where the network is the bottleneck: network namespaces, which need root and are skipped, with a message, if they cannot
be created.

Exits non-zero if a bar is missed.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from namespaces import INTERFACE, LabHost, supernodes, why_no_lab
from probed_cluster import probe_cluster
from real_layouts import Layout, World, layouts, layouts_apart, recipe, worlds
from reports import add_report_option, write_report
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from danlu.planner.request import PlanRequest
from danlu.planner.search import price_plan
from danlu.spec import Cluster

INSIDE, BETWEEN = "2gbit", "200mbit"
"""Links of a host, and of a supernode of two hosts."""
LEVELS = "supernode:2,fabric:2"
DISTURBED = 0.05
"""Share of the machine that other programs may take during a step that counts."""


@dataclass(frozen=True)
class Bars:
    """The bars."""

    error: float
    """Of every layout."""
    order: float
    """Least rank correlation."""
    rounds: int
    """Rounds of all layouts, with probes between them."""
    steps: int
    """Steps of a layout in a round that count."""
    most: int
    """Steps of a layout in a round, where others disturb."""


FULL = Bars(error=0.15, order=0.9, rounds=2, steps=3, most=5)
SAMPLE = Bars(error=0.4, order=0.5, rounds=1, steps=3, most=4)


@dataclass
class Row:
    """One layout, measured and predicted."""

    layout: Layout
    place: str
    steps: list[float] = field(default_factory=list)
    """Seconds of undisturbed steps."""
    disturbed: list[float] = field(default_factory=list)
    predictions: list[float] = field(default_factory=list)

    @property
    def counted(self) -> list[float]:
        """Undisturbed steps; all where there are too few."""
        return self.steps if len(self.steps) >= 3 else self.steps + self.disturbed

    @property
    def measured(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.counted)

    @property
    def predicted(self) -> float:
        """Seconds of a step, from all probes."""
        return statistics.mean(self.predictions)

    @property
    def error(self) -> float:
        """Of the prediction, as a share of the measured time."""
        return self.predicted / self.measured - 1

    def told(self) -> dict[str, Any]:
        """For machines."""
        return {
            "layout": self.layout.name,
            "place": self.place,
            "ranks": self.layout.world,
            "measured": self.measured,
            "fastest": min(self.counted),
            "slowest": max(self.counted),
            "steps": len(self.counted),
            "disturbed": len(self.disturbed),
            "predicted": self.predicted,
            "error": self.error,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a sample with looser bars, for CI")
    parser.add_argument("--json", action="store_true", help="print for machines")
    parser.add_argument("--only", choices=("machine", "supernodes"), help="one of the two parts")
    parser.add_argument("--ranks", help="layouts of so many ranks alone, such as 1,2: all of them at once take 17 GB")
    add_report_option(parser)
    arguments = parser.parse_args()
    sizes = {int(word) for word in arguments.ranks.split(",")} if arguments.ranks else {1, 2, 4}
    bars = SAMPLE if arguments.quick else FULL
    began = time.monotonic()
    rows: list[Row] = []
    columns = (TextColumn("{task.description:<44}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress, tempfile.TemporaryDirectory() as folder:
        if arguments.only != "supernodes":
            every = [layout for layout in layouts() if layout.world in sizes]
            chosen = [layout for layout in every if layout.quick or not arguments.quick]
            rows += Part("machine", chosen, bars, arguments.quick, Path(folder), progress).run()
        reason = why_no_lab() if arguments.only != "machine" else "not asked for"
        if arguments.quick and not arguments.only:
            reason = "not part of the sample"
        if not reason:
            with supernodes(INSIDE, BETWEEN) as hosts:
                part = Part("supernodes", layouts_apart(), bars, arguments.quick, Path(folder), progress, hosts)
                rows += part.run()
    results = [
        judged(place, [row for row in rows if row.place == place], bars)
        for place in dict.fromkeys(row.place for row in rows)
    ]
    passed = all(result["passed"] for result in results)
    answer = {"benchmark": "plan_truth", "passed": passed, "parts": results, "seconds": time.monotonic() - began}
    answer["rows"] = [row.told() for row in rows]
    if arguments.json:
        print(json.dumps(answer))
    else:
        show(rows, results, bars, reason)
    write_report(arguments.report, "plan_truth", answer)
    sys.exit(0 if passed else 1)


class Part:
    """Layouts in one environment: probed, and measured between probes."""

    def __init__(
        self,
        place: str,
        chosen: Sequence[Layout],
        bars: Bars,
        quick: bool,
        folder: Path,
        progress: Progress,
        hosts: Sequence[LabHost] = (),
    ) -> None:
        self.place, self.bars, self.quick = place, bars, quick
        self.folder, self.hosts, self.progress = folder, hosts, progress
        self.rows = [Row(layout, place) for layout in chosen]
        self.sizes = sorted({layout.world for layout in chosen})
        probes = len(self.sizes) * (1 if quick else bars.rounds + 1)
        self.task = progress.add_task(place, total=probes + len(self.rows) * (1 + bars.rounds * bars.steps))

    def run(self) -> list[Row]:
        """All rows, measured and predicted."""
        enter = [" ".join(host.enter) for host in self.hosts]
        first = self.hosts[0].address if self.hosts else "127.0.0.1"
        with worlds(self.sizes, enter, INTERFACE if self.hosts else "", first) as started:
            for row in self.rows:
                self.advance(f"building {row.layout.name}")
                started[row.layout.world].build(row.layout.name, recipe(row.layout), row.layout.plan)
            self.predict()
            for _ in range(self.bars.rounds):
                for row in self.rows:
                    self.turn(row, started[row.layout.world])
                if not self.quick:
                    self.predict()
        return self.rows

    def turn(self, row: Row, world: World) -> None:
        """Run a layout's steps of one round."""
        enough = len(row.steps) + self.bars.steps
        for taken in range(self.bars.most):
            if len(row.steps) < enough:
                self.advance(row.layout.name, 1 if taken < self.bars.steps else 0)
                self.step(row, world)

    def step(self, row: Row, world: World) -> None:
        """Run one step of a layout."""
        watch = Watch([rank.pid for rank in world.ranks])
        seconds = world.step(row.layout.name)
        (row.disturbed if watch.others() > DISTURBED else row.steps).append(seconds)

    def predict(self) -> None:
        """Probe the machine with as many ranks as each layout has, and predict them all."""
        clusters = {size: self.probe(size) for size in self.sizes}
        for row in self.rows:
            cluster = clusters[row.layout.world]
            question = PlanRequest(recipe=recipe(row.layout), cluster=cluster, chips=row.layout.world)
            row.predictions.append(price_plan(question, row.layout.plan).prediction.seconds)

    def probe(self, ranks: int) -> Cluster:
        """The machine as `danlu probe` sees it."""
        self.advance(f"danlu probe, {ranks} ranks")
        file = self.folder / f"{self.place}-{ranks}.toml"
        return probe_cluster(file, ranks, quick=self.quick, levels=LEVELS, hosts=self.hosts)

    def advance(self, what: str, by: int = 1) -> None:
        """Show the current activity."""
        self.progress.update(self.task, description=f"{self.place}: {what}", advance=by)


class Watch:
    """How much of the machine others take, since its creation."""

    def __init__(self, own: Sequence[int]) -> None:
        self.own, self.began = own, time.monotonic()
        self.before = self._others()

    def others(self) -> float:
        """Share of all cores taken by processes other than our own, or by other machines on the same host."""
        cores = os.cpu_count() or 1
        elapsed = time.monotonic() - self.began
        return max(0.0, self._others() - self.before) / (elapsed * cores)

    def _others(self) -> float:
        """Seconds of all cores: user, nice, system and stolen, less our own."""
        ticks = os.sysconf("SC_CLK_TCK")
        total = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
        busy = total[0] + total[1] + total[2] + total[7]
        mine = 0
        for process in (*self.own, os.getpid()):
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            mine += int(fields[11]) + int(fields[12])
        return (busy - mine) / ticks


def judged(place: str, rows: Sequence[Row], bars: Bars) -> dict[str, Any]:
    """All layouts of one environment."""
    errors = [abs(row.error) for row in rows]
    worst = max(rows, key=lambda row: abs(row.error))
    order = float(np.corrcoef(ranks([r.predicted for r in rows]), ranks([r.measured for r in rows]))[0, 1])
    return {
        "place": place,
        "layouts": len(rows),
        "mean error": statistics.mean(errors),
        "worst error": max(errors),
        "worst": worst.layout.name,
        "rank correlation": order,
        "passed": all(error <= bars.error for error in errors) and round(order, 6) >= bars.order,
    }


def ranks(values: Sequence[float]) -> list[int]:
    """Ranks of the values in sorted order."""
    order = sorted(values)
    return [order.index(value) for value in values]


def show(rows: Sequence[Row], results: Sequence[dict[str, Any]], bars: Bars, reason: str) -> None:
    console = Console(width=None if sys.stdout.isatty() else 140)
    for result in results:
        title = {"machine": "Step time on this machine", "supernodes": f"Four hosts: {INSIDE} each, {BETWEEN} a pair"}
        made = Table(title=title[result["place"]], title_justify="left")
        made.add_column("layout")
        for name in ("ranks", "predicted", "measured", "fastest", "slowest", "steps", "disturbed", "error"):
            made.add_column(name, justify="right")
        for row in sorted((row for row in rows if row.place == result["place"]), key=lambda row: row.measured):
            colour = "[red]" if abs(row.error) > bars.error else ""
            seconds = (row.predicted, row.measured, min(row.counted), max(row.counted))
            made.add_row(
                row.layout.name,
                str(row.layout.world),
                *(f"{value:.3f} s" for value in seconds),
                str(len(row.counted)),
                str(len(row.disturbed)),
                f"{colour}{row.error:+.1%}",
            )
        console.print(made)
        console.print(
            f"mean error {result['mean error']:.1%}, worst {result['worst error']:.1%} ({result['worst']}; asked: "
            f"every one within {bars.error:.0%}), rank correlation {result['rank correlation']:.2f} (asked: "
            f"{bars.order}): " + ("reached" if result["passed"] else "[red]missed")
        )
    if reason:
        console.print(f"supernodes left out: {reason}", style="yellow")


if __name__ == "__main__":
    main()
