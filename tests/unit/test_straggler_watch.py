"""Who is slow: ranks that wait for one another, looked at again and again."""

from collections.abc import Mapping
from random import Random

import pytest

from danlu.comm.flight_record import CollectiveRecord, RankFlight
from danlu.resilience.describe import describe_slow_rank
from danlu.resilience.diagnosis import RankView
from danlu.resilience.process_state import ProcessState
from danlu.resilience.straggler_watch import SlowRank, StragglerWatch

WORLD = 4
LOOKS = 300
FORWARD = "forward and backward"


def view(rank: int, late: bool, *, runs: bool = False, phase: str = FORWARD, stages: int = 1) -> RankView:
    """A rank in the second collective of all, or in what comes before it."""
    members = tuple(range(WORLD))
    records = [
        CollectiveRecord("all_reduce", "0", "world", members, 1 if late else 2, 8, 1.0, 1.0 if late else None, None)
    ]
    if stages > 1:
        line = tuple(range(rank % (WORLD // stages), WORLD, WORLD // stages))
        records.append(CollectiveRecord("all_reduce", f"pp{line[0]}", "pp", line, 1, 8, 0.0, 0.5, None))
    flight = RankFlight(rank, 100 + rank, 2, 5, phase, 0.0, 0.0, 0.0, tuple(records))
    return RankView(flight, ProcessState(alive=True, runnable=runs or late), 0.0)


def watch(shares: Mapping[int, float], looks: int = LOOKS, **values: object) -> list[SlowRank]:
    """What is found if ranks are waited for in these shares of the looks, one at a time."""
    random, watched, found = Random(1), StragglerWatch(LOOKS), []
    for _ in range(looks):
        late = random.choices([*shares, None], [*shares.values(), 1 - sum(shares.values())])[0]
        found += watched.look({rank: view(rank, rank == late, **values) for rank in range(WORLD)})  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("rank", range(WORLD))
def test_a_rank_that_costs_a_sixth_of_the_time_is_told_once(rank: int) -> None:
    found = watch({rank: 1 / 6}, 4 * LOOKS)
    assert [each.rank for each in found] == [rank]
    assert found[0].share == pytest.approx(1 / 6, abs=0.08)
    assert found[0].phase == FORWARD


def test_all_are_waited_for_now_and_then() -> None:
    assert not watch(dict.fromkeys(range(WORLD), 0.2), 20 * LOOKS)


def test_a_little_late_is_not_slow() -> None:
    assert not watch({2: 0.03}, 20 * LOOKS)


def test_who_has_a_core_does_not_wait() -> None:
    """Collectives are begun ahead of time: that others have not entered them yet costs nothing while one computes."""
    assert not watch({2: 0.5}, runs=True)


def test_saves_are_not_counted() -> None:
    assert not watch({2: 0.5}, phase="saving")


def test_a_heavier_stage_of_a_pipeline_is_not_a_slow_rank() -> None:
    assert not watch({2: 0.25, 3: 0.25}, stages=2)
    assert [each.rank for each in watch({2: 0.3, 3: 0.05}, stages=2)] == [2]
    assert not watch({3: 0.5}, stages=WORLD)


def test_it_is_told_again_after_it_kept_up() -> None:
    watched, found = StragglerWatch(LOOKS), []
    for look in range(6 * LOOKS):
        late = look // LOOKS % 3 == 0
        found += watched.look({rank: view(rank, rank == 1 and late) for rank in range(WORLD)})
    assert [each.rank for each in found] == [1, 1]


def test_ranks_may_end_one_after_the_other() -> None:
    watched = StragglerWatch(LOOKS)
    for world in range(WORLD, 0, -1):
        for _ in range(LOOKS):
            assert not watched.look({rank: view(rank, late=False) for rank in range(world)})


def test_in_words() -> None:
    told = describe_slow_rank(SlowRank(3, 0.172, "reading data"))
    assert "rank 3 is slow: the other ranks spend 17% of their time waiting for it" in told
    assert "while it reads its data" in told
