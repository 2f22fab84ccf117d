"""Hierarchical collectives against numpy, on ranks laid out on levels in several ways."""

import json
from pathlib import Path

import pytest
from hierarchical_rank import CASES, SHAPES
from ranks import run_ranks

from danlu.comm.level_groups import build_level_groups, join_level_groups
from danlu.comm.world import World
from danlu.torch_compat import HashStore

RANK = Path(__file__).parent / "hierarchical_rank.py"
DRAWN = 60 * len(CASES)


@pytest.mark.parametrize("ranks", SHAPES)
def test_drawn_cases_equal_what_numpy_computes(ranks: int, tmp_path: Path) -> None:
    run_ranks(RANK, ranks, str(tmp_path), str(DRAWN), seconds=120)
    told = [json.loads(file.read_text()) for file in sorted(tmp_path.glob("*.json"))]
    assert [each["failed"] for each in told] == [""] * ranks
    assert [each["cases"] for each in told] == [DRAWN] * ranks


def test_levels_that_do_not_join_all_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="levels of 2 × 2 join 4 ranks, but the group has 6"):
        build_level_groups(World(0, 6), range(6), (2, 2), "test")
    with pytest.raises(ValueError, match="rank 7 must be in the group"):
        build_level_groups(World(7, 8), range(4), (2, 2), "test")
    with pytest.raises(ValueError, match="rank must be below the 4 that the levels join, but is 4"):
        join_level_groups(HashStore(), 4, (2, 2))
