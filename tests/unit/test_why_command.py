"""`danlu why`: what it says of ranks that wait, that go on, and that are gone."""

import json
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from typer.testing import CliRunner

from danlu.cli.app import app
from danlu.comm.flight_record import FlightWriter, flight_path, make_flight_folder, remove_flights
from danlu.resilience.stacks import dump_stacks_on_signal
from danlu.spec import EndEvent, RunFolder


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunFolder]:
    """The folder of a run."""
    monkeypatch.setattr("danlu.cli.why._LOOK_SECONDS", 0.2)
    for reader in ("report.flight_tables", "resilience.diagnosis"):  # no thread beats here, as one of a rank
        monkeypatch.setattr(f"danlu.{reader}.HEARTBEAT_LIMIT", 60.0)
    made = RunFolder(tmp_path / "runs" / "slow")
    made.path.mkdir(parents=True)
    for file in (made.recipe, made.plan, made.events):
        file.write_text("")
    yield made
    remove_flights(made.path)


@pytest.fixture
def ranks(run: RunFolder) -> list[FlightWriter]:
    """Rank 0 is in a collective that rank 1 has not entered; both are this process."""
    make_flight_folder(run.path)
    writers = []
    for rank in range(2):
        dump_stacks_on_signal(run.path, rank)
        writer = FlightWriter(flight_path(run.path, rank), rank)
        writer.describe("0", "world", [0, 1])
        writer.enter_phase("metrics" if rank == 0 else "reading data", 41)
        writer.leave(writer.enter("all_reduce", "0", 4, None))
        if rank == 0:
            writer.enter("all_reduce", "0", 4, None)
        writers.append(writer)
    return writers


def ask(run: RunFolder, *options: str) -> str:
    result = CliRunner().invoke(app, ["why", str(run.path), *options], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    return result.output


def test_the_rank_that_is_waited_for_is_named(run: RunFolder, ranks: list[FlightWriter]) -> None:
    said = " ".join(ask(run).split())
    assert "nothing moves: rank 1 " in said
    assert "it reads data; rank 0 waits for it in all_reduce 2 of world, 4 B" in said
    assert "where rank 1 is" in said  # taken by a signal to this very process, which lives on


def test_the_same_for_machines(run: RunFolder, ranks: list[FlightWriter]) -> None:
    told = json.loads(ask(run, "--json"))
    assert [(each["rank"], each["cause"]) for each in told["culprits"]] == [(1, "data")]
    assert "test_why_command" in told["culprits"][0]["stacks"]
    assert told["waiting"] == [0]
    assert [each["in_collective"] for each in told["ranks"]] == [True, False]


def test_nobody_is_blamed_while_the_run_goes_on(run: RunFolder, ranks: list[FlightWriter]) -> None:
    over = threading.Event()

    def move() -> None:
        for step in count(41):
            ranks[1].enter_phase("forward and backward", step)
            if over.wait(0.1):
                return

    moving = threading.Thread(target=move)
    moving.start()
    said = ask(run)
    over.set()
    moving.join()
    assert "the run goes on" in said
    assert "nothing moves" not in said
    assert "where rank" not in said


def test_a_run_that_ended_says_how(run: RunFolder) -> None:
    end = EndEvent(time=1.0, step=7, outcome="failed", message="rank 3 was killed by SIGKILL")
    run.events.write_text(end.model_dump_json() + "\n")
    assert "slow failed after step 7: rank 3 was killed by SIGKILL" in ask(run)


def test_a_run_elsewhere_is_an_error(run: RunFolder) -> None:
    result = CliRunner().invoke(app, ["why", str(run.path)])
    assert result.exit_code != 0
    assert "nothing is known of slow's ranks on this host" in result.output
