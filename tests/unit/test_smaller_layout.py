"""Layouts for the nodes that are left: the same batches, on as many ranks as can be used."""

import pytest
from made_questions import DENSE, machine, recipe

from danlu.scheduler.smaller_layout import find_smaller_plan, is_only_fewer_replicas
from danlu.spec import Plan
from danlu.spec.plan import Degrees


def plan(microbatches: int = 1, **degrees: int) -> Plan:
    return Plan(degrees=Degrees(**degrees), microbatches=microbatches)


@pytest.mark.parametrize(
    ("before", "nodes", "expected"),
    [
        (plan(replicate=4, shard=2), 3, plan(replicate=2, shard=2, microbatches=2)),  # 16 sequences: not by 3
        (plan(replicate=4, shard=2), 2, plan(replicate=2, shard=2, microbatches=2)),
        (plan(replicate=2, shard=4, microbatches=2), 2, plan(shard=4, microbatches=4)),
        (plan(shard=8), 3, plan(shard=4, microbatches=2)),
        (plan(shard=2, tp=4), 2, plan(shard=1, tp=4, microbatches=2)),
        (plan(replicate=4, tp=2), 1, plan(replicate=1, tp=2, microbatches=4)),
        (plan(pp=4, tp=2), 3, None),
    ],
)
def test_what_is_left_takes_over_the_whole_batch(before: Plan, nodes: int, expected: Plan | None) -> None:
    found = find_smaller_plan(recipe(DENSE), before, None, nodes, ranks_per_node=2)
    assert found == expected
    if found is not None:
        assert is_only_fewer_replicas(before, found) == (before.degrees.shard == found.degrees.shard)


def test_the_planner_finds_a_layout_where_the_runs_own_does_not_shrink() -> None:
    before = plan(pp=4, shard=4, microbatches=4)
    found = find_smaller_plan(recipe(DENSE), before, machine(), nodes=2, ranks_per_node=4)
    assert found is not None and found.degrees.world == 8
    assert not is_only_fewer_replicas(before, found)
