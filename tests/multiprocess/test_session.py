"""A training process can leave its world and join another: three worlds in a row are, bit for bit, one."""

import json
from pathlib import Path
from typing import Any

import pytest
from layouts import recipe
from ranks import run_ranks
from session_rank import STEPS

from danlu.spec import toml
from danlu.spec.plan import Degrees, Plan
from danlu.spec.run_folder import RunFolder

RANK = Path(__file__).parent / "session_rank.py"


@pytest.fixture(scope="module")
def sessions(folder: Path) -> Path:
    """The folder of all runs, after two ranks have trained them."""
    plan = Plan(degrees=Degrees(shard=2), microbatches=2)
    in_parts = Plan(degrees=Degrees(shard=2, ep=2), dispatch_chunks=2)
    for name, steps, model, wanted in (
        ("one", STEPS, "tiny-llama", plan),
        ("three", STEPS, "tiny-llama", plan),
        ("parts", 1, "tiny-moe", in_parts),
    ):
        run = RunFolder(folder / name)
        run.path.mkdir()
        run.recipe.write_text(toml.dumps(recipe(model, str(folder / "shards")).model_copy(update={"steps": steps})))
        run.plan.write_text(toml.dumps(wanted))
    run_ranks(RANK, 2, str(folder), seconds=900)
    return folder


def test_three_worlds_in_a_row_are_one_run(sessions: Path) -> None:
    assert json.loads((sessions / "one-0.json").read_text()) == ["finished"]
    assert json.loads((sessions / "three-1.json").read_text()) == ["stopped", "stopped", "finished"]
    assert _steps(sessions / "one") == _steps(sessions / "three")
    assert _fingerprints(sessions / "one") == _fingerprints(sessions / "three")


def test_tokens_in_parts_that_hide_nothing_are_warned_of(sessions: Path) -> None:
    """Through the memory of a host all-to-alls are over when they return."""
    assert json.loads((sessions / "parts-0.json").read_text()) == ["finished"]
    [warning] = _warnings(sessions / "parts")
    assert "`dispatch_chunks` is 2" in warning and "set `dispatch_chunks = 1`" in warning
    assert _warnings(sessions / "one") == []


def _warnings(run: Path) -> list[str]:
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return [event["message"] for event in events if event["kind"] == "warning"]


def _steps(run: Path) -> list[tuple[int, float, float]]:
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return [(event["step"], event["loss"], event["norm"]) for event in events if event["kind"] == "step"]


def _fingerprints(run: Path) -> dict[str, Any]:
    last = max((run / "checkpoints").glob("step-*/manifest.json"))
    return {name: tensor["fingerprint"] for name, tensor in json.loads(last.read_text())["tensors"].items()}
