"""The page of a run and its pictures. Every event file here is written by the test."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from made_runs import append, make_run, started, step

from danlu.report import write_run_page
from danlu.report.chart import ChartMarkers, ChartSeries, downsample, log_ticks, render_chart, smooth, ticks
from danlu.report.formatting import MISSING, count, duration, flop_rate, loss, percent, scientific, size, sparkline
from danlu.report.layout_svg import elide, rank_grid
from danlu.report.run_history import RunHistory, read_run_history
from danlu.spec import (
    Chip,
    Cluster,
    Degrees,
    EndEvent,
    NetworkLevel,
    PipelineConfig,
    Plan,
    RunFolder,
    SaveEvent,
    WarningEvent,
)

VOID = {"meta", "br"}
"""Tags that HTML never closes; the pictures close theirs themselves."""


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return make_run(tmp_path / "runs" / "first-run")


class Page(HTMLParser):
    """A page taken apart: whether tags close in order, what refers outside, tiles and curves."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.curves: list[dict[str, str]] = []
        self.tiles: dict[str, list[str]] = {}
        self.words: list[str] = []
        self._tile = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self.references += [attributes[name] for name in ("src", "href", "xlink:href", "action") if name in attributes]
        if tag == "path" and attributes.get("class") in ("raw", "line"):
            self.curves.append(attributes)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if self.open[-2:] == ["dl", "dt"]:
            self._tile = data
            self.tiles[data] = []
        elif self.open[-2:] == ["dl", "dd"] and self._tile:
            self.tiles[self._tile].append(data)


def page_of(run: RunFolder) -> Page:
    text = write_run_page(run).read_text()
    assert not re.search(r"https?://|url\(|@import|<link", text), "the page must not refer to anything outside"
    page = Page(text)
    assert page.references == []
    return page


def places(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.-]+) ([\d.-]+)", path)]


# ---------------------------------------------------------------------------------------------- page


def test_the_page_of_a_short_run_shows_its_figures(run: RunFolder) -> None:
    append(
        run, [started(), *(step(number) for number in range(1, 6)), EndEvent(time=1003.0, step=5, outcome="finished")]
    )
    page = page_of(run)
    assert page.tiles["Final loss"] == ["2.8000", "1.70 below unigram 4.50"]
    assert page.tiles["Tokens per second"][0] == "2k"
    # 2,000 tokens/s × 9 MFLOP a token = 18 GFLOP/s of 90
    assert page.tiles["MFU"] == ["20.0 %", "of 90 GFLOP/s, data sheet"]
    assert page.tiles["Peak memory"] == ["3.0 GB"]
    assert page.tiles["Tokens seen"] == ["5k", "0.00333 per parameter"]
    assert page.tiles["Time"][0] == "3.0 s"
    assert "finished" in page.words
    assert "<tiny> & co" in page.words


def test_the_loss_curve_lies_where_its_values_are(run: RunFolder) -> None:
    losses = [6.0, 5.0, 4.0, 3.5, 3.0]
    append(run, [started(baseline_loss=None), *(step(n, loss=value) for n, value in enumerate(losses, start=1))])
    curve = places(page_of(run).curves[0]["d"])
    assert [x for x, _ in curve] == [200, 400, 600, 800, 1000]
    heights = [y for _, y in curve]
    share = [(y - heights[0]) / (heights[-1] - heights[0]) for y in heights]
    assert share == pytest.approx([(6.0 - value) / 3 for value in losses], abs=0.01)


def test_a_long_run_stays_light_and_keeps_its_spike(run: RunFolder) -> None:
    steps = [step(n, loss=40.0 if n == 1234 else 3.0 + 0.1 * (n % 7)) for n in range(1, 20_001)]
    append(run, [started(steps=20_000), *steps])
    page = page_of(run)
    assert run.report.stat().st_size < 500_000
    curve = places(page.curves[0]["d"])
    assert len(curve) <= 2002
    highest = min(curve, key=lambda place: place[1])
    assert highest[0] == pytest.approx(1234 / 20, abs=0.2)
    assert page.curves[0]["class"] == "raw"
    assert page.curves[1]["class"] == "line"


def test_two_thousand_steps_answer_the_pointer_at_every_drawn_point(run: RunFolder) -> None:
    append(run, [started(steps=2000), *(step(n, imbalance=1.5) for n in range(1, 2001))])
    text = write_run_page(run).read_text()
    charts = re.findall(r'<figure class="chart (\w+)">.*?</figure>', text)
    assert charts == ["loss", "speed", "norm", "rate", "memory", "balance"]
    for figure in re.findall(r"<figure.*?</figure>", text):
        answers = json.loads(re.search(r'class="points">(.*?)</script>', figure)[1])  # type: ignore[index]
        first = re.search(r'class="(?:raw|line)" d="([^"]+)"', figure)
        assert first
        assert len(answers) == len(places(first[1]))


