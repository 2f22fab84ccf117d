"""Runs on the terminal: the live line, the tables, and the commands that print them."""

import io
import json
import re
from pathlib import Path

import pytest
from made_runs import append, line, make_run, started, step
from rich.console import Console

from danlu.cli import main
from danlu.report import ProgressDisplay, RunSummary, list_runs, summary, write_run_page
from danlu.report.run_history import MAX_WARNINGS, read_run_history
from danlu.report.run_tables import runs_table, summarize_run
from danlu.spec import EndEvent, RunFolder, WarningEvent
from danlu.storage import run_lock


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return make_run(tmp_path / "runs" / "first-run")


# ---------------------------------------------------------------------------------------------- live


def watched(run: RunFolder, *, terminal: bool, clock: list[float]) -> tuple[ProgressDisplay, io.StringIO]:
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=100, color_system=None, legacy_windows=False)
    return ProgressDisplay(run, console, every=5.0, clock=lambda: clock[0]), output


def test_the_live_line_reads_only_what_is_new_and_leaves_half_a_line(run: RunFolder) -> None:
    live, output = watched(run, terminal=False, clock=[0.0])
    live.update()
    assert output.getvalue() == ""
    append(run, [started()])
    text = line(step(1))
    with run.events.open("a") as file:
        file.write(text[:30])
        file.flush()
        live.update()
        assert live.history.last_step is None
        file.write(text[30:])
    live.update()
    assert live.history.step == 1
    assert output.getvalue() == "step 1/5 (20%)  loss 6.0000  2k tokens/s  MFU 20.0 %  3.0 GB  2.0 s left\n"


def test_a_log_gets_the_first_line_the_last_and_few_between(run: RunFolder) -> None:
    clock = [0.0]
    live, output = watched(run, terminal=False, clock=clock)
    append(run, [started(steps=100)])
    for number in range(1, 101):
        append(run, [step(number)])
        live.update()
        clock[0] += 0.5
    append(run, [EndEvent(time=1050, step=100, outcome="finished")])
    live.close()
    lines = output.getvalue().splitlines()
    assert [row.split("/")[0] for row in lines] == [f"step {n}" for n in (1, 11, 21, 31, 41, 51, 61, 71, 81, 91, 100)]
    assert "↓" in lines[-1]
    assert "left" in lines[-2]
    assert "left" not in lines[-1]
    assert all(character.isprintable() for row in lines for character in row)


def test_warnings_are_printed_once_and_old_ones_not_again(run: RunFolder) -> None:
    append(run, [started(), WarningEvent(time=1000, rank=0, message="of the first start")])
    live, output = watched(run, terminal=False, clock=[0.0])
    again = WarningEvent(time=1000, rank=2, message="[x] is slow")
    append(run, [started(), again, again, step(1)])
    live.update()
    live.close()
    assert output.getvalue().count("warning rank 2: [x] is slow\n") == 1
    assert "of the first start" not in output.getvalue()


def test_events_of_a_newer_danlu_are_skipped_counted_and_told_once(run: RunFolder) -> None:
    live, out = watched(run, terminal=False, clock=[0.0])
    newer = '{"kind": "rebalanced \\u001b[31m", "time": 2.0}'
    with run.events.open("a") as events:
        events.write(f"{newer}\n{newer}\n{step(1).model_dump_json()}\n")
    live.update()
    live.update(unwritten=[newer])
    live.close()
    assert out.getvalue().count("are skipped: a newer Danlu wrote them") == 1
    assert "\x1b" not in out.getvalue()
    history = read_run_history(run)
    assert history.problems == [] and history.step == 1
    assert "2 of kind" in history.skipped_events
    assert history.skipped_events in summarize_run(run).message
    assert "a newer Danlu wrote" in write_run_page(run).read_text()


def test_warnings_beyond_ten_thousand_are_counted_and_everything_else_is_read(run: RunFolder) -> None:
    warning = WarningEvent(time=1000, rank=0, message="again").model_dump_json() + "\n"
    last = WarningEvent(time=5000, rank=0, message="the last").model_dump_json() + "\n"
    steps = "".join(step(number).model_dump_json() + "\n" for number in range(1, 6))
    with run.events.open("a") as events:
        events.write(
            started().model_dump_json() + "\n" + warning * 12_500 + steps + "no event\n" + warning * 4_000 + last
        )
    history = read_run_history(run)
    assert history.warning_count == summarize_run(run).warnings == 16_501
    assert MAX_WARNINGS <= len(history.warnings) < MAX_WARNINGS + 2_000
    assert history.step == 5 and history.last_event == 5000
    assert [problem.line for problem in history.problems] == [12_507]
    said = f"{history.warnings_left_out:,} further warnings were counted and are not shown"
    assert said in write_run_page(run).read_text()


def test_the_terminal_shows_a_bar_and_a_line(run: RunFolder) -> None:
    with watched(run, terminal=True, clock=[0.0])[0] as live:
        output = live._console.file
        assert isinstance(output, io.StringIO)
        live.update(phase="importing torch")
        assert "importing torch … 0 s" in output.getvalue()
        append(run, [started(), step(1), step(2), step(3, loss=9.0), step(4, loss=9.0)])
        live.update()
    shown = output.getvalue()
    assert "4/5 (80%)" in shown
    assert "0.5 s left" in shown
    assert "loss 9.0000 ↑  2k tokens/s  MFU 20.0 %  3.0 GB" in shown
    assert shown.endswith("\x1b[?25h"), "the cursor is shown again"


