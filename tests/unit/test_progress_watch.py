"""When a run hangs: a deadline that follows the run's own pace."""

import random

import pytest

from danlu.comm.flight_record import RankFlight
from danlu.resilience.progress_watch import FIRST_STEPS, ProgressWatch

TICK = 0.1


def flight(rank: int, collectives: int, step: int, phase: str = "metrics") -> RankFlight:
    return RankFlight(rank, 1, collectives, step, phase, 0.0, 0.0, 0.0, ())


class Run:
    """Ranks that move on every so often, and a watch that looks ten times a second."""

    def __init__(self) -> None:
        self.watch, self.now, self.moves, self.step, self.alarms = ProgressWatch(), 0.0, 0, 0, 0

    def wait(self, seconds: float, phase: str = "metrics") -> float | None:
        """Nothing moves for so long; when it was found to hang, in seconds."""
        found = None
        for tick in range(round(seconds / TICK)):
            self.now += TICK
            self.watch.look(self.now, [flight(rank, self.moves, self.step, phase) for rank in range(2)])
            if found is None and self.watch.is_stalled():
                found, self.alarms = (tick + 1) * TICK, self.alarms + 1
        return found

    def take_steps(self, count: int, seconds: float, phase: str = "metrics") -> None:
        for _ in range(count):
            self.moves += 1
            self.step += 1
            self.wait(seconds, phase)


def test_ten_thousand_steps_of_changing_length_are_no_hang() -> None:
    run, random_ = Run(), random.Random(0)
    for _ in range(10_000):
        run.take_steps(1, random_.choice([0.3, 0.4, 0.5, 0.6, 0.6, 0.9]))
    assert run.alarms == 0


def test_a_hang_is_found_within_two_steps_and_a_second() -> None:
    run = Run()
    run.take_steps(20, seconds=2.0)
    found = run.wait(20.0)
    assert found is not None
    assert found <= 2 * 2.0 + 1 + 3 * TICK


def test_nothing_is_said_before_the_pace_is_known() -> None:
    run = Run()
    run.take_steps(FIRST_STEPS, seconds=0.5)
    assert run.watch.deadline is None
    assert run.wait(1000.0) is None  # the first steps compile


def test_a_rare_phase_has_a_minute() -> None:
    run = Run()
    run.take_steps(20, seconds=0.5)
    assert run.wait(30.0, "evaluating") is None
    found = run.wait(60.0, "evaluating")
    assert found is not None


def test_nothing_is_learned_from_a_hang_that_was_told() -> None:
    run = Run()
    run.take_steps(20, seconds=0.5)
    before = run.watch.deadline
    assert run.wait(10.0) is not None
    run.watch.reported = True
    run.take_steps(3, seconds=0.5)
    assert run.watch.deadline == pytest.approx(before)


def test_a_slow_step_that_was_not_told_is_the_new_pace() -> None:
    run = Run()
    run.take_steps(20, seconds=0.5)
    run.wait(10.0)
    run.take_steps(3, seconds=0.5)
    assert run.watch.deadline is not None
    assert run.watch.deadline > 20


def test_a_pause_of_the_watcher_itself_is_not_counted() -> None:
    run = Run()
    run.take_steps(20, seconds=0.5)
    run.now += 3600
    assert run.wait(0.5) is None


def test_a_rank_that_computes_gets_longer() -> None:
    run = Run()
    run.take_steps(20, seconds=0.5)
    run.wait(3.0)
    assert run.watch.is_stalled()
    assert not run.watch.is_stalled(busy=True)
    run.wait(20.0)
    assert run.watch.is_stalled(busy=True)
