"""The share of time that goes into steps that count, with faults as often as on 100,000 nodes; measured and simulated.

    python benchmarks/effective_time.py [--faults 10] [--between 83] [--report FILE] [--picture FILE]

Measured: two ranks train with steps of a second or so, and meet a fault of Llama 3's mix every 83 steps. That is how
far apart faults are on 100,000 nodes that fail once in 2.6 years each, a fault in 14 minutes, if a step takes ten
seconds. What a fault costs is the time from the last step that counts to the next one, less a step.

Simulated: the same on a described cluster, from 1,000 to 100,000 nodes, with the seconds that `recovery.py` and
`test_lost_nodes.py` measured, the seconds to read a node's state over the described network, and an assumption that
nothing here can measure: every factor of ten in nodes adds a second until all have met again. Beside it, a job
that is restarted from a checkpoint on shared storage, by the planner's own formula. Exits non-zero if the measured
share is below 97 %. The last line is JSON.
"""

import argparse
import json
import random
import sys
import tempfile
from dataclasses import dataclass
from math import log10
from pathlib import Path
from typing import Any

import numpy as np
from reports import ROOT, add_report_option, write_report
from rich.progress import Progress
from rich.table import Table

sys.path.insert(0, str(ROOT / "tests" / "multiprocess"))
from chaos_campaign import ChaosRun

from danlu.planner.goodput import goodput_share, optimal_save_interval
from danlu.report.terminal import Console
from danlu.spec import Cluster, RecoveryEvent, StepEvent, load_cluster
from danlu.spec.fault_mix import FAULT_MIXES

BAR = 0.97
RECIPE = """
name = "chaos"
steps = {steps}
[model]
base = "tiny-llama"
vocabulary = 264
width = 192
layers = 4
heads = 4
kv_heads = 4
mlp_width = 512
[data]
shards = "shards"
source = ["text.txt"]
[batch]
sequences = 32
length = 128
[checkpoint]
every = 50
"""
NODES = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)
RARE, OFTEN = "a fault in 14 minutes on 100,000 nodes", "as often as Llama 3's (the description's)"
NODE_MTBF = 14 * 60 * 100_000.0
STEP_SECONDS = 10.0
PARAMETERS_PER_NODE = 1e9
STATE_BYTES = 14 * PARAMETERS_PER_NODE
SAVE_SECONDS = 60.0
"""Between two saves into the memory of other nodes."""
LEASE_SECONDS = 8.0
NODE_READY_SECONDS = 1.8
"""From a node that is lost to the next step, beside the lease, as `tests/engines/test_lost_nodes.py` saw it."""
SIMULATED_FAULTS = 4000
HANGS, HOSTS = ("stop", "lock"), ("host",)


@dataclass(frozen=True)
class Costs:
    """Seconds that a fault costs, by where the state comes from."""

    warm: float
    """A rank is replaced, and all go on from memory of their hosts; measured."""
    read: float
    """A node reads its state from the memory of another."""
    saved: float
    """A save into other nodes' memory stalls the run."""

    @classmethod
    def on(cls, cluster: Cluster) -> "Costs":
        """With the network of a cluster between its nodes, and what was measured here."""
        measured = json.loads((ROOT / "docs" / "reports" / "recovery.json").read_text())["figures"]
        outer = cluster.levels[min(1, len(cluster.levels) - 1)]
        sent = STATE_BYTES / (cluster.chips_per_node * outer.bandwidth / outer.oversubscription)
        return cls(measured["warm"]["median_s"], sent, sent)

    def draw(self, kind: str, nodes: int, dice: random.Random) -> float:
        """Of one fault."""
        lost = dice.uniform(0.0, STEP_SECONDS) + self.warm + self.read + log10(nodes)
        if kind in HANGS:
            lost += 2 * STEP_SECONDS + 1.0
        if kind in HOSTS:
            lost += LEASE_SECONDS + NODE_READY_SECONDS + dice.uniform(0.0, SAVE_SECONDS)
        return lost


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=10)
    parser.add_argument("--between", type=int, default=83, help="steps between two faults")
    parser.add_argument("--picture", type=Path, help="SVG of both against the number of nodes")
    add_report_option(parser)
    arguments = parser.parse_args()
    curves = simulate_all()
    measured: dict[str, Any] = {"share": None}
    if arguments.faults:
        with tempfile.TemporaryDirectory() as folder:
            measured = measure(Path(folder), arguments.faults, arguments.between)
    show(curves, measured)
    if arguments.picture:
        arguments.picture.write_text(picture(curves, measured["share"]))
    passed = measured["share"] is None or measured["share"] >= BAR
    figures = {"measured": measured, "simulated": curves, "nodes": NODES, "bar": BAR, "passed": passed}
    write_report(arguments.report, "effective_time", figures)
    print(json.dumps({"benchmark": "effective_time", **figures}))
    return 0 if passed else 1


