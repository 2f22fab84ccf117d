"""The page of a dry run, from traces made by hand: it is whole, and its figures are those of the traces."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import typer
from made_dryruns import GB, LEVELS, MB, made_dryrun

from danlu.cli.dryrun_output import write_dryrun_page
from danlu.report.chart import BarSegment, byte_unit, render_bar
from danlu.report.dryrun_memory import COLUMNS, HEIGHT, STACK_ORDER, max_memory_trace
from danlu.report.dryrun_operators import phase_flops, top_modules
from danlu.report.dryrun_page import describe_layout, dryrun_page, verdict
from danlu.report.dryrun_schedule import MAX_PIPELINE_ROWS, time_schedule
from danlu.report.dryrun_traffic import total_payload_bytes, total_wire_bytes, traffic_rows
from danlu.report.formatting import flop_count, flop_rate, size
from danlu.spec.trace import MEMORY_KINDS, DryRun, MemorySample, OperatorStats

VOID = {"meta", "br"}
"""Tags that HTML never closes; the pictures close theirs themselves."""


class Page(HTMLParser):
    """A page taken apart: whether tags close in order, its words, and tags by their first class."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.tags: dict[str, list[dict[str, str]]] = {}
        self.titles: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        assert not {"src", "href", "xlink:href", "action"} & set(attributes), "the page must refer to nothing outside"
        for name in attributes.get("class", "").split():
            self.tags.setdefault(name, []).append(attributes | {"tag": tag})

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            (self.titles if self.open[-1:] == ["title"] else self.words).append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)

    def count(self, name: str) -> int:
        return len(self.tags.get(name, []))


def page_of(run: DryRun) -> Page:
    text = dryrun_page(run)
    assert not re.search(r"https?://|url\(|@import|<link|<script", text)
    assert "llama <70B>" not in text, "names must be escaped"
    return Page(text)


# ---------------------------------------------------------------------------------------------- whole


@pytest.mark.parametrize(
    "run",
    [
        made_dryrun(),
        made_dryrun(places=1, microbatches=1, limit=None, with_cluster=False, recompute=False),
        made_dryrun(places=16, microbatches=32, limit=20 * GB),
        made_dryrun(microbatches=256),
        made_dryrun(schedule="interleaved", stages_per_place=2, layers=4),
        made_dryrun(schedule="gpipe", microbatches=64, run_places=1),
    ],
    ids=["usual", "alone", "sixteen", "many microbatches", "interleaved", "one of four run"],
)
def test_every_section_is_there(run: DryRun) -> None:
    page = page_of(run)
    for title in ("Memory over the step", "Bytes by network level and axis", "Heaviest operators"):
        assert page.words.count(title) == len(run.traces)
    assert ("Pipeline" in page.words) == bool(run.schedule)
    assert ("Memory of every rank at its peak" in page.words) == (len(run.traces) > 1)
    assert verdict(run) in page.words
    assert [tag for tag in page.tags["rank"] if "open" in tag] == [
        page.tags["rank"][run.traces.index(max_memory_trace(run.traces))]
    ]
    assert "nan" not in page.text and "inf" not in page.text


def test_a_page_of_sixteen_ranks_stays_light() -> None:
    assert len(dryrun_page(made_dryrun(places=16, microbatches=64))) < 3_000_000


def test_a_page_without_a_trace_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one rank"):
        dryrun_page(made_dryrun().model_copy(update={"traces": ()}))


def test_the_page_needs_no_torch() -> None:
    code = "import sys, danlu.report.dryrun_page, danlu.cli.dryrun_output; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --------------------------------------------------------------------------------------------- header


def test_the_verdict_names_the_peak() -> None:
    run = made_dryrun(limit=80 * GB)
    assert verdict(run) == (
        "Fits: needs 27.5 of 80 GB; the peak is in backward of blocks.7.mlp.down, microbatch 0, on rank 0."
    )
    assert verdict(made_dryrun(limit=24 * GB)).startswith("Does not fit: needs 27.5 of 24 GB, 3.5 GB over; ")
    assert verdict(made_dryrun(limit=2000 * GB)).startswith("Fits: needs 27.5 GB of 2 TB; ")
    alone = verdict(made_dryrun(limit=None, microbatches=1))
    assert alone.startswith("Needs ") and "microbatch" not in alone


