"""Parts that talk, each against the same thing done by one rank; and checkpoints between two layouts."""

import json
from pathlib import Path

import pytest
from collective_rank import CASES
from ranks import run_ranks

RANK = Path(__file__).parent / "collective_rank.py"


Outcomes = dict[tuple[int, str], list[str]]
"""By world size and case, what every rank that came to it says."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    folder = tmp_path_factory.mktemp("collectives")
    found: Outcomes = {}
    for world in CASES:
        run_ranks(RANK, world, str(folder), seconds=120)
        for file in sorted(folder.glob(f"{world}-*.json")):
            for case, outcome in json.loads(file.read_text()).items():
                found.setdefault((world, case), []).append(outcome)
    return found


@pytest.mark.parametrize(
    ("world", "case"), [(world, case.__name__) for world, cases in CASES.items() for case in cases]
)
def test_ranks_together_do_what_one_does_alone(world: int, case: str, outcomes: Outcomes) -> None:
    told = outcomes.get((world, case), [])
    for outcome in told:
        assert outcome == "passed", outcome
    assert len(told) == world, "a rank did not come to it"
