"""What is known of every planted fault: what caught it, and at which commit it was planted last.

A campaign over all of them takes hours, so it may be run in parts, on several days and commits: every fault has a row
of its own, and those that most need it are planted first.
"""

import hashlib
import json
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from planted_faults import Fault, Outcome
from reports import write_report

Row = dict[str, Any]
Changed = Callable[[str], set[str] | None]
"""Files that differ from a commit; None if it is not known."""


class Campaign:
    """The rows of a report, one a fault; `record` replaces a row and writes report and page at once."""

    def __init__(self, faults: list[Fault], report: Path, page: Path, commit: str) -> None:
        self._faults, self._report, self._page, self._commit = faults, report, page, commit
        known = json.loads(report.read_text("utf-8"))["figures"]["rows"] if report.exists() else []
        current = {(fault.room, fault.name): definition(fault) for fault in faults}
        self._rows: dict[tuple[str, str], Row] = {
            key: row for row in known if current.get(key := (row["room"], row["fault"])) == row["definition"]
        }

    def order(self, root: Path) -> list[Fault]:
        """All faults, those that most need it first."""
        return by_need(self._faults, self._rows, cache(lambda commit: changed_since(root, commit)))

    def record(self, outcome: Outcome) -> None:
        """Keep what became of a fault: an interruption loses nothing."""
        fault = outcome.fault
        self._rows[fault.room, fault.name] = {
            "room": fault.room,
            "fault": fault.name,
            "definition": definition(fault),
            "caught_by": outcome.witness if outcome.caught else None,
            "lived": None if outcome.caught else outcome.witness,
            "seconds": round(outcome.seconds, 1),
            "commit": self._commit,
            "date": datetime.now(UTC).date().isoformat(),
        }
        write_report(self._report, "mutations", self.figures(), "python benchmarks/mutations.py --write")
        self._page.write_text(page(self._faults, self._rows, self.figures()))

    def figures(self) -> dict[str, Any]:
        """Counts, and the rows in the order of the faults."""
        rows = [row for fault in self._faults if (row := self._rows.get((fault.room, fault.name)))]
        return {
            "faults": len(self._faults),
            "planted": len(rows),
            "caught": sum(row["caught_by"] is not None for row in rows),
            "rooms": len({row["room"] for row in rows}),
            "commits": len({row["commit"] for row in rows}),
            "oldest": min((row["date"] for row in rows), default=None),
            "rows": rows,
        }


def definition(fault: Fault) -> str:
    """A hash of a fault's check and edits: one that was edited has not been planted yet."""
    text = json.dumps([fault.check, [asdict(edit) for edit in fault.edits]])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def by_need(faults: Iterable[Fault], rows: dict[tuple[str, str], Row], changed: Changed) -> list[Fault]:
    """Those never planted or not caught; then those whose code or tests have changed since; then the oldest."""

    def need(fault: Fault) -> tuple[int, str]:
        row = rows.get((fault.room, fault.name))
        if row is None or row["caught_by"] is None:
            return 0, ""
        files = changed(row["commit"])
        named = {edit.file for edit in fault.edits} | {word.partition("::")[0] for word in fault.check.split()}
        return 1 if files is None or files & named else 2, row["date"]

    return sorted(faults, key=need)


def changed_since(root: Path, commit: str) -> set[str] | None:
    """Files that differ between a commit and this tree; None if git does not know the commit."""
    found = subprocess.run(["git", "-C", str(root), "diff", "--name-only", commit], capture_output=True, text=True)
    return set(found.stdout.splitlines()) if found.returncode == 0 else None


def page(faults: list[Fault], rows: dict[tuple[str, str], Row], figures: dict[str, Any]) -> str:
    """The page of all faults."""
    lines = "\n".join(
        f"| {fault.room} | {_cell(fault.name)} | {_result(rows.get((fault.room, fault.name)))} |" for fault in faults
    )
    return f"""# Planted faults

A test is worth what it notices. Each row is an edit that a tired engineer could make, planted in a copy of the tree;
the same tests pass without it. {figures["planted"]} of {figures["faults"]} faults have been planted as they are now,
and {figures["caught"]} were caught, each at the commit in its row. Made by

    python benchmarks/mutations.py --write --minutes 60

which begins with those that were never planted, were not caught, or whose code or tests have changed since.

The edits are in `benchmarks/planted`, one file a room. Whoever adds a promise adds its fault there; `--only` plants
some of them by name, and CI plants a sample.

| room | fault | caught by | planted |
|---|---|---|---|
{lines}
"""


def _result(row: Row | None) -> str:
    if row is None:
        return "not planted yet | "
    found = f"`{_cell(row['caught_by'])}`" if row["caught_by"] else f"**lived**: {_cell(row['lived'])}"
    return f"{found} | {row['date']}, `{row['commit'][:8]}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