def test_a_peak_outside_any_module_is_named_by_its_phase() -> None:
    run = made_dryrun(places=1)
    high = MemorySample(at=5, phase="optimizer", module="", held=(90 * GB, 0, 0, 0, 0, 0))
    changed = run.traces[0].model_copy(update={"peak": high})
    assert verdict(run.model_copy(update={"traces": (changed,)})).endswith("the peak is in optimizer on rank 0.")


def test_degrees_in_plain_words() -> None:
    assert describe_layout({"pp": 4, "replicate": 1, "shard": 1024, "tp": 8, "ep": 16}) == (
        "pipeline over 4 ranks · states sharded over 1,024 · tensor parallel over 8 · expert parallel over 16"
    )
    assert describe_layout({"pp": 1}) == "one rank"


def test_ranks_that_were_not_run_are_counted() -> None:
    assert "3,072 of 4,096 ranks do different work" in page_of(made_dryrun(run_places=1)).text
    assert "do different work" not in page_of(made_dryrun()).text
    folded = made_dryrun()
    traces = tuple(trace.model_copy(update={"folded": 18}) for trace in folded.traces)
    folded = folded.model_copy(update={"traces": traces})
    assert "Up to 18 identical layers of a rank were extrapolated" in page_of(folded).text


def test_tiles_say_the_most_of_any_rank() -> None:
    run = made_dryrun()
    text = page_of(run).text
    assert f"Work per step {flop_count(max(trace.flops for trace in run.traces))}" in text
    assert f"On the wire per step {size(max(map(total_wire_bytes, run.traces)))}" in text
    assert "Dry run took 12 s" in text  # 1.5 + 2.5 + 3.5 + 4.5


# --------------------------------------------------------------------------------------------- memory


def outline(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"([\d.-]+) ([\d.-]+)", path)]