def test_a_resumed_run_counts_every_step_once_as_it_was_taken_last(run: RunFolder) -> None:
    append(
        run,
        [started(), *(step(n, loss=9.0) for n in (1, 2, 3, 4)), SaveEvent(time=1001, step=2, path="c/2", seconds=1)],
    )
    append(run, [EndEvent(time=1002, step=4, outcome="failed", message="a node is gone")])
    append(run, [started(time=5000, step=2), step(3, loss=3.0, time=5000.5)])
    story = read_run_history(run)
    assert [(report.step, report.loss) for report in story.steps] == [(1, 9.0), (2, 9.0), (3, 3.0)]
    assert story.state == "unfinished"
    assert story.lost_steps == 2
    assert story.running_seconds == pytest.approx(2.5)
    page = page_of(run)
    assert page.tiles["Loss"][0] == "3.0000"
    assert page.tiles["Time"] == ["2.5 s", "after 1 restart, 2 steps repeated"]
    assert "resumed 1 time" in page.words
    assert "resumed from step 2" in page.words
    assert "checkpoint at step 2" in page.words


def test_mfu_is_reckoned_against_the_peak_of_the_start_a_step_belongs_to() -> None:
    story = RunHistory()
    story.add([started(), step(1), started(step=1, peak=4.5e10, world=4), step(2)])
    assert [story.step_mfu(1), story.step_mfu(2)] == pytest.approx([0.2, 0.4])
    assert story.mfu == pytest.approx(0.4), "of the newest layout"
    assert story.start_of_last_step is not None and story.start_of_last_step.peak == 4.5e10
    story.add([started(step=2, peak=1.0)])
    assert story.mfu == pytest.approx(0.4), "a start that took no step has no pace"


def test_an_mfu_above_one_is_called_out(run: RunFolder) -> None:
    append(run, [started(peak=9e9), step(1)])
    assert any("MFU is above 100 %" in words for words in page_of(run).words)


def test_a_failed_run_says_why_and_its_warnings_are_listed(run: RunFolder) -> None:
    append(run, [started(), step(1), WarningEvent(time=1001, rank=3, message="<slow> kernel"), step(2)])
    append(run, [WarningEvent(time=1001, rank=3, message="<slow> kernel")])
    append(run, [EndEvent(time=1002, step=2, outcome="failed", message="rank 3: out of memory")])
    page = page_of(run)
    assert "Failed at step 2: rank 3: out of memory" in page.words
    assert "<slow> kernel " in page.words
    assert "rank 3 · 2 times" in page.words


def test_a_skipped_step_is_marked_and_leaves_a_gap(run: RunFolder) -> None:
    skipped = step(3, loss=math.nan, norm=math.inf, committed=False)
    append(run, [started(), step(1), step(2), skipped, step(4), step(5, loss=math.nan, committed=False)])
    page = page_of(run)
    assert "2 updates skipped" in page.words
    assert "update skipped at step 3" in page.words
    assert page.curves[0]["d"].count("M") == 2
    assert "nan" not in page.curves[0]["d"]
    assert page.tiles["Loss"][0] == "3.0000"


def test_the_page_of_an_empty_run_says_so(run: RunFolder) -> None:
    page = page_of(run)
    assert "No step has been reported yet." in page.words
    assert page.curves == []
    assert page.tiles["Loss"] == [MISSING]


def test_what_cannot_be_read_is_named_on_the_page(run: RunFolder) -> None:
    append(run, [started(), step(1)])
    with run.events.open("a") as file:
        file.write('{"kind": "step", "step": "two"}\n')
    append(run, [step(2)])
    run.plan.write_text("[degrees]\nshard = 2\nshart = 3\n")
    words = "".join(page_of(run).words)
    assert f"{run.events}:3" in words
    assert "did you mean `shard`?" in words
    assert read_run_history(run).step == 2


def test_the_plan_is_drawn(run: RunFolder) -> None:
    append(run, [started(), step(1)])
    page = page_of(run)
    assert [f"rank {rank}" in page.words for rank in range(9)] == [True] * 8 + [False]
    assert "8 ranks: tp 2 across, shard 2 down." in page.words
    assert "stage 0: 3 layers, embedding" in page.words
    assert "stage 1: 3 layers, head" in page.words


# ------------------------------------------------------------------------------------------ pictures


def cluster(nodes: int = 2, chips: int = 4) -> Cluster:
    chip = Chip(name="c", kind="cpu", memory=1, memory_bandwidth=1.0, peak={"fp32": 1.0})
    node = NetworkLevel(name="node", fanout=chips, bandwidth=1.0, latency=0.0)
    return Cluster(
        name="two", chip=chip, levels=(node, NetworkLevel(name="net", fanout=nodes, bandwidth=1.0, latency=0.0))
    )


