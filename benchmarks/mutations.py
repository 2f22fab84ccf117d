"""Plant faults in copies of this tree, one at a time, and check whether the tests catch them.

    python benchmarks/mutations.py                      # every fault of benchmarks/planted
    python benchmarks/mutations.py --only "NaN"         # those whose name contains the text; may be repeated
    python benchmarks/mutations.py --room storage       # those of one file of benchmarks/planted
    python benchmarks/mutations.py --quick --tested     # a sample, for CI: its tests have passed just before
    python benchmarks/mutations.py --list               # names and tests, nothing runs
    python benchmarks/mutations.py --write              # all, and docs/planted-faults.md with its report
    python benchmarks/mutations.py --write --resume     # the same, and what was caught at this commit is not run again

A fault is an edit that a tired engineer could make, with the smallest selection of tests that must fail on it. The same
selection first has to pass without the fault. Exits with 1 unless every fault was caught.
"""

import argparse
import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from planted_faults import Fault, Outcome, baseline, load_faults, run_fault
from reports import commit, write_report
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
    faults = _chosen(load_faults(ROOT), arguments)
    if not faults:
        print("no fault has such a name; --list shows them all", file=sys.stderr)
        return 2
    if arguments.list:
        for fault in faults:
            print(f"{fault.room:12} {fault.name}\n{'':12} {fault.check}")
        return 0
    outcomes = _plant(faults, arguments.jobs, Journal(arguments.resume, arguments.tested))
    _show(outcomes)
    lived = [outcome for outcome in outcomes if not outcome.caught]
    figures = {
        "faults": len(outcomes),
        "caught": len(outcomes) - len(lived),
        "rooms": len({outcome.fault.room for outcome in outcomes}),
        "rows": [
            {"room": o.fault.room, "fault": o.fault.name, "caught_by": o.witness, "seconds": round(o.seconds, 1)}
            for o in outcomes
        ],
    }
    if arguments.write:
        PAGE.write_text(_page(outcomes))
        write_report(REPORT, "mutations", figures)
    print(f"{figures['caught']} of {figures['faults']} planted faults were caught")
    return 1 if lived else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="faults whose name holds it")
    parser.add_argument("--room", action="append", default=[], help="faults of one file of benchmarks/planted")
    parser.add_argument("--quick", action="store_true", help="the faults marked `quick`")
    parser.add_argument("--jobs", type=int, default=2, help="copies at work at the same time")
    parser.add_argument("--list", action="store_true", help="show the faults, run nothing")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name} and its report; all faults only")
    parser.add_argument("--resume", action="store_true", help="take over what a run at this same commit has found")
    parser.add_argument("--tested", action="store_true", help="the tests have just passed here: do not run them first")
    arguments = parser.parse_args()
    if arguments.write and (arguments.only or arguments.room or arguments.quick or arguments.list or arguments.tested):
        parser.error("--write is for all faults: leave --only, --room, --quick, --list and --tested out")
    return arguments


def _chosen(faults: list[Fault], arguments: argparse.Namespace) -> list[Fault]:
    return [
        fault
        for fault in faults
        if (not arguments.only or any(text.lower() in fault.name.lower() for text in arguments.only))
        and (not arguments.room or fault.room in arguments.room)
        and (not arguments.quick or fault.quick)
    ]


class Journal:
    """What was found at one commit, kept line by line, so that hours of work survive an interruption.

    Only good news is taken over: a check that failed or a fault that lived is run again. A tree with changes has none.
    """

    def __init__(self, resume: bool, tested: bool) -> None:
        self._tested = tested
        self._path = None if commit().endswith("+changes") else ROOT / ".planted" / f"{commit()}.jsonl"
        self._lock = threading.Lock()
        self._known: dict[str, tuple[str, float]] = {}
        if resume and self._path is None:
            raise SystemExit("--resume needs a tree without changes: what was found elsewhere may not hold here")
        if resume and self._path is not None and self._path.exists():
            for line in self._path.read_text().splitlines():
                entry = json.loads(line)
                self._known[entry["of"]] = (entry["witness"], entry["seconds"])

    def baseline(self, check: str) -> str:
        """What is wrong with a check without any fault; nothing if it passes."""
        key = f"check: {check}"
        if self._tested or key in self._known:
            return ""
        if not (unhealthy := baseline(ROOT, check)):
            self._keep(key, "", 0.0)
        return unhealthy

    def outcome(self, fault: Fault, unhealthy: str) -> Outcome:
        """Of planting one fault."""
        key = f"fault: {fault.room}: {fault.name}"
        if key in self._known:
            return Outcome(fault, True, *self._known[key])
        outcome = run_fault(ROOT, fault, unhealthy)
        if outcome.caught:
            self._keep(key, outcome.witness, outcome.seconds)
        return outcome

    def _keep(self, key: str, witness: str, seconds: float) -> None:
        if self._path is None:
            return
        with self._lock:
            self._path.parent.mkdir(exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps({"of": key, "witness": witness, "seconds": seconds}) + "\n")


def _plant(faults: list[Fault], jobs: int, journal: Journal) -> list[Outcome]:
    """Every check without a fault once, then every fault; in their order."""
    checks = list(dict.fromkeys(fault.check for fault in faults))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, disable=not sys.stdout.isatty()) as progress, ThreadPoolExecutor(jobs) as pool:
        task = progress.add_task("without a fault", total=len(checks))
        healthy = {}
        for check, passed in zip(checks, pool.map(journal.baseline, checks), strict=True):
            healthy[check] = passed
            progress.advance(task)
            _line(f"{len(healthy)}/{len(checks)} {check}: {passed or 'passes'}")
        task = progress.add_task("planted faults", total=len(faults))
        outcomes = []
        for outcome in pool.map(lambda fault: journal.outcome(fault, healthy[fault.check]), faults):
            outcomes.append(outcome)
            progress.advance(task)
            _line(f"{len(outcomes)}/{len(faults)} {outcome.fault.name}: {outcome.witness}")
    return outcomes


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


def _page(outcomes: list[Outcome]) -> str:
    rows = "\n".join(
        f"| {o.fault.room} | {_cell(o.fault.name)} | {'`' + _cell(o.witness) + '`' if o.caught else '**lived**'} |"
        for o in outcomes
    )
    caught = sum(o.caught for o in outcomes)
    return f"""# Planted faults

A test is worth what it notices. Each row is an edit that a tired engineer could make, planted in a copy of the tree;
the same tests pass without it. {caught} of {len(outcomes)} were caught. Made by

    python benchmarks/mutations.py --write

The edits are in `benchmarks/planted`, one file a room. Whoever adds a promise adds its fault there; `--only` plants
some of them by name, and CI plants a sample.

| room | fault | caught by |
|---|---|---|
{rows}
"""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
