"""Who is to blame: ranks that run the same program, one of which stops at any point, and the verdict about it."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from danlu.comm.flight_record import CollectiveRecord, RankFlight
from danlu.resilience.describe import describe_diagnosis
from danlu.resilience.diagnosis import RankView, diagnose
from danlu.resilience.process_state import ProcessState

ALIVE = ProcessState(alive=True)
WORLD = 8
GROUPS = {
    "world": tuple(range(WORLD)),
    **{f"tp{number}": (2 * number, 2 * number + 1) for number in range(WORLD // 2)},
    **{f"dp{number}": tuple(range(number, WORLD, 2)) for number in range(2)},
}


def record(group: str, sequence: int, left: float | None = None, **values: Any) -> CollectiveRecord:
    made = {"operation": "all_reduce", "axes": group[:2], "size": 8, "entered": float(sequence), "peer": None}
    return CollectiveRecord(group=group, sequence=sequence, left=left, members=GROUPS[group], **(made | values))


def view(
    rank: int, records: Sequence[CollectiveRecord], process: ProcessState = ALIVE, silent: float = 0.0, phase: str = ""
) -> RankView:
    flight = RankFlight(rank, 100 + rank, len(records), 5, phase, 0.0, 0.0, 0.0, tuple(records))
    return RankView(flight, process, silent)


def play(program: Sequence[str], stuck: int, at: int) -> dict[int, RankView]:
    """Ranks run a program of collectives of all groups of a kind; one stops before number `at` of its own."""
    views: dict[int, list[CollectiveRecord]] = {rank: [] for rank in range(WORLD)}
    position = dict.fromkeys(range(WORLD), 0)
    entered: dict[tuple[str, int], set[int]] = {}
    inside: dict[int, tuple[str, int]] = {}
    moved = True
    clock = 0.0
    while moved:
        moved = False
        for rank in range(WORLD):
            clock += 1
            if rank in inside:
                group, sequence = inside[rank]
                if entered[inside[rank]] != set(GROUPS[group]):
                    continue
                views[rank][-1] = record(group, sequence, left=clock, entered=views[rank][-1].entered)
                del inside[rank]
                moved = True
            if position[rank] == len(program) or (rank == stuck and position[rank] == at):
                continue
            kind = program[position[rank]]
            group = next(name for name, members in GROUPS.items() if name.startswith(kind) and rank in members)
            sequence = 1 + sum(each.group == group for each in views[rank])
            entered.setdefault((group, sequence), set()).add(rank)
            views[rank].append(record(group, sequence, entered=clock))
            inside[rank] = (group, sequence)
            position[rank] += 1
            moved = True
    return {rank: view(rank, records, phase="reading data") for rank, records in views.items()}


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_rank_that_stops_anywhere_is_named_alone(data: st.DataObject) -> None:
    program = [*data.draw(st.lists(st.sampled_from(["tp", "dp", "world"]), min_size=1, max_size=20)), "world"]
    stuck, at = data.draw(st.integers(0, WORLD - 1)), data.draw(st.integers(0, len(program) - 1))
    found = diagnose(play(program, stuck, at))
    assert [(each.rank, each.cause) for each in found.culprits] == [(stuck, "data")]
    assert found.collective is not None
    assert stuck in found.collective.members
    assert stuck not in found.waiting


@pytest.mark.parametrize(
    ("process", "silent", "cause"),
    [
        (ProcessState(alive=False), 9.0, "dead"),
        (ProcessState(alive=True, stopped=True), 9.0, "stopped"),
        (ProcessState(alive=True, in_uninterruptible_wait=True), 9.0, "file system"),
        (ALIVE, 9.0, "python lock"),
        (ALIVE, 0.1, "outside"),
    ],
)
def test_causes(process: ProcessState, silent: float, cause: str) -> None:
    """A rank that is stopped may be in a collective by its own record: nobody was left to see the end of it."""
    views = {rank: view(rank, [record("world", 3)]) for rank in range(WORLD)}
    views[2] = view(2, [record("world", 2)], process, silent, phase="update")
    if cause == "outside":
        views[2] = view(2, [record("world", 2, left=3.0)], process, silent, phase="update")
    found = diagnose(views)
    assert [(each.rank, each.cause) for each in found.culprits] == [(2, cause)]
    assert found.waiting == (0, 1, 3, 4, 5, 6, 7)


def test_who_waits_beside_a_stopped_rank_is_not_to_blame() -> None:
    """Ranks 0 and 1 are in a collective of their own group, in which rank 1 is stopped; all others wait for both."""
    views = {rank: view(rank, [record("world", 3)]) for rank in range(2, WORLD)}
    views[0] = view(0, [record("world", 2, left=2.5), record("tp0", 7)])
    views[1] = view(1, [record("world", 2, left=2.5), record("tp0", 7)], ProcessState(alive=True, stopped=True), 9.0)
    found = diagnose(views)
    assert [(each.rank, each.cause) for each in found.culprits] == [(1, "stopped")]
    alone = diagnose({rank: each for rank, each in views.items() if rank < 2})
    assert alone.waiting == (0,)


def test_a_collective_whose_end_was_missed_hides_nobody() -> None:
    """Long over, and never seen to be: it is older than the one in which the ranks wait."""
    missed = {rank: record(f"tp{rank // 2}", 1, entered=0.5) for rank in range(WORLD)}
    views = {rank: view(rank, [missed[rank], record("world", 3)]) for rank in range(WORLD)}
    views[6] = view(6, [missed[6], record("world", 2, left=3.0)], phase="reading data")
    found = diagnose(views)
    assert [(each.rank, each.cause) for each in found.culprits] == [(6, "data")]
    assert found.waiting == (0, 1, 2, 3, 4, 5, 7)


def test_a_receive_waits_for_its_sender() -> None:
    waits = record("world", 4, operation="receive", peer=6)
    views = {rank: view(rank, []) for rank in range(WORLD)} | {1: view(1, [waits])}
    found = diagnose(views)
    assert [each.rank for each in found.culprits] == [6]
    assert found.waiting == (1,)
    sent = record("world", 4, left=5.0, operation="send", peer=1)
    assert diagnose(views | {6: view(6, [sent])}).culprits[0].cause == "network"


def test_when_all_have_come_it_is_the_network() -> None:
    views = {rank: view(rank, [record("world", 3)]) for rank in range(WORLD)}
    found = diagnose(views)
    assert {each.cause for each in found.culprits} == {"network"}
    assert "the network between them" in describe_diagnosis(found)


def test_ranks_in_different_collectives_do_not_run_the_same_program() -> None:
    views = {rank: view(rank, [record("world", 3)]) for rank in range(WORLD)}
    views[5] = view(5, [record("world", 3, operation="broadcast")])
    assert {each.cause for each in diagnose(views).culprits} == {"mismatch"}


def test_nobody_is_blamed_where_nobody_waits() -> None:
    views = {rank: view(rank, [record("world", 3, left=4.0)]) for rank in range(WORLD)}
    assert diagnose(views).culprits == ()
    assert "no rank can be blamed" in describe_diagnosis(diagnose(views))


def test_a_rank_alone_is_blamed_where_it_waits_for_data() -> None:
    found = diagnose({0: view(0, [], phase="reading data")})
    assert [(each.rank, each.cause) for each in found.culprits] == [(0, "data")]
    assert "rank 0 (pid 100, after step 5, reading data): it reads data" in describe_diagnosis(found)


def test_a_line_says_who_why_and_where_the_others_wait() -> None:
    views = {rank: view(rank, [record("world", 3)]) for rank in range(3)}
    views[1] = view(1, [record("world", 2, left=3.0)], phase="reading data")
    line = describe_diagnosis(diagnose(views))
    assert line == (
        "rank 1 (pid 101, after step 5, reading data): it reads data; ranks 0, 2 wait for it in all_reduce 3 of wo, 8 B"
    )
