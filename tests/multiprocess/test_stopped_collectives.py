"""Who is stopped in the middle of a collective is named by what the ranks recorded, whatever carries it."""

import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import run_ranks
from stopped_collective_rank import CALLS

from danlu.comm.flight_record import flight_folder
from danlu.resilience.diagnosis import Diagnosis, diagnose
from danlu.resilience.host_watch import moves_within, view_ranks

RANKS = 4
QUIET_SECONDS = 0.25
"""Nobody has moved for so long: who can has come to where it waits."""
ATTEMPTS = 40
"""To meet the call that is asked for, and not the one by which ranks agree on when to end."""
SHORT = ("broadcast", "barrier")
"""A rank may be stopped before it has come: those in which one waits for the others are over at once."""
GROUPS = {"one host": (4, ("memory", "library")), "two hosts": (2, ("levels", "library"))}
"""Ranks on a host, and by what collectives go."""


class StoppingRanks:
    """Ranks that run every collective of a list, and a fault in each."""

    def __init__(self, folder: Path, each: int, cases: list[tuple[str, str]]) -> None:
        self.folder, self.cases, self.dice = folder, cases, random.Random(3)
        self.failure: BaseException | None = None
        arguments = (str(folder), str(each), json.dumps(cases))
        script = Path(__file__).with_name("stopped_collective_rank.py")
        self.thread = threading.Thread(target=self._run, args=(script, arguments))
        self.thread.start()

    def _run(self, script: Path, arguments: tuple[str, ...]) -> None:
        try:
            run_ranks(script, RANKS, *arguments, seconds=900)
        except BaseException as error:
            self.failure = error

    def wait_for(self, number: int) -> None:
        """Until a case runs."""
        while not self._runs(number):
            assert self.failure is None, self.failure
            time.sleep(0.02)

    def _runs(self, number: int) -> bool:
        file = self.folder / "running"
        return file.exists() and int(file.read_text()) >= number and len(view_ranks(self.folder)) == RANKS

    def stop_one(self, call: str) -> tuple[int, Diagnosis]:
        """Stop any rank at any moment until that is in the middle of a call; who it was, and what is said."""
        operation = "all_to_all" if "all_to_all" in call else call
        for _ in range(ATTEMPTS):
            time.sleep(self.dice.uniform(0.0, 0.05))
            victim = self.dice.randrange(RANKS)
            process = view_ranks(self.folder)[victim].flight.pid
            os.kill(process, signal.SIGSTOP)
            try:
                while moves_within(self.folder, QUIET_SECONDS):
                    pass
                views = view_ranks(self.folder)
            finally:
                os.kill(process, signal.SIGCONT)
            found = diagnose(views)
            there = found.collective
            if there is None or there.axes != "world" or there.operation != operation:
                continue
            entered = any(
                (record.group, record.sequence) == (there.group, there.sequence)
                for record in views[victim].flight.records
            )
            if entered or call in SHORT:
                return victim, found
        raise AssertionError(f"no rank was stopped during {call} in {ATTEMPTS} attempts")

    def finish(self) -> None:
        """End all that still run."""
        for number in range(len(self.cases)):
            (self.folder / f"over-{number}").touch()
        self.thread.join()


@pytest.fixture
def ranks(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoppingRanks]:
    ranks = StoppingRanks(tmp_path, *request.param)
    yield ranks
    ranks.finish()
    for file in flight_folder(tmp_path).iterdir():
        file.unlink()
    flight_folder(tmp_path).rmdir()
    assert ranks.failure is None, ranks.failure


def _groups() -> Iterator[object]:
    for name, (each, algorithms) in GROUPS.items():
        for algorithm in algorithms:
            cases = [(algorithm, call) for call in CALLS]
            marks = () if algorithm == "levels" else pytest.mark.full  # which inside of a host go through its memory
            yield pytest.param((each, cases), id=f"{name}, {algorithm}", marks=marks)


@pytest.mark.parametrize("ranks", [*_groups()], indirect=True)
def test_who_was_stopped_in_a_collective_is_named(ranks: StoppingRanks) -> None:
    for number, (_, call) in enumerate(ranks.cases):
        ranks.wait_for(number)
        victim, found = ranks.stop_one(call)
        assert [(culprit.rank, culprit.cause) for culprit in found.culprits] == [(victim, "stopped")], call
        assert found.waiting and victim not in found.waiting, call
        (ranks.folder / f"over-{number}").touch()
