"""Plant faults in copies of this tree, one at a time, and check whether the tests catch them.

    python benchmarks/mutations.py                      # every fault of benchmarks/planted
    python benchmarks/mutations.py --only "NaN"         # those whose name contains the text; may be repeated
    python benchmarks/mutations.py --room storage       # those of one file of benchmarks/planted
    python benchmarks/mutations.py --quick --tested     # a sample, for CI: its tests have passed just before
    python benchmarks/mutations.py --list               # names and tests, nothing runs
    python benchmarks/mutations.py --write              # also docs/planted-faults.md and its report, row by row
    python benchmarks/mutations.py --write --minutes 60 # for an hour, those that most need it; others keep their rows

A fault is an edit that a tired engineer could make, with the smallest selection of tests that must fail on it. The same
selection first has to pass without the fault. Exits with 1 unless every fault was caught.
"""

import argparse
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from math import inf
from pathlib import Path

from planted_campaign import Campaign
from planted_faults import Fault, Outcome, baseline, load_faults, run_fault
from reports import commit
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "planted-faults.md"
REPORT = ROOT / "docs" / "reports" / "mutations.json"


def main() -> int:
    """Plant the requested faults and print what caught them."""
    arguments = _arguments()
    every_fault = load_faults(ROOT)
    faults = _chosen(every_fault, arguments)
    if not faults:
        print("no fault has such a name; --list shows them all", file=sys.stderr)
        return 2
    if arguments.list:
        for fault in faults:
            print(f"{fault.room:12} {fault.name}\n{'':12} {fault.check}")
        return 0
    campaign = Campaign(every_fault, REPORT, PAGE, commit()) if arguments.write else None
    if campaign:
        faults = [fault for fault in campaign.order(ROOT) if fault in faults]
    outcomes = []
    for outcome in _plant(faults, arguments.jobs, Baselines(arguments.tested), arguments.minutes * 60):
        outcomes.append(outcome)
        if campaign:
            campaign.record(outcome)
    _show(outcomes)
    lived = sum(not outcome.caught for outcome in outcomes)
    print(f"{len(outcomes) - lived} of {len(outcomes)} planted faults were caught")
    if waiting := len(faults) - len(outcomes):
        print(f"{waiting} were not planted in {arguments.minutes:g} minutes")
    return 1 if lived else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="faults whose name holds it")
    parser.add_argument("--room", action="append", default=[], help="faults of one file of benchmarks/planted")
    parser.add_argument("--quick", action="store_true", help="the faults marked `quick`")
    parser.add_argument("--jobs", type=int, default=2, help="copies at work at the same time")
    parser.add_argument("--list", action="store_true", help="show the faults, run nothing")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name} and its report, from a clean commit")
    parser.add_argument("--minutes", type=float, default=inf, help="begin no further fault after so many minutes")
    parser.add_argument("--tested", action="store_true", help="the tests have just passed here: do not run them first")
    arguments = parser.parse_args()
    if arguments.write and arguments.tested:
        parser.error("--write is for faults whose tests were seen to pass without them: leave --tested out")
    if arguments.write and not arguments.list and commit().endswith("+changes"):
        parser.error("--write needs a tree without changes: a row names the commit that a fault was planted at")
    return arguments


def _chosen(faults: list[Fault], arguments: argparse.Namespace) -> list[Fault]:
    return [
        fault
        for fault in faults
        if (not arguments.only or any(text.lower() in fault.name.lower() for text in arguments.only))
        and (not arguments.room or fault.room in arguments.room)
        and (not arguments.quick or fault.quick)
    ]


class Baselines:
    """What is wrong with a check without any fault, found once for all its faults."""

    def __init__(self, tested: bool) -> None:
        self._tested = tested
        self._lock = threading.Lock()
        self._found: dict[str, Future[str]] = {}

    def of(self, check: str) -> str:
        """The test that fails without a fault; nothing if the check passes."""
        if self._tested:
            return ""
        with self._lock:
            first = check not in self._found
            found = self._found.setdefault(check, Future())
        if first:
            try:
                found.set_result(baseline(ROOT, check))
            except BaseException as error:  # to all who wait for it
                found.set_exception(error)
        return found.result()


def _plant(faults: list[Fault], jobs: int, baselines: Baselines, seconds: float) -> Iterator[Outcome]:
    """Every fault as its tests end, but those that were not begun within so many seconds."""
    deadline = time.monotonic() + seconds

    def run(fault: Fault) -> Outcome | None:
        return None if time.monotonic() > deadline else run_fault(ROOT, fault, baselines.of(fault.check))

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, disable=not sys.stdout.isatty()) as progress, ThreadPoolExecutor(jobs) as pool:
        task = progress.add_task("planted faults", total=len(faults))
        for number, future in enumerate(as_completed([pool.submit(run, fault) for fault in faults]), 1):
            progress.advance(task)
            if outcome := future.result():
                _line(f"{number}/{len(faults)} {outcome.fault.name}: {outcome.witness}")
                yield outcome


def _line(text: str) -> None:
    """Progress where there is no terminal to draw a bar on."""
    if not sys.stdout.isatty():
        print(text, flush=True)


def _show(outcomes: list[Outcome]) -> None:
    table = Table(title="Planted faults, and the test that caught each")
    table.add_column("room")
    table.add_column("fault", ratio=2)
    table.add_column("caught by", ratio=2)
    table.add_column("seconds", justify="right")
    for o in outcomes:
        witness = escape(o.witness) if o.caught else f"[bold red]{escape(o.witness)}[/]"
        table.add_row(o.fault.room, escape(o.fault.name), witness, f"{o.seconds:.1f}")
    Console(width=None if sys.stdout.isatty() else 160).print(table)


if __name__ == "__main__":
    sys.exit(main())
