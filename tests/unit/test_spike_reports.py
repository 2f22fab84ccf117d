"""What people see of spikes: steps that go back, marks in the charts, what it cost, and which samples were read."""

import io
import json
from pathlib import Path

import pytest
from made_runs import append, make_run, started, step
from rich.console import Console
from tensorboardX.proto.event_pb2 import SessionLog
from test_continuity import TEN_SAMPLES_A_STEP, which
from test_data_commands import folder as data_folder
from test_data_commands import located
from test_journal import records

from danlu.framework.event_writer import EventWriter
from danlu.framework.sample_continuity import SampleContinuity, check_sample_continuity
from danlu.report import ProgressDisplay, write_run_page
from danlu.report.progress_display import eta_seconds, recent_steps
from danlu.report.run_history import read_run_history
from danlu.report.run_tables import summarize_run, summary
from danlu.scheduler.launcher import record_end
from danlu.spec import Event, RunFolder, SaveEvent, SpikeEvent
from danlu.spec.recipe import BatchConfig, BatchRampStage

__all__ = ["data_folder"]


def spike(number: int, rewound_to: int | None = None, **changes: object) -> SpikeEvent:
    """A spike in batches of ten samples."""
    values: dict[str, object] = {
        "time": 1000.0 + number / 2,
        "step": number,
        "metric": "loss",
        "value": 9.5,
        "expected": 2.8,
        "limit": 3.4,
        "sigmas": 134.0,
        "action": "skipped" if rewound_to is None else "rewound",
        "rewound_to": rewound_to,
        "first_sample": 10 * (number - 1),
        "lost_steps": 1 if rewound_to is None else number - rewound_to,
        "lost_samples": 10 if rewound_to is None else 10 * (number - rewound_to),
        "lost_seconds": 0.5 if rewound_to is None else 0.5 * (number - rewound_to) + 1,
    }
    return SpikeEvent.model_validate(values | changes)


def saved(number: int) -> SaveEvent:
    return SaveEvent(time=1000.0, step=number, path=f"step-{number}", seconds=0.1)


def rewound() -> list[Event]:
    """Four steps, a spike in the fifth, back to the second, and two more."""
    first = [step(1), step(2), saved(2), step(3), step(4), saved(4)]
    spiked = step(5, loss=9.5, committed=False, reason="spike")
    again = [step(3, loss=2.5, time=1010.0), step(4, loss=2.4, time=1010.5)]
    return [started(steps=9), *first, spiked, spike(5, rewound_to=2), *again]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return make_run(tmp_path / "runs" / "first-run")


def test_history_is_that_of_the_branch_that_was_taken(run: RunFolder) -> None:
    append(run, rewound())
    history = read_run_history(run)
    assert [(each.step, each.loss) for each in history.steps][2:] == [(3, 2.5), (4, 2.4)]
    assert (history.step, history.loss, history.rewound_steps, history.lost_steps) == (4, 2.4, 3, 0)
    assert sorted(history.saves) == [2], "later checkpoints are gone"
    assert [each.step for each in recent_steps(history)] == [3, 4], "the pace is that since the rewind"
    assert eta_seconds(history) == pytest.approx(5 * 0.5)
    summarized = summarize_run(run)
    assert (summarized.spikes, summarized.rewound_steps) == (1, 3)


def test_spikes_are_told_in_the_line_the_table_and_the_page(run: RunFolder) -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=False, width=200, color_system=None)
    with ProgressDisplay(run, console) as display:
        append(run, [*rewound(), spike(6)])
        display.update()
    text = output.getvalue()
    found = "loss 9.5, expected 2.8 and at most 3.4"
    back = "rewound to step 2: 3 steps, 30 samples and 2.5 s lost"
    assert f"at step 5: {found}; {back}" in text
    assert f"at step 6: {found}; the batch was skipped: 10 samples, 500 ms" in text
    console.print(summary(run))
    assert "2: 1 skipped, 1 rewound; 4 steps, 40 samples and 3.0 s lost" in output.getvalue()
    page = write_run_page(run).read_text()
    assert "3 steps undone by rewinds" in page and back in page and "2 spikes" in page
    append(run, [step(5)])
    page = write_run_page(run).read_text()
    marks = [piece.partition("</title>")[0] for piece in page.split('<path class="spike"')[1:]]
    assert marks and all("at step 5: loss 9.5" in mark for mark in marks), "a mark in every chart, where the spike was"


def test_tensorboard_forgets_the_branch_that_was_left(run: RunFolder) -> None:
    with EventWriter(run) as journal:
        for event in rewound():
            journal.write(event)
    starts = [record.step for record in records(run) if record.session_log.status == SessionLog.START]
    assert starts == [3]


def test_a_run_that_died_after_a_rewind_ended_where_it_was(run: RunFolder) -> None:
    append(run, rewound()[:-1])
    record_end(run, "failed", "killed")
    end = read_run_history(run).end
    assert end is not None and end.step == 3


def test_samples_that_were_passed_over_are_no_gap() -> None:
    history = [*TEN_SAMPLES_A_STEP, spike(7, rewound_to=4), step(5), step(6)]
    for at, cursor in ((4, 40), (5, 80), (6, 90)):
        assert check_sample_continuity(history, at, cursor, 100, which) == SampleContinuity(0, 0), at
    history += [spike(7, rewound_to=4, lost_samples=60), step(5)]
    assert check_sample_continuity(history, 5, 110, 100, which) == SampleContinuity(0, 0), "the second one counts all"
    assert check_sample_continuity([*history, started(step=4), step(5)], 5, 50, 100, which) == SampleContinuity(0, 0), (
        "a run that was killed after the rewind begins again before it"
    )


def test_after_a_rewind_in_a_ramp_batches_have_the_size_of_their_samples(run: RunFolder) -> None:
    batch = BatchConfig(sequences=8, length=4, ramp=(BatchRampStage(until=100, sequences=4),))
    append(run, [started(), *(step(number) for number in range(1, 61)), spike(60, rewound_to=50, lost_samples=40)])
    history = read_run_history(run)
    cursor = 0
    for number in range(1, 130):
        cursor += 40 if number == 51 else 0
        assert history.first_sample(number, batch) == cursor
        cursor += batch.sequences_at(cursor)


def test_documents_of_a_step_are_those_that_it_read(data_folder: Path) -> None:
    run = RunFolder(Path("runs/mixed"))
    run.path.mkdir(parents=True)
    run.recipe.write_text(Path("mixed.toml").read_text())
    run.plan.write_text("")
    append(
        run, [started(), *(step(number) for number in range(1, 5)), spike(4, rewound_to=1, lost_samples=12), step(2)]
    )
    assert [sample["index"] for sample in located("mixed", "--step", "1")] == [0, 1, 2, 3]
    assert [sample["index"] for sample in located("mixed", "--step", "2")] == [16, 17, 18, 19]
    assert [sample["index"] for sample in located("mixed", "--sample", "12")] == [12, 13, 14, 15], "of the spike itself"
    assert json.dumps(located("mixed.toml", "--step", "2")) == json.dumps(located("mixed.toml", "--sample", "4"))
