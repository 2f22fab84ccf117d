"""Corrupt the files of checkpoints in thousands of ways: is every change found, and repaired if parity allows?

    python benchmarks/ckpt_damage.py [--changes 10000] [--report FILE]

One change at a time: bits flipped, bytes lost or added, blocks zeroed, chunks and files swapped, files of other
checkpoints and of other attempts, files removed; in checkpoints of one, three and seventy writers, half of them with
two parity blocks for every eight packs. After each, a full verification, the load of a random slice of every tensor,
and with parity a repair, after which every file must be byte for byte as before. Exits non-zero if a change is not
found, wrong data is loaded, or a repair writes something else. The last line is JSON.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from reports import add_report_option, write_report
from rich.console import Console
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "faults"))

from damaging import Shelves, damage_many

from danlu.storage.checkpoint.repair import repair

SHARES = {(1, 0): 0.2, (3, 0): 0.2, (70, 0): 0.1, (1, 2): 0.2, (3, 2): 0.2, (70, 2): 0.1}
"""Writers and parity of a checkpoint, and its share of the changes."""


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--changes", type=int, default=10_000)
    options.add_argument("--seed", type=int, default=0)
    add_report_option(options)
    asked = options.parse_args()
    began, report = time.perf_counter(), {}
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("changes", total=asked.changes)
        for (writers, parity), share in SHARES.items():
            told = damage_many(
                Shelves.made(writers, parity),
                round(asked.changes * share),
                asked.seed,
                repair=repair if parity else None,
                on_change=lambda: progress.advance(task),
            )
            report[f"{writers} writers, parity {parity}"] = asdict(told)
    silent = [line for told in report.values() for line in told["silent"]]
    for line in silent[:20]:
        print(line)
    whole = {"by writers": report, "seconds": round(time.perf_counter() - began, 1), "seed": asked.seed}
    write_report(asked.report, "ckpt_damage", whole)
    print(json.dumps(whole))
    return int(bool(silent))


if __name__ == "__main__":
    sys.exit(main())
