"""Crash real ranks that save together, data builds and a run's dataset version log in every way a disk allows.

    python benchmarks/recorded_crashes.py [--rank-states 2000] [--data-states 5000] [--report FILE]

Every call is recorded by our own file system (FUSE), as the kernel saw it, from the real code: two to four processes
with `CheckpointEngine` over gloo; builds, appends, builds that replace, that are killed and restarted; a run that
applies an append. The model of a crash is that of `tests/faults/crash_states.py`. Exits non-zero if a state shows a
wrong load, a lost checkpoint, a wrong token or a lost record. The last line is JSON.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from reports import add_report_option, write_report
from rich.console import Console
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "faults"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "multiprocess"))

from crash_campaign import Tally, explore
from data_crashes import DataTally, data_scenarios, explore_data
from rank_crashes import by_ranks


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--rank-states", type=int, default=2_000, help="states of a disk on which ranks save")
    options.add_argument("--data-states", type=int, default=5_000, help="states of a disk with data sets and promises")
    options.add_argument("--seed", type=int, default=0)
    add_report_option(options)
    asked = options.parse_args()
    shared, began = Path("/dev/shm"), time.perf_counter()
    memory = Path(tempfile.mkdtemp(prefix="danlu-crash-", dir=shared if shared.is_dir() else None))
    try:
        with Progress(console=Console(stderr=True)) as progress:
            ranks = _ranks(memory, asked.rank_states, asked.seed, progress)
            data = _data(memory, asked.data_states, asked.seed, progress)
    finally:
        shutil.rmtree(memory)
    figures = {
        "ranks": _told(ranks),
        "data": _told(data),
        "seconds": round(time.perf_counter() - began, 1),
        "seed": asked.seed,
    }
    for line in (*ranks.wrong, *data.wrong)[:20]:
        print(line)
    write_report(asked.report, "recorded_crashes", figures)
    print(json.dumps(figures))
    return int(bool(ranks.wrong or data.wrong))


def _ranks(memory: Path, count: int, seed: int, progress: Progress) -> Tally:
    """Rounds of two, three and four ranks, without and with parity, until there are enough states."""
    task, tally, round_ = progress.add_task("real ranks", total=count), Tally(), 0
    while tally.states < count:
        made = by_ranks(memory / f"ranks-{round_}", 2 + round_ % 3, (0, 1), seed + round_)
        explore(made, memory, tally, count, 6, seed + round_, lambda: progress.advance(task), spread=True)
        round_ += 1
    return tally


def _data(memory: Path, count: int, seed: int, progress: Progress) -> DataTally:
    """Rounds of all scenarios; in each, appends are killed at other calls, and other states are drawn."""
    task, tally, round_ = progress.add_task("data and promises", total=count), DataTally(), 0
    while tally.states < count:
        made = data_scenarios(memory / f"data-{round_}", range(5 + round_, 60, 11))
        explore_data(made, memory, tally, 3, 8, seed + round_, lambda: progress.advance(task))
        round_ += 1
    return tally


def _told(tally: Tally | DataTally) -> dict[str, Any]:
    return {key: value for key, value in asdict(tally).items() if not key.startswith("_")}


if __name__ == "__main__":
    sys.exit(main())
