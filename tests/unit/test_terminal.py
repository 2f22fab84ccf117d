"""What goes to the terminal and to pages: texts from files are shown, never obeyed, while our own styles stay."""

import io
import json
import re
import sys
from pathlib import Path

import pytest
from made_runs import append, make_run, started, step
from rich.progress import Progress
from rich.text import Text
from typer.testing import CliRunner

import danlu
from danlu.cli.app import app
from danlu.report import write_run_page
from danlu.report.terminal import Console, escape_streams
from danlu.spec import EndEvent, WarningEvent

EVIL = "\x1b]0;owned\x07\x1b[2J\u202e\x9b31m"


def _obeyed(text: str) -> bool:
    return any(letter in text for letter in "\x1b\x07\x9b\u202e")


@pytest.fixture
def evil_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "runs" / "red\x1b[31m")
    ended = EndEvent(time=2000.0, step=1, outcome="failed", message=f"said {EVIL}")
    append(run, [started(chip=f"chip {EVIL}"), step(1), WarningEvent(time=1.0, rank=0, message=EVIL), ended])
    run.recipe.write_text(run.recipe.read_text().replace('"first"', r'"\u001b[31m"'))
    run.events.write_text(run.events.read_text() + '{"kind": "\\u001b[31m"}\n')
    return run.path


@pytest.mark.parametrize("command", [["runs"], ["runs", "--json"], ["show", "--no-open"], ["show", "--json"]])
def test_no_command_repeats_escapes(command: list[str], evil_run: Path) -> None:
    named = [str(evil_run)] if command[0] == "show" else []
    result = CliRunner().invoke(app, [*command, *named], color=True)
    assert result.exit_code == 0 and not _obeyed(result.output), repr(result.output)
    assert "\\u00" in result.output
    if "--json" in command:
        assert "owned" in str(json.loads(result.output))


def test_no_page_repeats_escapes(evil_run: Path) -> None:
    from danlu.spec import RunFolder

    page = write_run_page(RunFolder(evil_run)).read_text(encoding="utf-8")
    assert "owned" in page and not _obeyed(page)


def test_a_console_keeps_its_own_styles_and_shows_those_of_others() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="standard", width=80)
    console.print(Text("red", style="red"), f"[bold]{EVIL}[/]", highlight=False)
    assert "\x1b[31mred" in out.getvalue() and "\\u001b]0;owned" in out.getvalue()
    assert not re.search("\x1b\\]|\x07|\x9b|\u202e", out.getvalue())


def test_streams_write_out_what_anybody_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    with escape_streams():
        print(f"plain {EVIL}", flush=True)
        Console(force_terminal=True, color_system="standard").print(Text("red", style="red"))
        sys.stdout.writelines(["a\x1b", "b\n"])
    assert sys.stdout is out
    assert out.getvalue().startswith("plain \\u001b]0;owned\\u0007\\u001b[2J\\u202e\\u009b31m\n\x1b[31mred")
    assert out.getvalue().endswith("a\\u001bb\n")


def test_every_console_is_ours() -> None:
    """rich's own console obeys what it is given: `from danlu.report.terminal import Console` instead."""
    room = Path(danlu.__file__).parent
    raw = re.compile(r"^\s*from rich(\.console)? import .*\b(Console|print)\b", re.MULTILINE)
    files = [file for file in room.rglob("*.py") if file.name != "terminal.py"]
    assert not [str(file.relative_to(room)) for file in files if raw.search(file.read_text(encoding="utf-8"))]


def test_a_bar_is_drawn_and_not_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is shown rich puts a stream of its own over the one that escapes."""
    shown = io.StringIO()
    monkeypatch.setattr("sys.stdout", shown)
    with escape_streams(), Progress(console=Console(force_terminal=True)) as progress:
        progress.advance(progress.add_task("at work", total=2))
        progress.refresh()
        print("\x1b[2J")
    assert "\x1b[2K" in shown.getvalue() and "at work" in shown.getvalue()
    assert "\\u001b" not in shown.getvalue(), "what the bar draws with is obeyed"
    assert "\x1b[2J" not in shown.getvalue(), "what others print is not"
