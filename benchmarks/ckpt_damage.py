"""Change the files of checkpoints in thousands of ways: is every change found, by verification and by loads?

    python benchmarks/ckpt_damage.py [--changes 10000] [--json FILE]

One change at a time: bits flipped, bytes lost or added, blocks zeroed, chunks and files swapped, files of other
checkpoints and of other attempts, files removed; in checkpoints of one, three and seventy writers. After each, a full
verification and the load of a random part of every tensor. Exits non-zero if anything wrong is loaded silently. The
last line is JSON.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "faults"))

from damaging import Shelves, damage_many

SHARES = {1: 0.45, 3: 0.45, 70: 0.1}
"""Writers of a checkpoint, and its share of the changes."""


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--changes", type=int, default=10_000)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--json", type=Path, help="keep the report here")
    asked = options.parse_args()
    began, report = time.perf_counter(), {}
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("changes", total=asked.changes)
        for writers, share in SHARES.items():
            told = damage_many(
                Shelves.made(writers),
                round(asked.changes * share),
                asked.seed,
                on_change=lambda: progress.advance(task),
            )
            report[f"{writers} writers"] = asdict(told)
    silent = [line for told in report.values() for line in told["silent"]]
    for line in silent[:20]:
        print(line)
    whole = {"by writers": report, "seconds": round(time.perf_counter() - began, 1), "seed": asked.seed}
    if asked.json:
        asked.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(whole))
    return int(bool(silent))


if __name__ == "__main__":
    sys.exit(main())