def test_ranks_on_the_mesh_follow_the_mapping() -> None:
    plain = rank_grid(Plan(degrees=Degrees(shard=2, tp=4)), cluster())
    assert plain.ranks.tolist() == [[[0, 1, 2, 3], [4, 5, 6, 7]]]
    mapped = Plan(degrees=Degrees(shard=2, tp=4), mapping={"shard": {"node": 2}})
    assert sorted(rank_grid(mapped, cluster()).ranks[0, :, 0]) == [0, 2], "the shards of one matrix share a node"


def test_a_large_mesh_is_cut_in_the_middle() -> None:
    assert elide(4, 4) == [0, 1, 2, 3]
    assert elide(100, 4) == [0, 1, None, 99]


def test_stages_go_round_or_there_and_back() -> None:
    looped = Plan(degrees=Degrees(pp=3), pipeline=PipelineConfig(schedule="interleaved", stages_per_rank=2))
    turned = Plan(degrees=Degrees(pp=3), pipeline=PipelineConfig(schedule="zbv", stages_per_rank=2))
    assert [looped.rank_of_stage(stage) for stage in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [turned.rank_of_stage(stage) for stage in range(6)] == [0, 1, 2, 2, 1, 0]
    assert [looped.stages_of_rank(rank) for rank in range(3)] == [[0, 3], [1, 4], [2, 5]]
    assert [turned.stages_of_rank(rank) for rank in range(3)] == [[0, 5], [1, 4], [2, 3]]


# -------------------------------------------------------------------------------------------- charts


def test_ticks_are_round_and_inside() -> None:
    assert ticks(0, 2000, 6) == [0, 500, 1000, 1500, 2000]
    assert ticks(2.31, 2.94, 4) == [2.4, 2.6, 2.8]
    assert ticks(3, 3, 4) == [3]
    assert log_ticks(0.3, 9) == [0.5, 1, 2, 5]
    assert log_ticks(1e-3, 1e3) == [1e-3, 1e-2, 1e-1, 1, 10, 100, 1000]


def test_thinning_keeps_the_extremes_of_every_column() -> None:
    points = [(float(n), math.sin(n * 0.7) + (50 if n == 4321 else -50 if n == 77 else 0)) for n in range(10_000)]
    thinned = downsample(points, 100)
    assert len(thinned) <= 202
    assert thinned == sorted(thinned)
    assert {points[0], points[77], points[4321], points[-1]} <= set(thinned)
    for column in range(100):
        group = [point for point in points[1:-1] if int(point[0] / 9999 * 100) == column]
        assert {min(group, key=lambda p: p[1]), max(group, key=lambda p: p[1])} <= set(thinned)
    assert downsample(points[:200], 100) == points[:200]


def test_smoothing_takes_the_noise_and_keeps_the_line() -> None:
    line_points = [(float(n), 2.0 * n) for n in range(1000)]
    assert [value for _, value in smooth(line_points)[:900]] == pytest.approx([2.0 * n for n in range(900)])
    noisy = [(float(n), 1.0 + (-1) ** n) for n in range(1000)]
    assert all(abs(value - 1) < 0.1 for _, value in smooth(noisy)[50:])


def test_a_value_that_is_no_number_does_not_break_the_scale() -> None:
    curve = ChartSeries(name="loss", title="L", points=[(1, math.nan), (2, math.inf)], format_value=loss, log_ratio=3)
    assert "nan" not in render_chart(curve, ChartMarkers(), (0, 2), height=100, columns=100)


def test_figures_are_written_as_people_read_them() -> None:
    assert [count(v) for v in (0, 7, 999.96, 1234, 999_960, 1.5e9, None)] == [
        "0",
        "7",
        "1k",
        "1.23k",
        "1M",
        "1.5B",
        MISSING,
    ]
    assert [size(v) for v in (10, 1500, 3e9, 4e12)] == ["10 B", "1.5 kB", "3.0 GB", "4.0 TB"]
    assert [duration(v) for v in (1.25, 59, 61, 3600, 90_000)] == ["1.2 s", "59 s", "1 min 1 s", "1 h", "1 d 1 h"]
    assert [percent(v) for v in (0.4123, 0.0123)] == ["41.2 %", "1.23 %"]
    assert [scientific(v) for v in (3e-4, 0, 1.25e-5)] == ["3e-4", "0", "1.25e-5"]
    assert flop_rate(2.496e15) == "2.5 PFLOP/s"
    assert sparkline([8, 7, 6, 5, 4, 3, 2, 1]) == "█▇▆▅▄▃▂▁"
    assert sparkline([math.nan]) == ""
