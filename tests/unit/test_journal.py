"""The journal: readable by others at once, and the same figures in TensorBoard's file."""

import struct
from collections.abc import Iterator
from math import inf, isnan, nan
from pathlib import Path

import pytest
from made_runs import started, step
from tensorboardX.proto.event_pb2 import Event as TensorBoardEvent

from danlu.framework.journal import Journal
from danlu.spec import Ended, Event, RunFolder, Saved, Warned
from danlu.spec.event import parse_event


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
        Saved(time=1.0, step=1, path="step-00000001", seconds=0.5),
        Warned(time=2.0, rank=3, message="slow: 1,5 × as long\nas usual"),
        Ended(time=3.0, step=1, outcome="stopped"),
    ]
    with Journal(run) as journal:
        for number, event in enumerate(events, start=1):
            journal.write(event)
            assert list(run.read_events()) == events[:number]
    assert len(run.events.read_text().splitlines()) == len(events), "one line an event"


def test_a_resumed_run_goes_on_in_the_same_file(run: RunFolder) -> None:
    for start in (0, 2):
        with Journal(run) as journal:
            journal.write(started(step=start))
    assert [event.step for event in run.read_events()] == [0, 2]


def test_a_line_cut_short_by_a_crash_does_not_spoil_the_next_event(run: RunFolder) -> None:
    run.events.write_text(step(1).model_dump_json() + "\n" + step(2).model_dump_json()[:40])
    with Journal(run) as journal:
        journal.write(started(step=1))
    assert [event.kind for event in run.read_events()] == ["step", "started"]


def test_a_loss_that_is_not_a_number_is_an_event_too(run: RunFolder) -> None:
    with Journal(run) as journal:
        journal.write(step(1, loss=nan, norm=inf, committed=False))
    (report,) = run.read_events()
    assert report.kind == "step" and isnan(report.loss) and report.norm == inf and not report.committed
    assert parse_event(report.model_dump_json()).model_dump_json() == report.model_dump_json()


def test_tensorboard_gets_every_figure_of_every_step(run: RunFolder) -> None:
    with Journal(run) as journal:
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
    assert by_tag["memory"] == [(1, 3 * 1024**3), (2, 3 * 1024**3)]
    assert by_tag["expert imbalance"] == [(1, 1.25)], "a step without experts has no figure"
    assert by_tag["learning rate"][0][1] == pytest.approx(3e-4)


def test_tensorboard_keeps_the_time_of_the_step(run: RunFolder) -> None:
    with Journal(run) as journal:
        journal.write(step(1, time=1234.5))
    times = {record.wall_time for record in records(run) if record.summary.value}
    assert times == {1234.5}
