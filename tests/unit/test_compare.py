"""`danlu compare`: runs over each other. Every run here is written by the test."""

import json
import math
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from made_runs import append, make_run, started, step
from test_report import Page, places
from test_spike_reports import rewound
from typer.testing import CliRunner

from danlu.cli.app import app
from danlu.report.comparison_page import comparison_page
from danlu.report.comparison_tables import describe_losses, figure_rows
from danlu.report.run_comparison import RunComparison, compare_runs
from danlu.report.terminal_chart import TerminalCurve, draw_curves
from danlu.spec import EndEvent, EvaluationEvent, Event, RunFolder, SpecError


def made(folder: Path, name: str, events: list[Event]) -> RunFolder:
    run = make_run(folder / "runs" / name)
    append(run, events)
    return run


def plain(losses: list[float], **changes: object) -> list[Event]:
    return [started(steps=9, **changes), *(step(n, loss=loss) for n, loss in enumerate(losses, start=1))]


def compared(folder: Path, *losses: list[float]) -> RunComparison:
    return compare_runs([made(folder, f"run-{n}", plain(each)) for n, each in enumerate(losses)])


def invoke(folder: Path, *words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["compare", *words, "--runs-dir", str(folder / "runs")])
    assert result.exit_code == code, result.output
    return result.output


def figures(comparison: RunComparison) -> dict[str, list[str]]:
    return dict(figure_rows(comparison))


def test_the_first_step_whose_bits_differ_is_found(tmp_path: Path) -> None:
    nearly = math.nextafter(3.0, 4.0)
    comparison = compared(tmp_path, [5.0, 4.0, 3.0, 2.0], [5.0, 4.0, nearly, 2.5, 2.0])
    (found,) = comparison.losses
    assert (found.common_steps, found.equal_until, found.differs_at, found.losses) == (4, 2, 3, (3.0, nearly))
    assert (found.largest, found.largest_at) == (pytest.approx(0.2), 4)
    assert "are equal to the last bit up to step 2; step 3 has" in describe_losses(found, comparison)
    assert comparison.last_common_step == 4
    assert figures(comparison)["loss at step 4"] == ["2.0000", "2.5000"]
    assert figures(comparison)["last loss"] == ["2.0000", "2.0000"]


def test_equal_losses_are_said_to_be_equal_nan_included(tmp_path: Path) -> None:
    comparison = compared(tmp_path, [5.0, math.nan, 3.0], [5.0, math.nan, 3.0, 2.0], [5.0, 4.0])
    equal, different = comparison.losses
    assert (equal.equal_until, equal.differs_at, equal.largest, equal.largest_at) == (3, None, 0.0, None)
    assert "all losses of the 3 common steps are equal to the last bit" in describe_losses(equal, comparison)
    assert (different.equal_until, different.differs_at) == (1, 2), "a number is not NaN"


def test_runs_without_a_common_step_say_so(tmp_path: Path) -> None:
    one = made(tmp_path, "one", plain([5.0, 4.0]))
    late = made(tmp_path, "late", [started(step=7, steps=9), step(8)])
    comparison = compare_runs([one, late])
    assert comparison.last_common_step is None
    assert describe_losses(comparison.losses[0], comparison).endswith("have no step in common")


def test_a_rewound_and_a_resumed_run_are_compared_on_the_branch_they_took(tmp_path: Path) -> None:
    straight = made(tmp_path, "straight", plain([6.0, 4.0, 2.5, 2.4]))
    spiky = made(tmp_path, "spiky", rewound())
    killed = [*plain([6.0, 4.0, 9.0]), started(time=5000, step=2, steps=9), step(3, loss=2.5, time=5000.5)]
    comparison = compare_runs([straight, spiky, made(tmp_path, "resumed", killed)])
    assert [each.differs_at for each in comparison.losses] == [None, None]
    assert figures(comparison)["interruptions"] == ["—", "1 × rewound", "1 × resumed"]
    seconds = comparison.runs[2].positions("hours")
    assert seconds == pytest.approx([0.5, 1.0, 2.0]), "the time between two starts is not counted"
    # 1.5 s until it was killed and 0.5 s after it, of which the third step's first 0.5 s are lost
    assert comparison.runs[2].history.goodput == pytest.approx(1.5 / 2.0)
    assert comparison.runs[2].positions("tokens") == [1000, 2000, 3000]


