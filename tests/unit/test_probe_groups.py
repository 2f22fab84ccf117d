"""Which groups a probe measures, and the operators it times."""

from collections.abc import Iterator
from typing import get_args

import pytest
import torch
import torch.distributed as dist

from danlu.comm.collective_benchmark import element_counts, group_partitions
from danlu.framework.operator_benchmarks import operator_benchmarks
from danlu.spec.cluster import OperatorName


def test_one_machine_is_measured_in_groups_of_every_size() -> None:
    found = {(group.level, group.group_size): group.groups for group in group_partitions((("node", 4),))}
    assert found == {("node", 4): ((0, 1, 2, 3),), ("node", 2): ((0, 1), (2, 3))}
    assert not list(group_partitions((("node", 1),)))


def test_two_levels_are_measured_along_and_across() -> None:
    found = {(group.level, group.group_size): group.groups for group in group_partitions((("node", 2), ("rack", 2)))}
    assert found == {
        ("node", 2): ((0, 1), (2, 3)),
        ("rack", 2): ((0, 2), (1, 3)),
        ("rack", 4): ((0, 1, 2, 3),),
    }


def test_every_rank_is_in_one_group_of_every_kind() -> None:
    for group in group_partitions((("node", 4), ("rack", 6), ("hall", 2))):
        assert sorted(rank for members in group.groups for rank in members) == list(range(48))
        assert {len(members) for members in group.groups} == {group.group_size}


def test_in_a_large_group_small_sizes_are_measured_once() -> None:
    assert element_counts((2**10, 2**12, 2**14), 4) == [2**8, 2**10, 2**12]
    assert element_counts((2**10, 2**12, 2**14), 1024) == [1024, 4096]


@pytest.fixture
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_operator_runs_at_growing_sizes(dtype: torch.dtype) -> None:
    found = operator_benchmarks(torch.device("cpu"), dtype)
    assert set(found) == set(get_args(OperatorName))
    for name, make in found.items():
        sizes = []
        for timed in make():
            if not sizes:
                timed.run()
                assert timed.baseline is None or timed.baseline() is None
            assert timed.operations >= 1
            sizes.append(timed.size)
        assert sizes == sorted(set(sizes)) and len(sizes) >= 2, name
