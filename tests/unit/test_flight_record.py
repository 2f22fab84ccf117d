"""The flight record: what one process writes, another reads, also after the writer's death."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from danlu.comm import flight_record
from danlu.comm.flight_record import (
    CAPACITY,
    FlightRecordError,
    FlightWriter,
    flight_folder,
    flight_path,
    make_flight_folder,
    read_flight,
    read_flights,
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's folder whose records are here and not in the machine's memory."""
    place = tmp_path / "memory" / "run"
    place.parent.mkdir(mode=0o700)
    monkeypatch.setattr(flight_record, "flight_folder", lambda run: place)
    make_flight_folder(tmp_path)
    return tmp_path


def test_what_is_written_is_read(run: Path) -> None:
    writer = FlightWriter(flight_path(run, 3), 3)
    writer.describe("7f", "tp", [1, 3, 5, 7])
    writer.enter_phase("forward and backward", 41)
    done = writer.enter("all_reduce", "7f", 4096, None)
    writer.leave(done)
    writer.enter("send", "7f", 10, 2)
    writer.enter("send", "7f", 10, 2)
    writer.enter("all_reduce", "7f", 4, None)
    (flight,) = read_flights(run)
    assert (flight.rank, flight.pid, flight.step, flight.phase) == (3, os.getpid(), 41, "forward and backward")
    assert flight.collectives == 4
    first, _, sent, last = flight.records
    assert (first.operation, first.sequence, first.size, first.members) == ("all_reduce", 1, 4096, (1, 3, 5, 7))
    assert first.left is not None
    assert first.left >= first.entered
    assert (sent.operation, sent.sequence, sent.peer, sent.left) == ("send", 2, 2, None)
    assert (last.operation, last.sequence, last.axes) == ("all_reduce", 2, "tp")
    assert read_flight(flight_path(run, 3), collectives=False).records == ()


def test_the_newest_collectives_are_kept(run: Path) -> None:
    writer = FlightWriter(flight_path(run, 0), 0)
    writer.describe("g", "world", [0, 1])
    first = writer.enter("all_reduce", "g", 1, None)
    for _ in range(CAPACITY + 30):  # more than there are places
        writer.enter("all_reduce", "g", 1, None)
    writer.leave(first)  # long overwritten: whose place it has now is not over
    flight = read_flight(flight_path(run, 0))
    assert [record.sequence for record in flight.records] == [*range(32, CAPACITY + 32)]
    assert all(record.left is None for record in flight.records)


@pytest.mark.parametrize(
    ("members", "read"),
    [
        ([4], (4,)),
        ([*range(0, 100_000, 8)], tuple(range(0, 100_000, 8))),
        ([0, 1, 8, 9], (0, 1, 8, 9)),
        ([*range(100), 1000], ()),  # too long and too irregular
    ],
)
def test_members_of_a_group(members: list[int], read: tuple[int, ...], run: Path) -> None:
    writer = FlightWriter(flight_path(run, 0), 0)
    writer.describe("g", "ep", members)
    writer.enter("all_to_all", "g", 1, None)
    assert read_flight(flight_path(run, 0)).records[0].members == read


def test_it_is_read_after_the_death_of_its_writer(tmp_path: Path) -> None:
    code = f"""if True:
        from pathlib import Path
        from danlu.comm.flight_record import *
        run = Path({str(tmp_path)!r})
        make_flight_folder(run)
        writer = FlightWriter(flight_path(run, 1), 1)
        writer.describe("g", "world", [0, 1])
        writer.enter_phase("metrics", 7)
        writer.enter("all_reduce", "g", 8, None)
        import os
        os.kill(os.getpid(), 9)
    """
    ended = subprocess.run([sys.executable, "-c", code], timeout=180)
    assert ended.returncode == -signal.SIGKILL
    (flight,) = read_flights(tmp_path)
    assert (flight.rank, flight.step, flight.phase) == (1, 7, "metrics")
    assert flight.records[0].left is None
    FlightWriter(flight_path(tmp_path, 1), 1).remove()
    assert not flight_folder(tmp_path).exists()


def test_a_folder_that_others_may_enter_is_refused(run: Path) -> None:
    flight_record.flight_folder(run).chmod(0o755)
    with pytest.raises(FlightRecordError, match="must be of this user alone"):
        make_flight_folder(run)


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"\0" * flight_record.FILE_BYTES])
def test_other_files_are_no_records(content: bytes, run: Path) -> None:
    flight_path(run, 0).write_bytes(content)
    assert read_flights(run) == []
    with pytest.raises(FlightRecordError, match="must be a flight record"):
        read_flight(flight_path(run, 0))
