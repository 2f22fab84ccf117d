"""Collectives through shared memory, as users of `torch.distributed` call them, and their errors."""

from pathlib import Path

import pytest
from ranks import run_ranks

RANK = Path(__file__).parent / "host_group_rank.py"


@pytest.mark.parametrize(
    ("ranks", "on_each_host", "blocks"),
    [
        pytest.param(2, 2, (), id="2-2", marks=pytest.mark.full),
        pytest.param(3, 3, (), id="3-3"),
        pytest.param(4, 2, (), id="4-2"),
        pytest.param(4, 1, (2,), id="4-1 in blocks of 2", marks=pytest.mark.full),
    ],
)
def test_collectives_inside_a_host_go_through_its_memory(
    ranks: int, on_each_host: int, blocks: tuple[int, ...], tmp_path: Path
) -> None:
    run_ranks(RANK, ranks, str(tmp_path), str(on_each_host), *map(str, blocks), seconds=360)
    told = [(tmp_path / f"{rank}.txt").read_text() for rank in range(ranks)]
    assert told == ["passed"] * ranks
