"""Parts that talk, each against the same thing done by one rank; and checkpoints between two layouts."""

import json
from pathlib import Path

import pytest
from collective_rank import CASES
from ranks import run_ranks

RANK = Path(__file__).parent / "collective_rank.py"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What every rank says of every case; a case that no rank came to is missing."""
    folder = tmp_path_factory.mktemp("collectives")
    for world in CASES:
        run_ranks(RANK, world, str(folder), seconds=120)
    found: dict[str, list[str]] = {}
    for file in sorted(folder.glob("*-*.json")):
        for case, outcome in json.loads(file.read_text()).items():
            found.setdefault(case, []).append(outcome)
    return found


@pytest.mark.parametrize(
    ("case", "world"), [(case.__name__, world) for world, cases in CASES.items() for case in cases]
)
def test_case(case: str, world: int, results: dict[str, list[str]]) -> None:
    outcomes = results.get(case, [])
    for outcome in outcomes:
        assert outcome == "passed", outcome
    assert len(outcomes) == world, "a rank did not come to it"
