"""Crash a save in every way a disk allows, and kill a process that saves: is wrong data ever loaded, or data lost?

    python benchmarks/ckpt_crashes.py [--states 10000] [--kills 2000] [--folder DIR] [--report FILE]

The model of a crash is that of `tests/faults/crash_states.py`. Kills are SIGKILLs of a real process on a real disk.
Exits non-zero if a state or a kill shows a wrong load or a lost checkpoint. The last line is JSON. Here several writers
are threads whose calls are interleaved at random; `recorded_crashes.py` records real ranks.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from reports import add_report_option, write_report
from rich.console import Console
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "faults"))

from crash_campaign import Tally, explore
from killing import kill_many
from scenarios import Scenario, by_class, by_hand, tried_again


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--states", type=int, default=10_000, help="states of a crashed disk, all different")
    options.add_argument("--kills", type=int, default=2_000, help="SIGKILLs of a process that saves")
    options.add_argument("--folder", type=Path, default=Path(), help="where to save; must be on a real disk")
    options.add_argument("--seed", type=int, default=0)
    add_report_option(options)
    asked = options.parse_args()
    began = time.perf_counter()
    with Progress(console=Console(stderr=True), auto_refresh=False) as progress:  # no thread: children are forks
        tally = _states(asked.states, asked.seed, progress)
        states_took = time.perf_counter() - began
        kills = _kills(asked.kills, asked.folder, asked.seed, progress)
    report = {
        "states": {key: value for key, value in asdict(tally).items() if not key.startswith("_")},
        "states seconds": round(states_took, 1),
        "kills": kills,
        "kills seconds": round(time.perf_counter() - began - states_took, 1),
        "seed": asked.seed,
    }
    for line in tally.wrong[:20]:
        print(line)
    write_report(asked.report, "ckpt_crashes", report)
    print(json.dumps(report))
    return int(bool(tally.wrong) or tally.states < asked.states)


def _states(count: int, seed: int, progress: Progress) -> Tally:
    shared = Path("/dev/shm")
    memory = Path(tempfile.mkdtemp(prefix="danlu-crash-", dir=shared if shared.is_dir() else None))
    task, tally = progress.add_task("states of a crashed disk", total=count), Tally()

    def on_state() -> None:
        progress.advance(task)
        if tally.states % 50 == 0:
            progress.refresh()

    try:
        for number in range(100):
            if tally.states >= count:
                break
            made = _scenarios(memory / str(number), seed + number)
            explore(made, memory, tally, count, a_cut=24, seed=seed + number, on_state=on_state)
    finally:
        shutil.rmtree(memory)
    return tally


def _scenarios(folder: Path, number: int) -> Iterator[Scenario]:
    """A round of all scenarios; in every round the writers' calls are interleaved differently."""
    yield by_class(folder / "class")
    if number % 8 == 0:
        yield by_class(folder / "large", megabytes=4)
    yield from by_hand(folder / "hand", range(10 * number, 10 * number + 4))
    yield from tried_again(folder / "again", every=5, writers=1 + number % 3)


def _kills(count: int, folder: Path, seed: int, progress: Progress) -> dict[str, int]:
    task = progress.add_task("kills", total=count)
    folder.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="danlu-kills-", dir=folder))

    def on_kill() -> None:
        progress.advance(task)
        progress.refresh()

    try:
        return asdict(kill_many(work / "run", work / "staging", count, seed, on_kill))
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    sys.exit(main())
