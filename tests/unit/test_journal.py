"""The event writer: readable by other processes at once, and the same metrics in TensorBoard's file."""

import struct
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from math import inf, isnan, nan
from pathlib import Path

import pytest
from made_runs import started, step
from pydantic import ValidationError
from tensorboardX.proto.event_pb2 import Event as TensorBoardEvent
from tensorboardX.record_writer import masked_crc32c

from danlu.framework.event_writer import EventWriter
from danlu.spec import EndEvent, Event, RunFolder, SaveEvent, WarningEvent
from danlu.spec.event import parse_event, unknown_kind


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def records(run: RunFolder) -> Iterator[TensorBoardEvent]:
    """TensorBoard's records: length, checksum, bytes, checksum."""
    for file in sorted(run.tensorboard.iterdir()):
        data, place = file.read_bytes(), 0
        while place < len(data):
            (length,) = struct.unpack_from("<Q", data, place)
            yield TensorBoardEvent.FromString(data[place + 12 : place + 12 + length])
            place += 12 + length + 4


def scalars(run: RunFolder) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for record in records(run):
        for value in record.summary.value:
            found.setdefault(value.tag, []).append((record.step, value.simple_value))
    return found


def test_an_event_can_be_read_as_soon_as_it_is_written(run: RunFolder) -> None:
    events: list[Event] = [
        started(),
        step(1, imbalance=1.5),
        SaveEvent(time=1.0, step=1, path="step-00000001", seconds=0.5),
        WarningEvent(time=2.0, rank=3, message="slow: 1,5 × as long\nas usual"),
        EndEvent(time=3.0, step=1, outcome="stopped"),
    ]
    with EventWriter(run) as journal:
        for number, event in enumerate(events, start=1):
            journal.write(event)
            assert list(run.read_events()) == events[:number]
    assert len(run.events.read_text().splitlines()) == len(events), "one line an event"


def test_a_resumed_run_goes_on_in_the_same_file(run: RunFolder) -> None:
    for start in (0, 2):
        with EventWriter(run) as journal:
            journal.write(started(step=start))
    assert [event.step for event in run.read_events()] == [0, 2]


def test_a_line_cut_short_by_a_crash_does_not_spoil_the_next_event(run: RunFolder) -> None:
    run.events.write_text(step(1).model_dump_json() + "\n" + step(2).model_dump_json()[:40])
    with EventWriter(run) as journal:
        journal.write(started(step=1))
    assert [event.kind for event in run.read_events()] == ["step", "started"]


def test_a_loss_that_is_not_a_number_is_an_event_too(run: RunFolder) -> None:
    with EventWriter(run) as journal:
        journal.write(step(1, loss=nan, norm=inf, committed=False))
    (report,) = run.read_events()
    assert report.kind == "step" and isnan(report.loss) and report.norm == inf and not report.committed
    assert parse_event(report.model_dump_json()).model_dump_json() == report.model_dump_json()


def test_tensorboard_gets_every_figure_of_every_step(run: RunFolder) -> None:
    with EventWriter(run) as journal:
        journal.write(started())
        journal.write(step(1, loss=4.5, seconds=0.5, imbalance=1.25))
        journal.write(step(2, loss=nan, seconds=0.25))
    found = scalars(run)
    assert {tag.replace("_", " ") for tag in found} == {
        "loss",
        "gradient norm",
        "learning rate",
        "tokens per second",
        "memory",
        "expert imbalance",
    }
    by_tag = {tag.replace("_", " "): values for tag, values in found.items()}
    assert by_tag["loss"][0] == (1, 4.5) and isnan(by_tag["loss"][1][1])
    assert by_tag["tokens per second"] == [(1, 2000.0), (2, 4000.0)]
    assert by_tag["memory"] == [(1, 3e9), (2, 3e9)]
    assert by_tag["expert imbalance"] == [(1, 1.25)], "a step without experts has no figure"
    assert by_tag["learning rate"][0][1] == pytest.approx(3e-4)


def test_tensorboard_keeps_the_time_of_the_step(run: RunFolder) -> None:
    with EventWriter(run) as journal:
        journal.write(step(1, time=1234.5))
    times = {record.wall_time for record in records(run) if record.summary.value}
    assert times == {1234.5}


# --- a disk that does not take it


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 KiB, for the time of a test."""
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], check=True)
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(place: Path) -> Path:
    """Take all the room that is left."""
    ballast = place / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass
    return ballast


def test_a_full_disk_costs_no_event_if_there_is_room_again_later(small_disk: Path) -> None:
    run, shown = RunFolder(small_disk), []
    with EventWriter(run, on_waiting=lambda line: shown.append(parse_event(line))) as journal:
        journal.write(started())
        journal.write(step(1))
        ballast = fill(small_disk)
        for number in range(2, 60):
            journal.write(step(number))
        written = list(run.read_events())
        assert [event.kind for event in shown[:2]] == ["warning", "step"] or shown[1].kind == "warning"
        assert sum(event.kind == "warning" for event in shown) == 1, "it is told once"
        assert "No space left on device" in next(event.message for event in shown if event.kind == "warning")
        lost = {event.step for event in shown if event.kind == "step"}
        assert lost | {event.step for event in written if event.kind == "step"} == set(range(1, 60))
        assert run.events.read_bytes().endswith(b"\n"), "no half line"
        ballast.unlink()
        journal.write(step(60))
        assert [event.step for event in run.read_events() if event.kind == "step"] == list(range(1, 61))
    assert scalars(run)["loss"][-1][0] == 60, "the charts go on, and can be read"


def test_a_folder_that_takes_nothing_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where the folder should be")
    shown: list[str] = []
    with EventWriter(RunFolder(tmp_path / "run"), on_waiting=shown.append) as journal:
        journal.write(started())
        journal.write(step(1))
    assert len(shown) == 3


def test_records_have_the_sums_that_tensorboard_checks(run: RunFolder) -> None:
    with EventWriter(run) as journal:
        journal.write(step(1))
    (file,) = run.tensorboard.iterdir()
    data, place = file.read_bytes(), 0
    while place < len(data):
        (length,) = struct.unpack_from("<Q", data, place)
        assert struct.unpack_from("<I", data, place + 8)[0] == masked_crc32c(data[place : place + 8])
        body = data[place + 12 : place + 12 + length]
        assert struct.unpack_from("<I", data, place + 12 + length)[0] == masked_crc32c(body)
        place += 16 + length


NEWER = '{"kind": "rebalanced", "time": 2.0, "experts": [1, 2]}\n'


def test_a_kind_that_only_a_newer_danlu_knows_is_skipped_with_one_warning(run: RunFolder) -> None:
    run.events.write_text(started().model_dump_json() + "\n" + NEWER * 3 + step(1).model_dump_json() + "\n")
    with pytest.warns(UserWarning, match='a newer Danlu wrote: 3 of kind "rebalanced"') as told:
        assert [event.kind for event in run.read_events()] == ["started", "step"]
    assert len(told) == 1


@pytest.mark.parametrize("line", ['{"kind": "step", "time": 1.0}', '{"time": 1.0}', '{"kind": 5}', "[]", "no"])
def test_a_malformed_line_of_a_known_kind_or_of_none_stays_an_error(run: RunFolder, line: str) -> None:
    run.events.write_text(f"{line}\n")
    with pytest.raises(ValidationError) as refused:
        list(run.read_events())
    assert unknown_kind(refused.value) is None
