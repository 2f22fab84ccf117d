"""Parts that talk, each against the same thing done by one rank; and checkpoints between two layouts."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from collective_rank import CASES
from ranks import run_ranks

RANK = Path(__file__).parent / "collective_rank.py"


Outcomes = Callable[[int, str], list[str]]
"""For a world size and a case, what every rank that came to it says."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Ranks are started once a world size, when the first of its cases is asked for."""
    folder = tmp_path_factory.mktemp("collectives")

    @cache
    def told(world: int) -> dict[str, list[str]]:
        if world == 1:
            told(2)  # it loads what two ranks have saved
        run_ranks(RANK, world, str(folder), seconds=360)
        found: dict[str, list[str]] = {}
        for file in sorted(folder.glob(f"{world}-*.json")):
            for case, outcome in json.loads(file.read_text()).items():
                found.setdefault(case, []).append(outcome)
        return found

    return lambda world, case: told(world).get(case, [])


@pytest.mark.parametrize(
    ("world", "case"), [(world, case.__name__) for world, cases in CASES.items() for case in cases]
)
def test_ranks_together_do_what_one_does_alone(world: int, case: str, outcomes: Outcomes) -> None:
    told = outcomes(world, case)
    for outcome in told:
        assert outcome == "passed", outcome
    assert len(told) == world, "a rank did not come to it"
