"""Saves of real ranks, recorded: `Checkpoints` in processes of their own that talk over gloo, on one disk."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from fuse_mount import served
from history import read_log
from made_checkpoints import content
from ranks import run_ranks
from saving_rank import NO_ATTEMPT, STEPS
from scenarios import Scenario


def by_ranks(folder: Path, world: int, parities: tuple[int, ...], seed: int = 0) -> Iterator[Scenario]:
    """Start `world` ranks once, and let them save on a disk for each of `parities`, in an order drawn by lot."""
    names = [(f"{seed}-{number}", parity) for number, parity in enumerate(parities)]
    with ExitStack() as disks:
        for name, _ in names:
            for part in ("source", "disk"):
                (folder / name / part).mkdir(parents=True)
            source, disk, log = (folder / name / part for part in ("source", "disk", "log"))
            disks.enter_context(served("recording_fs.py", source, disk, str(log)))
        (folder / "scenarios.json").write_text(json.dumps(names))
        run_ranks(Path(__file__).with_name("saving_rank.py"), world, str(folder), seconds=900)
    for name, parity in names:
        history = read_log(folder / name / "log", folder / name / "source")
        scenario = Scenario(f"{world} ranks, parity {parity}, order {name}", history)
        attempts = json.loads((folder / name / "attempts.json").read_text())
        scenario.saved = {(step, attempts[str(step)]): content(step, NO_ATTEMPT) for step in STEPS}
        yield scenario
