"""Ranks that compute a fifth longer than the others: are they found, and is nobody else called slow?

    python benchmarks/stragglers.py [--trials 100] [--slower 0.2] [--clean 10000] [--ranks 4] [--report FILE]

Four ranks over gloo take small steps; one after the other computes longer by a fifth, for as many looks as the watch of
a host needs to say something. Between them, and for so many steps at the end, none is slow, and a rank that is called
slow is a false alarm. Exits non-zero if fewer than 99 of 100 are found, or at a false alarm. The last line is JSON.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
from reports import add_report_option, write_report
from rich.progress import Progress, track

from danlu.comm.flight_record import read_flights
from danlu.resilience.straggler_watch import LOOKS

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "multiprocess"))
from hangs import HangingRanks

RECALL = 0.99
COMPUTE_SECONDS = 0.04
"""Of a step of a rank that is not slow: several times what it takes beside."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--slower", type=float, default=0.2, help="by which share the slow rank computes longer")
    parser.add_argument("--clean", type=int, default=10_000, help="steps at the end in which none is slow")
    parser.add_argument("--ranks", type=int, default=4)
    add_report_option(parser)
    arguments = parser.parse_args()
    quiet, found, shares, wrong = not sys.stdout.isatty(), 0, [], Counter[int]()
    with tempfile.TemporaryDirectory() as folder:
        ranks = HangingRanks(Path(folder), arguments.ranks, COMPUTE_SECONDS)
        with ranks.running(seconds=20 * arguments.trials + arguments.clean + 600):
            ranks.run_clean(60)
            for trial in track(range(arguments.trials), description="slow ranks", disable=quiet):
                slow = trial % arguments.ranks
                told = ranks.slow_down(slow, 1 + arguments.slower, LOOKS + LOOKS // 3)
                found += any(each.rank == slow for each in told)
                shares += [each.share for each in told if each.rank == slow]
                wrong.update(each.rank for each in told if each.rank != slow)
            first, clean = _step(folder), 0
            with Progress(disable=quiet) as progress:
                task = progress.add_task("clean steps", total=arguments.clean)
                while clean < arguments.clean:
                    wrong.update(each.rank for each in ranks.look_for_stragglers(LOOKS))
                    clean = _step(folder) - first
                    progress.update(task, completed=clean)
    passed = found >= RECALL * arguments.trials and not wrong
    figures = {
        "trials": arguments.trials,
        "slower": arguments.slower,
        "found": found,
        "median_share": float(np.median(shares)) if shares else None,
        "false_alarms": wrong.total(),
        "clean_steps": clean,
        "passed": passed,
    }
    print(
        f"{'passed' if passed else 'FAILED'}: {found} of {arguments.trials} slow ranks found, {wrong.total()} false "
        f"alarms, {clean:,} clean steps"
    )
    write_report(arguments.report, "stragglers", figures)
    print(json.dumps({"benchmark": "stragglers", **figures}))
    return 0 if passed else 1


def _step(folder: str) -> int:
    return min(flight.step for flight in read_flights(Path(folder), collectives=False))


if __name__ == "__main__":
    sys.exit(main())