def evaluation(number: int, **losses: float) -> EvaluationEvent:
    return EvaluationEvent(time=1000, step=number, losses=losses, tokens=dict.fromkeys(losses, 10), seconds=1)


def test_held_out_losses_are_those_of_the_same_step(tmp_path: Path) -> None:
    one = made(tmp_path, "one", [*plain([5.0, 4.0, 3.0]), evaluation(2, wiki=4.5), evaluation(3, wiki=3.5)])
    two = made(tmp_path, "two", [*plain([5.0, 4.0]), evaluation(2, wiki=4.25, code=2.0)])
    none = made(tmp_path, "none", plain([5.0, 4.0]))
    comparison = compare_runs([one, two, none])
    assert comparison.evaluated_step == 2
    assert figures(comparison)["held out at 2, wiki"] == ["4.5000", "4.2500", "—"]
    assert figures(comparison)["held out at 2, code"] == ["—", "2.0000", "—"]
    append(none, [evaluation(1, wiki=9.0)])
    apart = compare_runs([one, two, none])
    assert apart.evaluated_step is None
    assert figures(apart)["held out, wiki"] == ["3.5000 at step 3", "4.2500 at step 2", "9.0000 at step 1"]


def test_settings_that_differ_are_named_by_key(tmp_path: Path) -> None:
    one, two = (made(tmp_path, name, plain([5.0])) for name in ("one", "two"))
    two.recipe.write_text(two.recipe.read_text().replace("seed = 0", "seed = 7").replace('"first"', '"second"'))
    two.plan.write_text("[degrees]\nshard = 8\n")
    comparison = compare_runs([one, two])
    assert comparison.recipe == {"seed": [0, 7]}, "the name is the header"
    assert comparison.plan["degrees.pp"] == [2, 1]
    assert comparison.plan["degrees.shard"] == [2, 8]
    assert "degrees.cp" not in comparison.plan
    two.plan.unlink()
    missing = compare_runs([one, two])
    assert missing.plan == {}
    assert [len(run.notes) for run in missing.runs] == [0, 1]


def test_the_command_prints_and_draws_and_writes_json(tmp_path: Path) -> None:
    for name, losses in (("one", [5.0, 4.0, 3.0]), ("two", [5.0, 4.5, 3.5])):
        made(tmp_path, name, plain(losses))
    output = invoke(tmp_path, "one", "two", "--by", "tokens")
    assert "A  one" in output and "loss over tokens" in output and "3k tokens" in output
    assert "\x1b" not in output and "⠁" not in output, "letters where there is no color"
    answer = json.loads(invoke(tmp_path, "one", "two", "--json"))
    assert [run["label"] for run in answer["runs"]] == ["A", "B"]
    assert answer["runs"][1]["step_seconds"] == 0.5
    assert answer["losses"][0]["differs_at"] == 2
    assert answer["recipe"] == {}


@pytest.mark.parametrize("opened", [[], ["--open"]])
def test_what_is_said_of_the_page_is_no_part_of_the_json(tmp_path: Path, opened: list[str]) -> None:
    for name in ("one", "two"):
        made(tmp_path, name, plain([5.0]))
    page = tmp_path / "page.html"
    words = ["compare", "one", "two", "--json", "--html", str(page), *opened, "--runs-dir", str(tmp_path / "runs")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0
    assert len(json.loads(result.stdout)["runs"]) == 2
    assert str(page) in result.stderr and page.is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["one"], "must be 2 to 8, but 1 is given"),
        (["one", "tow"], "did you mean `two`?"),
        (["one", "two", "one"], "is given twice"),
    ],
)
def test_wrong_names_are_refused(tmp_path: Path, words: list[str], message: str) -> None:
    for name in ("one", "two"):
        made(tmp_path, name, plain([5.0]))
    result = CliRunner().invoke(app, ["compare", *words, "--runs-dir", str(tmp_path / "runs")])
    assert isinstance(result.exception, SpecError)
    assert message in str(result.exception)


