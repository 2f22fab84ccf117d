"""Hierarchical collectives against numpy, on ranks laid out on levels in several ways."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hierarchical_rank import CASES, SHAPES
from ranks import run_ranks

from danlu.comm.hierarchical import all_reduce, all_to_all
from danlu.comm.level_groups import Level, LevelGroups, join_level_groups
from danlu.comm.world import World
from danlu.torch_compat import HashStore

RANK = Path(__file__).parent / "hierarchical_rank.py"
DRAWN = 60 * len(CASES)


@pytest.mark.parametrize("ranks", SHAPES)
def test_drawn_cases_equal_what_numpy_computes(ranks: int, tmp_path: Path) -> None:
    run_ranks(RANK, ranks, str(tmp_path), str(DRAWN), seconds=360)
    told = [json.loads(file.read_text()) for file in sorted(tmp_path.glob("*.json"))]
    assert [each["failed"] for each in told] == [""] * ranks
    assert [each["cases"] for each in told] == [DRAWN] * ranks


def test_levels_that_do_not_join_all_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="levels of 2 × 2 join 4 ranks, but the group has 6"):
        World(0, 6).level_groups(range(6), (2, 2), "test")
    with pytest.raises(ValueError, match="rank 7 must be in the group"):
        World(7, 8).level_groups(range(4), (2, 2), "test")
    with pytest.raises(ValueError, match="rank must be below the 4 that the levels join, but is 4"):
        join_level_groups(HashStore(), 4, (2, 2))


def test_a_tensor_in_no_pieces_is_refused() -> None:
    one = LevelGroups((Level(1, 0, dist.ProcessGroup(HashStore(), 0, 1)),))
    for collective in (all_reduce, all_to_all):
        with pytest.raises(ValueError, match="`pieces` must be 1 or more, but is 0"):
            collective(torch.ones(2), one, 0)
