"""Hangs of real ranks: is the rank that is waited for named, with the cause, and how soon?

    python benchmarks/hangs.py [--hangs 100] [--clean 10000] [--ranks 4] [--report FILE]

Four ranks over gloo take small steps; now and then one of them is stopped by a signal, keeps Python's lock, or waits in
its data, in its storage or in code of its own. Between them, and for so many steps at the end, nothing is wrong, and an
alarm is a false one. Exits non-zero if fewer than 99 of 100 hangs are named right, if one is found later than after two
steps and a second (as long as the watch knows what a step takes: twice the longest quiet time, a second, and two
looks), or at a false alarm. The last line is JSON.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
from reports import add_report_option, write_report
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "multiprocess"))
from hangs import CAUSES, LOOK_SECONDS, Found, HangingRanks

RIGHT_SHARE = 0.99
PACE_STEPS = 30
"""Clean steps between two hangs."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hangs", type=int, default=100)
    parser.add_argument("--clean", type=int, default=10_000, help="clean steps at the end")
    parser.add_argument("--ranks", type=int, default=4)
    add_report_option(parser)
    arguments = parser.parse_args()
    found, false_alarms, clean = measure(arguments.hangs, arguments.clean, arguments.ranks)
    show(found)
    late = [each for each in found if each.seconds > each.deadline + 2 * LOOK_SECONDS + 1]
    right = sum(each.right for each in found)
    passed = right >= RIGHT_SHARE * len(found) and not false_alarms and not late
    delays = [each.seconds for each in found]
    figures = {
        "hangs": len(found),
        "right": right,
        "late": len(late),
        "clean_steps": clean,
        "false_alarms": false_alarms,
        "median_s": float(np.median(delays)),
        "longest_s": max(delays),
        "median_deadline_s": float(np.median([each.deadline for each in found])),
        "by_cause": {
            cause: {
                "hangs": sum(each.cause == cause for each in found),
                "right": sum(each.right for each in found if each.cause == cause),
                "median_s": float(np.median([each.seconds for each in found if each.cause == cause])),
            }
            for cause in dict.fromkeys(each.cause for each in found)
        },
        "passed": passed,
    }
    print(
        f"{'passed' if passed else 'FAILED'}: {right} of {len(found)} named right, {len(late)} late, "
        f"{false_alarms} false alarms in {clean:,} clean steps"
    )
    write_report(arguments.report, "hangs", figures)
    print(json.dumps({"benchmark": "hangs", **figures}))
    return 0 if passed else 1


def measure(hangs: int, clean: int, world: int) -> tuple[list[Found], int, int]:
    """Every hang, how many alarms were false, and in how many clean steps."""
    quiet = not sys.stdout.isatty()
    with tempfile.TemporaryDirectory() as folder:
        ranks = HangingRanks(Path(folder), world)
        found: list[Found] = []
        with ranks.running(seconds=12 * hangs + clean + 600):
            ranks.run_clean(2 * PACE_STEPS)
            for number in track(range(hangs), description="hangs", disable=quiet):
                found.append(ranks.hang(CAUSES[number % len(CAUSES)], number // len(CAUSES) % world))
                ranks.run_clean(PACE_STEPS)
            for _ in track(range(clean // 100), description="clean steps", disable=quiet):
                ranks.run_clean(100)
    return found, ranks.false_alarms, clean // 100 * 100 + (hangs + 2) * PACE_STEPS


def show(found: list[Found]) -> None:
    table = Table(title="Injected hangs")
    for name in ("cause", "hangs", "named right", "found after: median", "longest", "deadline: median"):
        table.add_column(name, justify="left" if name == "cause" else "right")
    for cause in CAUSES:
        some = [each for each in found if each.cause == cause]
        if not some:
            continue
        seconds = [each.seconds for each in some]
        deadline = float(np.median([each.deadline for each in some]))
        table.add_row(
            cause,
            str(len(some)),
            str(sum(each.right for each in some)),
            f"{np.median(seconds):.2f} s",
            f"{max(seconds):.2f} s",
            f"{deadline:.2f} s",
        )
    Console().print(table)
    for each in found:
        if not each.right:
            print(f"wrong: {each}")


if __name__ == "__main__":
    sys.exit(main())