def test_what_takes_long_before_the_first_step_is_told_in_a_log_once(run: RunFolder) -> None:
    clock = [0.0]
    live, output = watched(run, terminal=False, clock=clock)
    for moment in (0.0, 9.0, 10.0, 11.0, 30.0):
        clock[0] = moment
        live.update(phase="importing torch (1 of 2 ranks)")
    append(run, [started(), step(1)])
    clock[0] = 60.0
    live.update(phase="first step")
    assert output.getvalue().count("importing torch (1 of 2 ranks) … 10 s\n") == 1
    assert "first step" not in output.getvalue()


def test_events_that_a_full_disk_did_not_take_are_shown_all_the_same(run: RunFolder) -> None:
    live, output = watched(run, terminal=False, clock=[0.0])
    lost = [started(), WarningEvent(time=1000, rank=0, message="no room"), step(1), step(2)]
    live.update(unwritten=[event.model_dump_json() for event in lost])
    append(run, lost)  # later there was room
    live.update()
    live.close()
    assert output.getvalue().count("warning rank 0: no room\n") == 1
    assert "step 2/5 (40%)" in output.getvalue()


def test_a_run_whose_lock_is_held_is_running_whatever_its_events_say(run: RunFolder) -> None:
    append(run, [started(), step(1), EndEvent(time=2002, step=1, outcome="stopped")])
    assert summarize_run(run).state == "stopped"
    with run_lock.acquire(run):
        assert summarize_run(run).state == "running"
        assert "running" in render_table([summarize_run(run)])
    assert summarize_run(run).state == "stopped"


def render_table(summaries: list[RunSummary]) -> str:
    output = io.StringIO()
    Console(file=output, width=200).print(runs_table(summaries, width=200))
    return output.getvalue()


# ---------------------------------------------------------------------------------------------- runs


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["danlu", *arguments])
    with pytest.raises(SystemExit) as ending:
        main()
    assert isinstance(ending.value.code, int)
    return ending.value.code


@pytest.fixture
def runs(run: RunFolder) -> Path:
    """A folder of four runs: unfinished, failed, one without events, and a folder that is no run."""
    append(run, [started(), step(1), step(2)])
    failed = RunFolder(run.path.parent / "second-run")
    append(failed, [started(time=2000), step(1), EndEvent(time=2002, step=1, outcome="failed", message="why")])
    failed.recipe.write_text(run.recipe.read_text())
    empty = RunFolder(run.path.parent / "third-run")
    empty.path.mkdir()
    empty.recipe.write_text(run.recipe.read_text())
    (run.path.parent / "notes").mkdir()
    return run.path.parent


def test_runs_are_listed_with_their_state(runs: Path) -> None:
    listed = list_runs(runs)
    assert [(summary.name, summary.state) for summary in listed] == [
        ("second-run", "failed"),
        ("first-run", "unfinished"),
        ("third-run", "not started"),
    ]
    first = listed[1]
    assert (first.step, first.steps, first.loss, first.tokens_per_second) == (2, 5, 4.0, 2000.0)
    assert first.model == "<tiny> & co"
    assert first.loss_curve == "█▁"
    assert listed[0].message == "why"


def test_the_runs_command_prints_a_table_and_json(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "runs", "--runs-dir", str(runs)) == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[0].split() == ["run", "state", "model", "step", "loss", "tokens/s", "dtype", "time", "started"]
    assert re.search(
        r"first-run +unfinished, last event .* ago +<tiny> & co +2/5 +4\.0000 █▁ +2k +fp32 +1\.0 s", rows[2]
    )
    assert command(monkeypatch, "runs", "--runs-dir", str(runs), "--json") == 0
    assert [entry["name"] for entry in json.loads(capsys.readouterr().out)] == ["second-run", "first-run", "third-run"]


def test_a_folder_without_runs_and_one_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "runs", "--runs-dir", str(tmp_path)) == 0
    assert "There are no runs" in capsys.readouterr().out
    assert command(monkeypatch, "runs", "--runs-dir", str(tmp_path / "nowhere")) == 2
    assert "is not a folder" in capsys.readouterr().err


def test_show_writes_the_page_and_says_why_it_is_not_opened(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "show", "first-run", "--runs-dir", str(runs)) == 0
    shown = capsys.readouterr().out
    page = runs / "first-run" / "report.html"
    assert page.exists()
    assert "2 of 5" in shown
    assert "not opened, because the output is not a terminal" in shown
    assert command(monkeypatch, "show", str(runs / "second-run"), "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["state"], told["page"]) == ("failed", str(runs / "second-run" / "report.html"))


@pytest.mark.parametrize(("display", "expected"), [(":0", True), ("", False)])
def test_show_opens_the_page_where_there_is_a_display(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], display: str, expected: bool
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    for name in ("WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DISPLAY", display)
    monkeypatch.setattr("webbrowser.get", lambda: None)
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    assert command(monkeypatch, "show", "first-run", "--runs-dir", str(runs)) == 0
    page = (runs / "first-run" / "report.html").resolve().as_uri()
    assert opened == ([page] if expected else [])
    assert ("there is no display" in capsys.readouterr().out) is not expected


def test_a_wrong_name_is_answered_with_the_nearest(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "show", "frist-run", "--runs-dir", str(runs)) == 2
    error = capsys.readouterr().err
    assert '"frist-run" is not a run' in error
    assert "did you mean `first-run`?" in error


def test_the_summary_names_the_page_and_what_the_loss_means(run: RunFolder) -> None:
    append(run, [started(), *(step(n) for n in range(1, 6)), EndEvent(time=1003, step=5, outcome="finished")])
    write_run_page(run)
    output = io.StringIO()
    Console(file=output, width=200).print(summary(run))
    shown = output.getvalue()
    assert "2.8000, 1.70 below a unigram model (4.50)" in shown
    assert "20.0 % of 90 GFLOP/s, data sheet" in shown
    assert str(run.report) in shown