def test_options_without_effect_and_an_unwritable_page_are_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        made(tmp_path, name, plain([5.0]))
    assert "--open has no effect without --html" in invoke(tmp_path, "one", "two", "--open", code=2)
    assert "--by has no effect with --json" in invoke(tmp_path, "one", "two", "--json", "--by", "hours", code=2)
    assert "cannot be written" in invoke(tmp_path, "one", "two", "--html", str(tmp_path / "no" / "p.html"), code=2)


def test_runs_without_a_step_are_shown_as_such(tmp_path: Path) -> None:
    for name in ("one", "two"):
        made(tmp_path, name, [])
    assert "No run has taken a step yet." in invoke(tmp_path, "one", "two")
    assert "No run has taken a step yet." in comparison_page(
        compare_runs([*map(RunFolder, (tmp_path / "runs").iterdir())])
    )


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    one, two = (made(tmp_path / place, "run", plain([5.0])) for place in ("here", "there"))
    assert [run.name for run in compare_runs([one, two]).runs] == [str(one.path), str(two.path)]


def test_the_page_draws_every_run_over_every_axis(tmp_path: Path) -> None:
    long = [3.0 + 1 / n for n in range(1, 301)]
    spiky = made(tmp_path, "spiky", [*rewound(), evaluation(4, wiki=3.0)])
    ended = EndEvent(time=1200, step=300, outcome="finished")
    comparison = compare_runs([spiky, made(tmp_path, "<long>", [*plain(long), ended])])
    text = comparison_page(comparison)
    assert not re.search(r"https?://|url\(|@import|<link", text), "the page must not refer to anything outside"
    words = "".join(Page(text.replace('name="axis"', "").replace("checked>", ">").replace("<input", "<meta")).words)
    assert "A: spike at step 5" not in words, "that step is of a branch that was left"
    assert "<long>" in words
    sections = re.split(r'<div class="charts by-\w+">', text)[1:]
    assert len(sections) == 3
    for section in sections:
        charts = re.findall(r'<figure class="chart (\w+)">', section)
        assert charts == ["loss", "heldout", "speed", "norm", "rate"]
        loss = section.split("</figure>")[0]
        curves = re.findall(r'<path class="(run\d) curve \w+" d="([^"]+)"', loss)
        assert [name for name, _ in curves] == ["run0", "run1"]
        answers = json.loads(re.search(r'class="points">(.*?)</script>', loss)[1])["answers"]  # type: ignore[index]
        assert [len(each) for each in answers] == [len(places(path)) for _, path in curves] == [4, 300]
    # four steps of three hundred lie in the first hundredth of the axis of steps
    first = places(re.findall(r'class="run0 curve \w+" d="([^"]+)"', sections[0])[0])
    assert [x for x, _ in first] == pytest.approx([0, 3.3, 6.7, 10.0], abs=0.06)


def test_a_terminal_curve_falls_where_the_loss_falls() -> None:
    falling = TerminalCurve(letter="A", style="red", points=[(n, 10.0 - n) for n in range(10)])
    rising = TerminalCurve(letter="B", style="blue", points=[(n, 1.0 + n) for n in range(10)])
    picture = draw_curves(
        [falling, rising], width=60, height=13, colored=False, format_value=str, format_position=str
    ).plain.splitlines()
    rows = [(line.find("A"), line.rfind("B")) for line in picture[:11]]
    ours = [row[0] for row in rows if row[0] >= 0]
    assert all(earlier < later for earlier, later in pairwise(ours)), picture
    upper, lower = picture[1], picture[9]
    assert upper.index("A") < upper.index("B") and lower.index("B") < lower.index("A"), picture
    assert any("*" in line for line in picture), "they meet in the middle"


def test_the_command_needs_no_torch(tmp_path: Path) -> None:
    for name in ("one", "two"):
        made(tmp_path, name, plain([5.0]))
    code = (
        "import sys; from danlu.cli.app import app; sys.argv = ['danlu', 'compare', 'one', 'two', '--html', 'p.html']\n"
        "try:\n    app()\nexcept SystemExit as end:\n    assert not end.code\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, capture_output=True)
