"""`danlu top`: what it shows of a run, with and without a terminal."""

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from textual.widgets import DataTable, RichLog, Static
from typer.testing import CliRunner

from danlu.cli.app import app
from danlu.comm.flight_record import FlightWriter, flight_path, make_flight_folder, remove_flights
from danlu.report.live_view import LiveRun
from danlu.report.top_app import TopApp
from danlu.spec import RecoveryEvent, RunFolder, StartEvent, StepEvent, WarningEvent, toml
from danlu.spec.plan import Degrees, Plan

NOW = 1_790_000_000.0


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    """Two ranks in their tenth step, of which the second is waited for; a fault and a warning lie behind them."""
    run = RunFolder(tmp_path / "runs" / "alive")
    run.path.mkdir(parents=True)
    run.plan.write_text(toml.dumps(Plan(degrees=Degrees(shard=2))))
    start = StartEvent(
        time=NOW, world=2, chip="cpu", parameters=10, step=0, steps=50, tokens_per_step=100, flops_per_token=1.0,
        peak=1e9, peak_source="data sheet", host="here",
    )  # fmt: skip
    steps = [
        StepEvent(
            time=NOW + step, step=step, loss=3.0, norm=1.0, learning_rate=1e-3, tokens=100, seconds=0.5, memory=1 << 20
        )
        for step in range(1, 10)
    ]
    fault = RecoveryEvent(
        time=NOW + 5.5, step=5, generation=1, ranks=(1,), cause="rank 1 was killed", source="memory", seconds=0.7
    )
    warning = WarningEvent(time=NOW + 6, rank=1, message="rank 1 is slow: the other ranks spend 17% of their time")
    events = [start, *steps[:5], fault, warning, *steps[5:]]
    run.events.write_text("".join(event.model_dump_json() + "\n" for event in events))
    make_flight_folder(run.path)
    for rank in range(2):
        writer = FlightWriter(flight_path(run.path, rank), rank)
        writer.describe("0", "shard", (0, 1))
        writer.enter_phase("metrics" if rank == 0 else "reading data", 9)
        if rank == 0:
            writer.enter("all_reduce", "0", 4, None)
        writer.beat()
    yield run
    remove_flights(run.path)


def test_the_screen_has_the_run_its_ranks_and_what_happened(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("danlu.report.flight_tables.HEARTBEAT_LIMIT", 60.0)  # no thread beats here, as one of a rank

    async def look() -> tuple[str, list[list[str]], list[str], list[list[str]]]:
        application = TopApp(LiveRun(run))
        async with application.run_test(size=(140, 40)) as pilot:
            await pilot.pause(0.3)
            table = application.query_one(DataTable)
            said = str(application.query_one("#headline", Static).render())
            lines = [line.text for line in application.query_one(RichLog).lines]
            before = [[str(cell) for cell in table.get_row_at(row)] for row in range(table.row_count)]
            await pilot.press("w")
            after = [[str(cell) for cell in table.get_row_at(row)] for row in range(table.row_count)]
            return said, before, lines, after

    said, rows, lines, by_waiting = asyncio.run(look())
    assert "alive  step 9 of 50  2 ranks on cpu" in said
    assert "goodput 50.0%" in said and "1 fault survived" in said
    assert [row[:5] for row in rows] == [
        ["0", "shard 0", "runs", "9", "metrics"],
        ["1", "shard 1", "runs", "9", "reading data"],
    ]
    assert rows[0][7].startswith("all_reduce 1 of shard")
    assert any("fault at step 5: rank 1 was killed" in line for line in lines)
    assert any("rank 1 is slow" in line for line in lines)
    assert len(by_waiting) == 2


def test_machines_read_it_once(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.path.parents[1])
    began = time.monotonic()
    done = CliRunner().invoke(app, ["top", "alive", "--json"])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.output)
    assert [(row["rank"], row["place"], row["step"]) for row in rows] == [(0, "shard 0", 9), (1, "shard 1", 9)]
    assert time.monotonic() - began < 30
