"""A run that meets fault after fault: does it survive each, and does it learn what it learns without them?

    python benchmarks/chaos.py [--faults 1000] [--ranks 2] [--seed 0] [--resume] [--report FILE]

Faults are drawn from Llama 3's mix (`danlu.spec.fault_mix`; without silent corruption, after which losses must differ),
at random moments of a step, with one to three steps between two. Beside them, one fault in five is the death of the
launcher, whose run is then resumed, of the process that forks ranks, or of a second rank while the run recovers from
the first. In stretches of fifty faults, each a run of its own; every step's loss and gradient norm are compared,
bit for bit, with a run of the same layout without faults. Exits non-zero if a fault is not survived, a run hangs, or a
number differs. The last line is JSON.
"""

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from reports import ROOT, add_report_option, commit, write_report
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

sys.path.insert(0, str(ROOT / "tests" / "multiprocess"))
from chaos_campaign import AGENT, COORDINATOR, DOUBLE, ChaosRun, Met, differences, meet_all

from danlu.spec.fault_mix import FAULT_MIXES

STRETCH = 50
STEPS_PER_FAULT = 8
"""More than pass between two faults, so that a run does not end before its last one."""
SPECIAL = (COORDINATOR, AGENT, DOUBLE)
SPECIAL_SHARE = 0.2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="go on after the stretches that were met at this commit")
    add_report_option(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(arguments.seed, arguments.ranks, resume=arguments.resume)
        met, wrong, failure = campaign(Path(folder), arguments.faults, arguments.ranks, journal)
    figures = summarize(met, wrong, failure, arguments.ranks)
    show(figures)
    write_report(arguments.report, "chaos", figures)
    print(json.dumps({"benchmark": "chaos", **figures}))
    return 0 if figures["passed"] else 1


def draw(count: int, dice: random.Random) -> list[str]:
    """Kinds of faults."""
    mix = {kind: weight for kind, weight in FAULT_MIXES["llama3"].items() if kind != "corrupt"}
    kinds = [str(kind) for kind in mix]
    return [
        dice.choice(SPECIAL) if dice.random() < SPECIAL_SHARE else dice.choices(kinds, list(mix.values()))[0]
        for _ in range(count)
    ]


class Journal:
    """The faults of every stretch that was met in full, so that a long campaign may be interrupted."""

    def __init__(self, seed: int, ranks: int, *, resume: bool) -> None:
        self.seed = seed
        self._path = ROOT / ".chaos" / f"{commit()}-{seed}-{ranks}.jsonl"
        self._path.parent.mkdir(exist_ok=True)
        lines = self._path.read_text().splitlines() if resume and self._path.exists() else []
        self.stretches = {one["number"]: [Met(**met) for met in one["met"]] for one in map(json.loads, lines)}
        if not resume:
            self._path.unlink(missing_ok=True)

    def add(self, number: int, met: list[Met]) -> None:
        """Faults of a stretch whose every step was right."""
        with self._path.open("a") as file:
            file.write(json.dumps({"number": number, "met": [asdict(each) for each in met]}) + "\n")


def campaign(folder: Path, faults: int, ranks: int, journal: Journal) -> tuple[list[Met], list[str], str]:
    """Every fault that was met, steps that differ, and what was not survived."""
    met = [each for stretch in journal.stretches.values() for each in stretch]
    wrong: list[str] = []
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn()) as bar:
        task = bar.add_task("faults", total=faults, completed=len(met))
        clean: ChaosRun | None = None
        for number in range(0, faults, STRETCH):
            if number in journal.stretches:
                continue
            dice = random.Random(f"{journal.seed}-{number}")
            kinds = draw(min(STRETCH, faults - number), dice)
            if clean is None:
                clean = ChaosRun(folder / "clean", ranks, steps=STEPS_PER_FAULT * min(STRETCH, faults))
                clean.prepare()
                clean.start()
                clean.run_to_end()
            run = ChaosRun(folder / f"faulted-{number}", ranks, steps=clean.steps)
            run.prepare()
            run.start()
            try:
                meet_all(run, kinds, dice, lambda: bar.advance(task))
                run.run_to_end()
            except (AssertionError, OSError) as error:
                return [*met, *run.met], wrong, str(error)
            finally:
                run.interrupt()
            met += run.met
            wrong += (found := differences(run, clean))
            if not found:
                journal.add(number, run.met)
    return met, wrong, ""


def summarize(met: list[Met], wrong: list[str], failure: str, ranks: int) -> dict[str, Any]:
    kinds = Counter(each.kind for each in met)
    survived = [each for each in met if each.seconds is not None]
    recovered = [each for each in survived if each.kind not in (COORDINATOR, "preempt")]
    return {
        "faults": len(met),
        "survived": len(survived),
        "ranks": ranks,
        "different_steps": len(wrong),
        "rank_0": sum(each.rank == 0 for each in met),
        "from_memory": sum(each.source == "memory" for each in recovered),
        "recovered": len(recovered),
        "most_steps_lost": max((each.steps_lost for each in recovered), default=0),
        "by_kind": {
            kind: {
                "faults": count,
                "survived": sum(each.kind == kind for each in survived),
                "median_s": float(np.median([each.seconds for each in survived if each.kind == kind] or [0.0])),
            }
            for kind, count in sorted(kinds.items())
        },
        "failure": failure[-1000:],
        "passed": bool(met) and len(survived) == len(met) and not wrong and not failure,
    }


def show(figures: dict[str, Any]) -> None:
    table = Table("fault", "met", "survived", "median until the next step")
    for kind, one in figures["by_kind"].items():
        table.add_row(kind, str(one["faults"]), str(one["survived"]), f"{one['median_s']:.2f} s")
    Console().print(table)
    print(
        f"{'passed' if figures['passed'] else 'FAILED'}: {figures['survived']} of {figures['faults']} faults survived, "
        f"{figures['different_steps']} steps differ from the run without faults. {figures['failure']}"
    )


if __name__ == "__main__":
    sys.exit(main())
