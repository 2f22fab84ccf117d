"""The same seed gives the same bits; a stopped run goes on as if it had not been stopped, at any layout."""

import json
from math import isfinite
from pathlib import Path

import pytest
from deviations import selected
from ranks import run_ranks
from repeat_rank import RESUMED_AT, STOPS

RANK = Path(__file__).parent / "repeat_rank.py"


@pytest.fixture(scope="module")
def losses(folder: Path, request: pytest.FixtureRequest) -> dict[str, dict[str, list[str]]]:
    asked = selected(request)
    chosen = {model: [stop for stop in stops if stop in asked] for model, stops in STOPS.items() if model in asked}
    run_ranks(RANK, 2, str(folder), json.dumps(chosen), seconds=900)
    return json.loads((folder / "repeat.json").read_text())


@pytest.mark.parametrize("model", STOPS)
def test_same_seed_twice_is_bit_identical(losses: dict[str, dict[str, list[str]]], model: str) -> None:
    found = losses[model]
    assert found["first"] == found["second"]
    assert len(set(found["first"])) == len(found["first"])
    assert all(isfinite(float.fromhex(loss)) for loss in found["first"]), "nan equals nan to the letter"


@pytest.mark.parametrize(
    ("model", "stop"),
    [
        pytest.param(model, stop, marks=() if stop == RESUMED_AT else pytest.mark.full)
        for model, stops in STOPS.items()
        for stop in stops
    ],
)
def test_stopped_and_resumed_is_bit_identical(losses: dict[str, dict[str, list[str]]], model: str, stop: int) -> None:
    assert losses[model][f"stopped at {stop}"] == losses[model]["first"]


@pytest.mark.parametrize("model", STOPS)
def test_resumed_at_another_layout_differs_by_rounding_only(
    losses: dict[str, dict[str, list[str]]], model: str
) -> None:
    whole = [float.fromhex(loss) for loss in losses[model]["first"]]
    resumed = [float.fromhex(loss) for loss in losses[model]["resumed with tp"]]
    assert resumed == pytest.approx(whole, rel=1e-5)