def simulate_all() -> dict[str, list[float]]:
    """The effective share by number of nodes."""
    cluster = load_cluster("h100-pod")
    costs = Costs.on(cluster)
    assert cluster.failures is not None
    rates = {RARE: NODE_MTBF, OFTEN: cluster.failures.node_mtbf}
    curves = {name: [simulate(nodes, mtbf / nodes, costs) for nodes in NODES] for name, mtbf in rates.items()}
    shared = next(tier for tier in cluster.tiers if tier.kind == "shared")
    restarted = []
    for nodes in NODES:
        between = cluster.failures.node_mtbf / nodes
        save, load = (STATE_BYTES * nodes / speed for speed in (shared.write, shared.read))
        recover = cluster.failures.restart + load
        every = optimal_save_interval(save, between, recover)
        restarted.append(max(0.0, goodput_share(every, save, between, recover)))
    return curves | {f"restarted from shared storage, {OFTEN}": restarted}


def simulate(nodes: int, between: float, costs: Costs) -> float:
    """Faults one after the other; one that comes while the run recovers begins that anew."""
    dice = random.Random(nodes)
    kinds, weights = zip(*FAULT_MIXES["llama3"].items(), strict=True)
    useful = total = 0.0
    for _ in range(SIMULATED_FAULTS):
        gap = dice.expovariate(1 / between)
        lost = costs.draw(dice.choices(kinds, weights)[0], nodes, dice)
        useful += max(0.0, gap - lost)
        total += gap
    return useful / total * (1 - costs.saved / SAVE_SECONDS)


def measure(folder: Path, faults: int, between: int) -> dict[str, Any]:
    """A run that meets faults, and what they cost it."""
    dice = random.Random(0)
    mix = {kind: weight for kind, weight in FAULT_MIXES["llama3"].items() if kind not in ("corrupt", "preempt")}
    run = ChaosRun(folder, 2, steps=between * (faults + 1), recipe=RECIPE)
    run.prepare()
    run.start()
    try:
        with Progress(disable=not sys.stdout.isatty()) as bar:
            task = bar.add_task("faults", total=faults)
            for _ in range(faults):
                run.next_step(between)
                kind = dice.choices(list(mix), list(mix.values()))[0]
                if run.meet(kind, dice.randrange(2), dice).seconds is None:
                    raise AssertionError(f"not survived: {run.met[-1]}; {run.said()}")
                bar.advance(task)
        run.run_to_end()
    finally:
        run.interrupt()
    return summarize(list(run.run.read_events())) | {"kinds": [met.kind for met in run.met]}


def summarize(events: list[Any]) -> dict[str, Any]:
    """What was lost between the last step that counts and the next one, at every recovery."""
    steps = [event for event in events if isinstance(event, StepEvent)]
    usual = float(np.median([step.seconds for step in steps]))
    lost = []
    for number, event in enumerate(events):
        if isinstance(event, RecoveryEvent):
            before = next(e for e in reversed(events[:number]) if isinstance(e, StepEvent) and e.step == event.step)
            after = next(e for e in events[number:] if isinstance(e, StepEvent))
            lost.append(after.time - before.time - usual)
    wall = steps[-1].time - steps[0].time
    return {
        "share": 1 - sum(lost) / wall,
        "faults": len(lost),
        "steps": steps[-1].step,
        "step_s": usual,
        "lost_s": lost,
        "wall_s": wall,
    }


def show(curves: dict[str, list[float]], measured: dict[str, Any]) -> None:
    table = Table("nodes", *curves, title="Effective share of time")
    for number, nodes in enumerate(NODES):
        table.add_row(f"{nodes:,}", *(f"{shares[number]:.1%}" for shares in curves.values()))
    Console().print(table)
    if measured["share"] is not None:
        print(
            f"measured: {measured['share']:.1%} in {measured['steps']:,} steps of {measured['step_s']:.2f} s with "
            f"{measured['faults']} faults, which cost {np.mean(measured['lost_s']):.1f} s each"
        )


def picture(curves: dict[str, list[float]], measured: float | None) -> str:
    """Both against the number of nodes, on a logarithmic axis."""
    width, height, left, bottom = 720, 360, 60, 50

    def at(nodes: float, share: float) -> tuple[float, float]:
        return left + (width - left - 20) * (log10(nodes) - 3) / 2, (height - bottom) - (height - bottom - 30) * share

    colors = ("#2563eb", "#d97706", "#9ca3af")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for tenth in range(0, 11, 2):
        x, y = at(1000, tenth / 10)
        parts.append(f'<path d="M{x} {y}H{width - 20}" stroke="#e5e7eb"/><text x="8" y="{y + 4}">{tenth * 10} %</text>')
    for nodes in NODES:
        x, y = at(nodes, 0)
        parts.append(f'<text x="{x}" y="{y + 18}" text-anchor="middle">{nodes:,}</text>')
    for number, (name, shares) in enumerate(curves.items()):
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(at, NODES, shares))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colors[number]}" stroke-width="2.5"/>')
        parts.append(
            f'<text x="{left + 12}" y="{height - bottom - 50 + 16 * number}" fill="{colors[number]}">{name}</text>'
        )
    if measured is not None:
        x, y = at(100_000, measured)
        parts.append(f'<circle cx="{x}" cy="{y}" r="5" fill="#16a34a"/>')
        parts.append(f'<text x="{x - 10}" y="{y - 9}" text-anchor="end" fill="#16a34a">measured: {measured:.1%}</text>')
    parts.append(f'<text x="{width / 2}" y="{height - 8}" text-anchor="middle">nodes</text></svg>')
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main())
