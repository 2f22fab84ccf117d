"""Predict the held-out runs once, and keep what was predicted.

    python benchmarks/validation/held_out.py     # writes published/held_out_predicted.csv; refuses a second time

The runs were described from their sources and committed before; this file holds the first prediction of each, with the
commit that made it. `validate.py` scores that, whatever it is, and shows what is predicted now beside it.
"""

import csv
import subprocess
import sys
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from validation.published_runs import DATA_DIR, load_held_out

PREDICTED = DATA_DIR / "held_out_predicted.csv"
ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Write the file, once."""
    if PREDICTED.exists():
        print(f"{PREDICTED.name} exists: held-out runs are predicted once; `validate.py` shows both", file=sys.stderr)
        return 1
    changed = _git("status", "--porcelain", "--", "src", "benchmarks")
    if changed:
        print(f"commit first, so that the prediction has a commit:\n{changed}", file=sys.stderr)
        return 1
    commit = _git("rev-parse", "--short=10", "HEAD")
    with PREDICTED.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("id", "seconds", "commit"))
        for run in load_held_out():
            writer.writerow((run.id, f"{run.predict().seconds:.6g}", commit))
    print(f"{len(load_held_out())} runs predicted at {commit}")
    return 0


@cache
def first_predictions() -> dict[str, float]:
    """Seconds of every held-out run as first predicted."""
    with PREDICTED.open(encoding="utf-8", newline="") as file:
        return {row["id"]: float(row["seconds"]) for row in csv.DictReader(file)}


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
