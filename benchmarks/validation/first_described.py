"""How held-out runs were described when they were first committed, from the history of this repository.

    python benchmarks/validation/first_described.py           # writes published/first_described.csv
    python benchmarks/validation/first_described.py --check   # exits with 1 if the file is not what the history says

A line for every value of a held-out row that is not today's: the row, the column, the first value and the commit that
first had the row. `*` means all rows: a column that the table did not have then. `validate.py` scores the runs
as they are described now, with the first values, and with the first values and without the columns added since.
"""

import argparse
import csv
import io
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = "benchmarks/validation/published/runs.csv"
OLD_TABLE = "src/danlu/cost/published/runs.csv"
"""Where the table was when its rows were first committed."""
FIRST = ROOT / "benchmarks/validation/published/first_described.csv"
COLUMNS = ("id", "column", "first", "commit")
PROSE = ("source", "assumed")
"""Columns that no prediction reads."""


def main() -> int:
    """Write the file, or compare it with the history."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    text = _text(changes())
    if parser.parse_args().check:
        same = FIRST.read_text(encoding="utf-8") == text
        print("the file is what the history says" if same else f"{FIRST} is not what the history says: run this again")
        return 0 if same else 1
    FIRST.write_text(text, encoding="utf-8")
    print(f"{text.count(chr(10)) - 1} values of held-out rows are not as first committed")
    return 0


def changes() -> list[tuple[str, str, str, str]]:
    """Every value of a held-out row that is not as first committed."""
    first: dict[str, tuple[dict[str, str], str]] = {}
    for path in (OLD_TABLE, TABLE):
        # a commit that removes the table does not have it
        for commit in _git("log", "--reverse", "--diff-filter=AM", "--format=%h", "--abbrev=10", "--", path).split():
            for row in _rows(_git("show", f"{commit}:{path}")):
                if not row["set"].startswith("fit-"):
                    first.setdefault(row["id"], (row, commit))
    found, added = [], {}
    for row in _rows((ROOT / TABLE).read_text(encoding="utf-8")):
        if row["id"] in first and not row["set"].startswith("fit-"):
            then, commit = first[row["id"]]
            for column, now in row.items():
                if column not in then:
                    added[column] = commit
                elif column not in PROSE and then[column] != now:
                    found.append((row["id"], column, then[column], commit))
    return [*(("*", column, "", commit) for column, commit in added.items()), *found]


def _rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline="")))


def _text(found: list[tuple[str, str, str, str]]) -> str:
    written = io.StringIO(newline="")
    writer = csv.writer(written, lineterminator="\n")
    writer.writerows([COLUMNS, *found])
    return written.getvalue()


def _git(*arguments: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
