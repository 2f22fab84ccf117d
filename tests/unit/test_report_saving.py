"""Saves, their failures, resumes and the rehearsal, as people see them."""

import io
from pathlib import Path

import pytest
from made_runs import append, make_run, started, step
from rich.console import Console

from danlu.report import ProgressDisplay, summary, write_run_page
from danlu.report.checkpoints import format_layout, format_save_estimate, format_short_duration, resume_rows
from danlu.spec import PreflightEvent, ResumeEvent, RunFolder, SaveEvent, WarningEvent

RESUMED = ResumeEvent(
    time=1003, step=2, was={"shard": 2}, now={"pp": 2, "shard": 2, "ep": 2}, tensors=57, saved=57, bytes=3_000_000,
    samples=20, repeated=0, skipped=0,
)  # fmt: skip
REHEARSED = PreflightEvent(
    time=1000, bytes=3_000_000_000, seconds=12.0, stall=0.25, bandwidth=256e6, free=10**12, interval=1800.0
)
FAILED = WarningEvent(
    time=1002, rank=0, message="the checkpoint of step 3 did not come about: disk full; the newest is of 2"
)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    made = make_run(tmp_path / "runs" / "first-run")
    first = [
        started(),
        REHEARSED,
        step(1),
        step(2),
        SaveEvent(time=1001, step=2, path="step-2", seconds=1.5, stall=0.02),
    ]
    append(made, [*first, step(3), FAILED])
    return made


def watched(run: RunFolder) -> tuple[ProgressDisplay, io.StringIO]:
    output = io.StringIO()
    return ProgressDisplay(
        run, Console(file=output, width=200, color_system=None), every=0.0, clock=lambda: 0.0
    ), output


def test_a_resume_is_shown_once_with_its_proof(run: RunFolder) -> None:
    live, output = watched(run)
    append(run, [started(step=2), RESUMED, REHEARSED, step(3)])
    live.update()
    live.update()
    lines = output.getvalue().splitlines()
    assert lines[:5] == [
        "resumed from step 2",
        "  was      shard 2, 2 ranks",
        "  now      pp 2 · shard 2 · ep 2, 4 ranks",
        "  tensors  57 of 57 equal by fingerprint, 3.0 MB",
        "  samples  20 consumed, 0 repeated, 0 skipped",
    ]
    assert lines[5] == (
        "a checkpoint has 3.0 GB and takes about 12 s in the background (256.0 MB/s); training waits about 250 ms "
        "for it; 1.0 TB are free in the store; at this machine's failure rate save every 30 min"
    )
    assert len(lines) == 7 and "saved" not in lines[6], "the save of the start before is history"


def test_the_line_tells_the_newest_save_and_a_failure_is_a_warning(run: RunFolder) -> None:
    live, output = watched(run)
    append(run, [step(4), SaveEvent(time=1004, step=4, path="step-4", seconds=0.5, stall=0.003), FAILED])
    live.close()
    assert "saved 4 in 500 ms, waited 3.0 ms" in output.getvalue()
    assert f"warning rank 0: {FAILED.message}" in output.getvalue()


def test_the_page_has_tables_of_both(run: RunFolder) -> None:
    assert "Resumes" not in write_run_page(run).read_text()
    append(run, [started(step=2), RESUMED.model_copy(update={"repeated": 8})])
    page = write_run_page(run).read_text()
    assert "<summary>Resumes<small>1</small></summary>" in page
    assert "<td>57 of 57</td>" in page and "20 consumed, 8 repeated, 0 skipped" in page
    assert '<th class="number">training waited</th>' in page and '<td class="number">20 ms</td>' in page
    assert "Before the first step: a checkpoint has 3.0 GB" in page
    assert "did not come about: disk full" in page


def test_the_summary_tells_both(run: RunFolder) -> None:
    append(run, [started(step=2), RESUMED])
    output = io.StringIO()
    Console(file=output, width=200, color_system=None).print(summary(run))
    assert "1 checkpoint, the newest of step 2, training waited 20 ms at most" in output.getvalue()
    assert "from step 2: 57 of 57 tensors equal, 20 consumed, 0 repeated, 0 skipped" in output.getvalue()


def test_what_is_not_known_is_not_claimed() -> None:
    unknown = RESUMED.model_copy(update={"repeated": None, "skipped": None, "saved": None})
    words = dict(resume_rows(unknown))
    assert words["samples"].startswith("20 consumed; the run's events do not reach back")
    assert words["tensors"] == "57 equal by fingerprint, 3.0 MB"
    least = REHEARSED.model_copy(update={"free": None, "interval": None})
    assert format_save_estimate(least).endswith("waits about 250 ms for it")


def test_words() -> None:
    assert format_layout({}) == "1 rank"
    assert [format_short_duration(seconds) for seconds in (0.00004, 0.003, 0.04, 3.0, 200.0)] == [
        "0.0 ms", "3.0 ms", "40 ms", "3.0 s", "3 min 20 s",
    ]  # fmt: skip
