"""Collectives through shared memory, as users of `torch.distributed` call them, and their errors."""

from pathlib import Path

import pytest
from ranks import run_ranks

RANK = Path(__file__).parent / "host_group_rank.py"


@pytest.mark.parametrize("ranks", [2, 3])
def test_collectives_of_one_host_go_through_its_memory(ranks: int, tmp_path: Path) -> None:
    run_ranks(RANK, ranks, str(tmp_path), seconds=120)
    told = [(tmp_path / f"{rank}.txt").read_text() for rank in range(ranks)]
    assert told == ["passed"] * ranks
