"""The fewest chips for a deadline: the least number of whole nodes that is in time, found by trying all of them."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from made_questions import machine, question
from typer.testing import CliRunner

from danlu.cli.app import app
from danlu.planner import PlanRequest, search

EIGHT = """name = "eight"
steps = 10
[model]
base = "llama3-8b"
[data]
shards = "none"
[batch]
sequences = 192
length = 2048
[precision]
compute = "bf16"
"""
TOKENS = 1e12
NODES, PER_NODE = 6, 2
ASKED = {
    "any layout": question(
        fix="recompute=none,schedule=1f1b,reshard=true",
        cluster=machine(nodes=NODES, per_node=PER_NODE),
        sequences=48,
    ),
    "numbers that do not divide have no layout": question(
        cluster=machine(nodes=NODES, per_node=PER_NODE), sequences=16, without="pp"
    ),
}


def _all_days(asked: PlanRequest) -> dict[int, float]:
    """Days by chips, of every number of whole nodes that has a layout, each by a search of its own."""
    found = {}
    for chips in range(PER_NODE, NODES * PER_NODE + 1, PER_NODE):
        answer = search(replace(asked, chips=chips), 1)
        if answer.best:
            found[chips] = TOKENS / answer.best[0].tokens_per_second / 86400
    return found


@pytest.mark.parametrize("name", ASKED)
def test_the_answer_is_that_of_trying_every_number_of_nodes(name: str) -> None:
    from danlu.planner.deadline import fewest_chips

    asked = ASKED[name]
    taken = _all_days(asked)
    assert len(taken) > 2
    # a hair to either side of what every number takes, and what none reaches
    wanted = [days * by for days in taken.values() for by in (0.999, 1.001)] + [max(taken.values()) * 10]
    for days in wanted:
        least = min((chips for chips, needed in taken.items() if needed <= days), default=None)
        found = fewest_chips(asked, TOKENS, days, search)
        assert (found.result.request.chips if found.result else None) == least, days
        if found.result:
            assert dict(found.tried_chips)[found.result.request.chips] == pytest.approx(
                taken[found.result.request.chips]
            )
            assert all(late is None for chips, late in found.tried_chips if chips < found.result.request.chips)


def test_a_number_between_two_powers_of_two_is_found() -> None:
    """Three nodes were answered with four."""
    from danlu.planner.deadline import fewest_chips

    asked = ASKED["any layout"]
    days = TOKENS / search(replace(asked, chips=3 * PER_NODE), 1).best[0].tokens_per_second / 86400
    found = fewest_chips(asked, TOKENS, 1.001 * days, search)
    assert found.result is not None
    assert found.result.request.chips == 3 * PER_NODE


def test_the_command_answers_three_nodes_where_three_do(tmp_path: Path) -> None:
    recipe = tmp_path / "eight.toml"
    recipe.write_text(EIGHT)
    asked = ["plan", str(recipe), "--cluster", "dgx-a100", "--fix", "tp=1,cp=1,pp=1", "--json"]
    three = json.loads(CliRunner().invoke(app, [*asked, "--chips", "24"]).stdout)["best"][0]
    days = 1.001 * 2e11 / three["tokens_per_second"] / 86400
    answer = CliRunner().invoke(app, [*asked, "--chips", "64", "--days", str(days), "--tokens", "200B"])
    assert answer.exit_code == 0, answer.output
    best = json.loads(answer.stdout)["best"]["plan"]["degrees"]
    assert best["replicate"] * best["shard"] == 24


def test_counts_are_whole_nodes_and_all_of_them_while_they_are_few() -> None:
    from danlu.planner.deadline import EVERY_NODE_COUNT_UP_TO, chip_counts_to_try

    many = question(cluster=machine(nodes=1000, per_node=4), chips=3998)
    counts = chip_counts_to_try(many)
    whole = [chips // 4 for chips in counts if chips % 4 == 0]
    assert whole[:EVERY_NODE_COUNT_UP_TO] == list(range(1, EVERY_NODE_COUNT_UP_TO + 1))
    assert counts[-1] == 3998  # all there are, whole nodes or not
    assert all(later - earlier <= max(1, earlier / 64) for earlier, later in pairwise(whole))


def test_a_search_with_a_limit_finds_what_is_within_and_nothing_else() -> None:
    asked = question(chips=8, cluster=machine(nodes=2))
    best = search(asked, 1).best[0]
    assert search(asked, 1, None, best.seconds * 1.0001).best[0].plan == best.plan
    late = search(asked, 1, None, best.seconds * 0.9999)
    assert (late.best, late.least_memory) == ((), None)
