"""No two parts of one chart share a color, figures stay in one piece, and every start keeps its own medians."""

import re
from importlib.resources import files
from itertools import combinations
from pathlib import Path

import pytest
from made_questions import EXPERTS, machine, question
from made_runs import append, make_run, started, step

from danlu.planner import search
from danlu.planner.explain import PART_LABELS, level_costs
from danlu.report.dryrun_page import dryrun_page
from danlu.report.plan_page import plan_page
from danlu.report.run_comparison import MAX_RUNS
from danlu.report.run_history import read_run_history
from danlu.report.run_page import write_run_page

Color = tuple[int, int, int]


def _style() -> str:
    return "".join(
        files("danlu.report").joinpath(name).read_text() for name in ("page.css", "dryrun.css", "comparison.css")
    )


def _color(classes: str, theme: str) -> Color:
    """The color that the page's style gives to an element of these classes, blended with the card where it is faint."""
    style = _style()
    roots = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    variables = dict(re.findall(r"--([\w-]+): (#\w+)", roots[0]))
    if theme == "dark":
        variables |= dict(re.findall(r"--([\w-]+): (#\w+)", roots[1]))
    tone = ""
    for name in classes.split():
        found = re.search(rf"\.{re.escape(name)} \{{ --tone: ([^;]+);", style)
        tone = found[1] if found else tone
    text = variables[tone[6:-1]] if tone.startswith("var(--") else tone
    assert re.fullmatch(r"#[0-9a-f]{6}", text), (classes, text)
    color, card = (tuple(int(value[at : at + 2], 16) for at in (1, 3, 5)) for value in (text, variables["card"]))
    share = 0.6 if "mixed" in classes.split() else 1.0
    return tuple(round(share * over + (1 - share) * under) for over, under in zip(color, card, strict=True))  # type: ignore[return-value]


def _apart(one: Color, other: Color) -> int:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True))


def _charts(page: str) -> list[dict[str, str]]:
    """For every legend of a page, its words and the classes that color them."""
    legends = re.findall(r'<div class="swatches">(.*?)</div>', page)
    return [dict(re.findall(r'<span><i class="([^"]+)"></i>([^<]+)</span>', each)) for each in legends]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_part_of_a_step_has_a_color_of_its_own(theme: str) -> None:
    colors = {name: _color(f"s-{name}", theme) for name in PART_LABELS}
    for one, other in combinations(colors, 2):
        assert _apart(colors[one], colors[other]) >= 48, (one, other)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_compared_run_has_a_color_of_its_own(theme: str) -> None:
    colors = [_color(f"run{n}", theme) for n in range(MAX_RUNS)]
    for one, other in combinations(range(MAX_RUNS), 2):
        assert _apart(colors[one], colors[other]) >= 48, (one, other)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_no_two_parts_of_a_chart_of_a_plan_share_a_color(theme: str) -> None:
    answer = search(question(EXPERTS, chips=8, cluster=machine(nodes=2), fix="pp=2,schedule=1f1b", length=4096), 4)
    charts = _charts(plan_page(answer, level_costs(answer.best[0]), [], None))
    assert max(len(chart) for chart in charts) >= 8
    for chart in charts:
        for (one, first), (other, second) in combinations(chart.items(), 2):
            assert _apart(_color(one, theme), _color(other, theme)) >= 48, (first, second)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_curve_of_a_run_has_a_color(tmp_path: Path, theme: str) -> None:
    run = make_run(tmp_path / "mixed")
    more = {"imbalance": 1.5, "all_to_all_seconds": 0.1, "traffic": {"node": 10**6, "trunk": 10**5}}
    append(run, [started(steps=3), *(step(number, **more) for number in (1, 2, 3))])
    curves = re.findall(r'<figure class="chart (\w+)[ "]', write_run_page(run).read_text())
    assert {"loss", "balance", "exchange", "traffic"} <= set(curves)
    for curve in curves:
        assert _color(curve, theme)


def test_names_of_operators_are_shown_whole_and_figures_do_not_break() -> None:
    from made_dryruns import made_dryrun

    style = _style()
    assert "ellipsis" not in re.search(r"\.operators small \{([^}]*)\}", style)[1]  # type: ignore[index]
    assert re.search(r"\.figures td, \.figures th,[^{]*\{ white-space: nowrap; \}", style)
    answer = search(question(chips=8, cluster=machine(nodes=2), without="pp"), 1)
    assert '<table class="figures">' in plan_page(answer, level_costs(answer.best[0]), [], None)
    assert "scaled_dot_product" in dryrun_page(made_dryrun()) or "aten." in dryrun_page(made_dryrun())


def test_every_start_keeps_its_own_medians(tmp_path: Path) -> None:
    run = make_run(tmp_path / "moved")
    first = started(layout={"shard": 8}, host="atlas", dtype="bf16", steps=60)
    second = started(time=2000.0, step=3, layout={"tp": 2}, world=2, host="boreas", dtype="bf16", peak=2e10, steps=60)
    append(run, [first, *(step(number, memory=9 * 10**9) for number in (1, 2, 3, 4))])
    append(run, [second, *(step(number, seconds=2.0, memory=2 * 10**9) for number in (4, 5))])
    story = read_run_history(run)
    assert (story.stats_of(story.starts[0]).steps, story.stats_of(story.starts[1]).steps) == (3, 2)
    assert story.stats_of(story.starts[0]).tokens_per_second == 2000
    assert (story.tokens_per_second, story.memory) == (500, 2 * 10**9)  # not the first layout's 9 GB
    page = write_run_page(run).read_text()
    table = page[page.index("<h2>Starts</h2>") : page.index("<h2>Curves</h2>")]
    for cell in ("shard 8, 8 ranks", "tp 2, 2 ranks", "on atlas", "on boreas", "9.0 GB", "2.0 GB", "2k", "500"):
        assert cell in table, cell
