"""Bits of one replica's gradients flip: are they found, and is nothing learned from them?

    python benchmarks/replica_votes.py [--flips 60] [--replicas 3] [--report FILE]

Real ranks that hold the same state, and beside them the same run without a flip. One bit of one element of one rank's
gradients flips, after they were reduced, both drawn at random; the value stays finite. It is found if the rank is
outvoted at that step. What is not found was rounded away: every loss and norm must be, bit for bit, that of the run
without flips. Exits non-zero if a step differs, or if a rank that is right is blamed. The last line is JSON.
"""

import argparse
import json
import random
import re
import sys
import tempfile
from pathlib import Path

from reports import ROOT, add_report_option, write_report
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

sys.path.insert(0, str(ROOT / "tests" / "multiprocess"))
from chaos_campaign import RECIPE, ChaosRun, differences

from danlu.resilience.injection import inject
from danlu.spec import RecoveryEvent

STEPS_PER_FLIP = 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flips", type=int, default=60)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    add_report_option(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), arguments.flips, arguments.replicas, random.Random(arguments.seed))
    write_report(arguments.report, "replica_votes", figures)
    print(
        f"{figures['found']} of {figures['flips']} flips were found, {figures['wrongly_blamed']} ranks wrongly blamed; "
        f"{figures['different_steps']} of {figures['steps']} steps differ from the run without flips"
    )
    print(json.dumps({"benchmark": "replica_votes", **figures}))
    return int(bool(figures["different_steps"] or figures["wrongly_blamed"]))


def measure(folder: Path, flips: int, replicas: int, dice: random.Random) -> dict[str, int]:
    """Let bits flip in one run, and none in the other."""
    clean, flipped = (started(folder / name, flips * STEPS_PER_FLIP, replicas) for name in ("clean", "flipped"))
    blamed: list[tuple[int, int]] = []
    bars = Progress(*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    with bars as progress:
        for _ in progress.track(range(flips), description="flips"):
            flipped.next_step(dice.randint(1, 2))
            before, rank = len(outvoted(flipped)), dice.randrange(replicas)
            inject(flipped.run.path, "corrupt", rank)
            flipped.next_step(3)
            blamed += [(rank, each) for each in outvoted(flipped)[before:]]
        task = progress.add_task("both runs to their ends", total=None)
        for run in (flipped, clean):
            run.run_to_end()
        progress.update(task, total=1, completed=1)
    return {
        "flips": flips,
        "replicas": replicas,
        "found": len(blamed),
        "wrongly_blamed": sum(rank != found for rank, found in blamed),
        "steps": clean.steps,
        "different_steps": len(differences(flipped, clean)),
    }


def started(folder: Path, steps: int, replicas: int) -> ChaosRun:
    """A run whose ranks all hold the same state."""
    recipe = RECIPE.replace("sequences = 8", f"sequences = {2 * replicas}")
    run = ChaosRun(folder, replicas, steps, options=("--plan", "plan.toml"), recipe=recipe)
    run.prepare()
    (folder / "plan.toml").write_text(f"[degrees]\nreplicate = {replicas}\n")
    run.start()
    return run


def outvoted(run: ChaosRun) -> list[int]:
    """The rank that each vote so far has named."""
    causes = [event.cause for event in run.run.read_events() if isinstance(event, RecoveryEvent)]
    return [int(found[1]) for cause in causes if (found := re.search(r"the state of rank (\d+) after", cause))]


if __name__ == "__main__":
    sys.exit(main())