def test_the_stack_is_as_high_as_what_is_held() -> None:
    run = made_dryrun(places=1, limit=None)
    page, peak = page_of(run), run.traces[0].peak
    areas = {tag["class"].split()[1]: outline(tag["d"]) for tag in page.tags["area"]}
    assert list(areas) == [f"k-{kind}" for kind in STACK_ORDER]
    top = min(y for _, y in areas["k-communication"])
    scale = (HEIGHT - top) / peak.total
    below = 0
    for kind in STACK_ORDER:
        points = areas[f"k-{kind}"]
        upper = points[: len(points) // 2]
        at_peak = min(upper, key=lambda point: abs(point[0] - float(page.tags["dot-end"][0]["d"].split()[0][1:])))
        below += peak.held[MEMORY_KINDS.index(kind)]
        assert HEIGHT - at_peak[1] == pytest.approx(below * scale, abs=0.3)


def test_the_legend_is_the_stack_from_its_top() -> None:
    text = dryrun_page(made_dryrun(places=1))
    table = text[text.index('class="peak-table"') :]
    assert re.findall(r'<i class="k-(\w+)">', table) == list(reversed(STACK_ORDER))
    numbers = re.findall(r'<td class="number">([^<]+)</td>', table)[: 2 * len(STACK_ORDER) + 1]
    assert numbers[-1] == "21.3 GB"  # 2 + 4 + 6 + 4 + 5, and 192 MB of buffers
    assert numbers[2] == "5.0 GB" and numbers[3] == "23.7 %"


def test_the_peak_is_annotated_and_answers_the_pointer() -> None:
    run = made_dryrun(places=1)
    page = page_of(run)
    assert "21.3 GB" in page.words and " in backward of blocks.7.mlp.down · microbatch 0" in page.words
    assert page.count("hit") <= COLUMNS
    told = next(title for title in page.titles if title.startswith("backward of blocks.7.mlp.down, microbatch 0\n"))
    assert told.split("\n")[1:3] == ["21.3 GB total", "communication buffers 192.0 MB"]


def test_phases_and_microbatches_are_marked() -> None:
    page = page_of(made_dryrun(places=1, microbatches=2, recompute=False))
    phases = [tag["title"] for tag in page.tags["p-forward"] if "title" in tag and tag["title"].startswith("phase")]
    assert phases == ["phase forward"] * 2
    marks = [tag for name in ("m0", "m1") for tag in page.tags[name]]
    assert [tag["title"] for tag in marks] == ["microbatch 0", "microbatch 1"]
    assert "change too often" in page_of(made_dryrun(places=1, microbatches=256)).text


@pytest.mark.parametrize(("limit", "lines"), [(80 * GB, 0), (30 * GB, 1), (20 * GB, 1), (None, 0)])
def test_a_limit_is_drawn_where_it_is_near(limit: int | None, lines: int) -> None:
    page = page_of(made_dryrun(places=1, limit=limit))
    assert len([tag for tag in page.tags.get("limit", []) if tag["tag"] == "line"]) == lines
    if limit == 20 * GB:
        assert "1.3 GB over the chip's 20 GB" in page.text


def test_many_instants_keep_their_spike() -> None:
    run = made_dryrun(places=1, limit=None)
    trace = run.traces[0]
    flat = [MemorySample(at=at, phase="forward", module="m", held=(GB, 0, 0, 0, 0, 0)) for at in range(20_000)]
    spike = MemorySample(at=7_777, phase="backward", module="m", held=(GB, 0, 0, 0, 9 * GB, 0))
    flat[7_777] = spike
    page = page_of(
        run.model_copy(update={"traces": (trace.model_copy(update={"memory": tuple(flat), "peak": spike}),)})
    )
    (area,) = [tag for tag in page.tags["area"] if "k-activations" in tag["class"]]
    assert len(area["d"]) < 20_000
    assert min(y for _, y in outline(area["d"])) == pytest.approx(HEIGHT * (1 - 1 / 1.06), abs=0.1)


# -------------------------------------------------------------------------------------------- network


def test_traffic_adds_up_alike_calls() -> None:
    trace = made_dryrun().traces[0]
    rows = traffic_rows(trace)
    assert sum(row.payload for row in rows) == sum(call.total_payload for call in trace.collectives)
    assert sum(row.wire for row in rows) == total_wire_bytes(trace)
    assert total_payload_bytes(trace) == sum(row.payload for row in rows) - 8 * 512 * MB, "what is received is not sent"
    (gathers,) = [row for row in rows if (row.axes, row.operation) == ("shard", "all_gather")]
    put_in = (8 * 16 + 4) * MB
    assert (gathers.calls, gathers.payload, gathers.level) == (9, put_in, "pod")
    assert gathers.wire == 31 * put_in, "its part goes around a ring of 32"
    assert [row.wire for row in rows] == sorted((row.wire for row in rows), reverse=True)


def test_a_bar_for_every_level_innermost_first() -> None:
    text = dryrun_page(made_dryrun(run_places=1))
    section = text[text.index("Bytes by network level") : text.index("Heaviest operators")]
    assert tuple(re.findall(r'<div class="level"><span>(\w+)</span>', section)) == LEVELS
    widths = re.findall(r'<i class="a-(\w+)[^"]*" style="width:([\d.]+)%"', section)
    assert [axis for axis, _ in widths] == ["tp", "shard", "replicate", "replicate", "pp", "other"]
    by_axis = {axis: float(width) for axis, width in reversed(widths)}
    assert by_axis["tp"] == 100
    assert by_axis["shard"] == pytest.approx(100 * (8192 * 31 / 32 + 132 * 31) / (16384 * 7 / 8 + 2560 * 7), abs=0.01)


def test_a_level_that_nothing_crosses_is_shown_empty() -> None:
    run = made_dryrun(run_places=1).model_copy(update={"levels": ("chip", *LEVELS)})
    assert "chip nothing" in page_of(run).text


def test_without_a_cluster_there_is_one_bar() -> None:
    page = page_of(made_dryrun(places=1, with_cluster=False))
    assert "network" in page.words and "level" not in page.words


# ------------------------------------------------------------------------------------------- pipeline


def test_boxes_are_as_wide_as_their_flops() -> None:
    run = made_dryrun()
    timed = time_schedule(run)
    assert timed is not None and "FLOPs" in timed.note
    last = phase_flops(run.traces[3])
    slots = {str(slot.action): slot for slot in timed.timeline.actions_by_rank[3]}
    assert slots["F3.0"].end - slots["F3.0"].start == pytest.approx(last["forward"] / 8)
    assert slots["B3.0"].end - slots["B3.0"].start == pytest.approx((last["backward"] + last["recompute"]) / 8)
    page = page_of(run)
    assert page.count("b-F") == page.count("b-B") == 4 * 8 + 1  # the key has one too
    assert f"{timed.timeline.bubble_fraction:.1%}".replace("%", " %") in page.words


@pytest.mark.parametrize(("recompute", "backward"), [(True, 3), (False, 2)])
def test_the_usual_widths_where_not_every_place_was_run(recompute: bool, backward: int) -> None:
    run = made_dryrun(run_places=2, recompute=recompute)
    timed = time_schedule(run)
    assert timed is not None and f"forward 1, backward {backward}." in timed.note
    assert timed.timeline.bubble_fraction == pytest.approx(3 / 11)
    assert "27.3 %" in page_of(run).words


def test_halves_have_their_own_widths() -> None:
    order = (("F0.0", "F0.1", "I0.0", "W0.0", "I0.1", "W0.1"), ("F1.0", "I1.0", "F1.1", "I1.1", "W1.0", "W1.1"))
    part = made_dryrun(places=2, microbatches=2, run_places=1).model_copy(update={"schedule": order})
    timed = time_schedule(part)
    assert timed is not None and "forward 1, backward for inputs 2, backward for weights 1." in timed.note
    whole = made_dryrun(places=2, microbatches=2).model_copy(update={"schedule": order})
    flops_of = phase_flops(whole.traces[0])
    timed = time_schedule(whole)
    assert timed is not None
    lengths = {slot.action.kind: slot.end - slot.start for slot in timed.timeline.actions_by_rank[0]}
    assert lengths["W"] == pytest.approx(flops_of["backward"] / 4)
    assert lengths["I"] == pytest.approx((flops_of["recompute"] + flops_of["backward"] / 2) / 2)
    assert {"b-I", "b-W"} <= set(page_of(whole).tags)


def test_a_long_schedule_is_cut_and_says_so() -> None:
    page = page_of(made_dryrun(microbatches=256))
    assert page.count("b-F") + page.count("b-B") < 300
    assert "Shown are the first and the last" in page.text
    assert "Shown are" not in page_of(made_dryrun(microbatches=8)).text


def test_places_are_elided_when_there_are_many() -> None:
    page = page_of(made_dryrun(places=64, microbatches=64, run_places=1))
    assert len([word for word in page.words if re.fullmatch(r"pp rank \d+", word)]) == MAX_PIPELINE_ROWS - 1
    assert "pp rank 63" in page.words


def test_stages_of_one_place_differ_in_shade() -> None:
    page = page_of(made_dryrun(schedule="interleaved", stages_per_place=2, layers=4))
    assert page.count("t0") > 32 and page.count("t1") > 32


def test_a_schedule_that_cannot_run_is_told() -> None:
    broken = made_dryrun().model_copy(update={"schedule": (("F0.0", "B0.0"), ("F1.0",))})
    page = page_of(broken)
    assert "The schedule cannot be drawn: the schedule must finish, but rank 0 waits" in page.text


# ------------------------------------------------------------------------------------------ operators


def test_operators_are_joined_by_module_and_phase() -> None:
    trace = made_dryrun().traces[0]
    shares = top_modules(trace.operators, lambda operator: operator.flops * operator.count)
    assert (shares[0].phase, shares[0].amount) == ("backward", 7e11 * 8 * 8 * 2)
    assert sum(share.amount for share in shares) == pytest.approx(trace.flops)
    assert not any("norm" in share.module for share in shares)
    two = [
        OperatorStats(name=name, phase="forward", module="m", inputs=(), outputs=(), flops=0.0, bytes=moved, count=2)
        for name, moved in (("aten.add", 1), ("aten.mul", 5))
    ]
    (share,) = top_modules(two, lambda operator: float(operator.bytes * operator.count))
    assert share.operators == ("aten.mul", "aten.add") and share.calls == 4 and share.amount == 12


def test_the_heaviest_operators_are_shown_with_their_share() -> None:
    run = made_dryrun(places=1)
    text = dryrun_page(run)
    table = text[text.index("By FLOPs") : text.index("By bytes read and written")]
    assert table.count("<tr>") == 13
    top = top_modules(run.traces[0].operators, lambda operator: operator.flops * operator.count)[0]
    assert f"<span>{top.amount / run.traces[0].flops:.1%}".replace("%", " %</span>") in table
    assert "25.0 % forward" not in table and "recompute" in table


# -------------------------------------------------------------------------------------------- command


def test_the_page_is_written_where_it_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_dryrun_page(made_dryrun(), tmp_path / "p.html", open_page=False)
    assert (tmp_path / "p.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert capsys.readouterr().out == f"The page is in {tmp_path / 'p.html'}\n"
    write_dryrun_page(made_dryrun(), tmp_path / "p.html", open_page=False, err=True)
    assert capsys.readouterr() == ("", f"The page is in {tmp_path / 'p.html'}\n")
    with pytest.raises(typer.Exit) as ended:
        write_dryrun_page(made_dryrun(), tmp_path / "nowhere" / "p.html", open_page=False)
    assert ended.value.exit_code == 2
    assert "The page cannot be written" in capsys.readouterr().err


def test_the_page_is_opened_or_the_reason_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = made_dryrun().model_copy(update={"name": "llama"})
    write_dryrun_page(run, None, open_page=True)
    assert capsys.readouterr().out == (
        "The page was not opened, because the output is not a terminal: llama.dryrun.html\n"
    )
    opened: list[str] = []
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr("webbrowser.get", lambda: None)
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    write_dryrun_page(run, None, open_page=True)
    assert opened == [(tmp_path / "llama.dryrun.html").as_uri()]


def test_nothing_is_written_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_dryrun_page(made_dryrun(), None, open_page=False)
    assert list(tmp_path.iterdir()) == []


# --------------------------------------------------------------------------------------------- pieces


def test_a_bar_has_what_is_there() -> None:
    text = render_bar(
        [BarSegment("a", 1, "one < two"), BarSegment("b", 0, "nothing"), BarSegment("c", 3, "three")], full=4
    )
    assert re.findall(r'class="(\w)" style="width:([\d.]+)%"', text) == [("a", "25.00"), ("c", "75.00")]
    assert "one &lt; two" in text


def test_units_of_an_axis_and_of_work() -> None:
    assert [byte_unit(most) for most in (0, 1999, 2000, 27 * GB)] == [1, 1, 1000, GB]
    assert (flop_count(0), flop_count(2.49e15), flop_rate(2.49e15), flop_rate(None)) == (
        "0 FLOP",
        "2.49 PFLOP",
        "2.49 PFLOP/s",
        "—",
    )


def test_the_page_shows_payload_and_wire_of_every_operation() -> None:
    text = page_of(made_dryrun(run_places=1)).text
    (row,) = [
        row for row in traffic_rows(made_dryrun().traces[0]) if (row.axes, row.operation) == ("shard", "all_gather")
    ]
    assert f"{size(row.payload)} {size(row.wire)}" in text
