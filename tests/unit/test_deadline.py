"""The fewest chips for a deadline: the least number of whole nodes that is in time, found by trying all of them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from made_questions import DENSE, EXPERTS, machine, question
from typer.testing import CliRunner

from danlu.cli.app import app
from danlu.planner import PlanRequest, search
from danlu.planner.search_space import SearchSpace, ShapeKnobs
from danlu.spec.model import Model

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
            # the simplest of those that tie, if they are in time too
            told = dict(found.tried_chips)[found.result.request.chips]
            assert told is not None
            assert 0.999 * taken[found.result.request.chips] <= told <= days
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
    asked_days = [*asked, "--chips", "64", "--days", str(days), "--tokens", "200B"]
    told = CliRunner().invoke(app, [part for part in asked_days if part != "--json"])
    assert "need 3 nodes, 24 chips: finished in" in told.stdout and "for 8 of 10 runs like it" in told.stdout
    assert "Fewer nodes do not:" in told.stdout
    answer = CliRunner().invoke(app, asked_days)
    assert answer.exit_code == 0, answer.output
    best = json.loads(answer.stdout)["best"]["plan"]["degrees"]
    assert best["replicate"] * best["shard"] == 24


def test_every_number_of_whole_nodes_counts() -> None:
    from danlu.planner.deadline import whole_nodes

    many = question(cluster=machine(nodes=2000, per_node=4), chips=3998)
    counts = whole_nodes(many)
    assert counts[:-1] == [4 * nodes for nodes in range(1, 1000)]
    assert counts[-1] == 3998  # all there are, whole nodes or not
    assert whole_nodes(replace(many, chips=8)) == [4, 8]
    assert whole_nodes(replace(many, chips=3)) == [3]


def test_the_fewest_are_exact_among_hundreds_of_nodes_too() -> None:
    """Beyond 128 nodes only some numbers were tried."""
    from danlu.planner.deadline import fewest_chips

    asked = question(
        cluster=machine(nodes=300, per_node=2),
        sequences=3 * 5 * 29 * 4,
        fix="recompute=none,schedule=1f1b,reshard=true,tp=1|2,cp=1,pp=1",
    )
    nodes = 145  # 290 ranks divide the batch; 144 and 146 nodes do not
    best = search(replace(asked, chips=2 * nodes), 1).best[0]
    days = 1.0001 * TOKENS / best.tokens_per_second / 86400
    seen = []
    found = fewest_chips(
        asked, TOKENS, days, search, progress=lambda chips, place, numbers: seen.append((chips, place, numbers))
    )
    assert found.result is not None
    assert found.result.request.chips == 2 * nodes
    assert found.ruled_out + len(found.tried_chips) == nodes
    assert seen[-1] == (2 * nodes, nodes - 1, 300)
    assert seen == sorted(seen)


@pytest.mark.parametrize("model", [DENSE, EXPERTS])
def test_bounds_that_numbers_of_nodes_share_are_never_above_the_time_of_a_layout(model: Model) -> None:
    from danlu.planner.deadline import _SharedBounds

    asked = question(model, machine(nodes=NODES, per_node=PER_NODE), sequences=48, fix="schedule=1f1b")
    bounds = _SharedBounds(replace(asked, chips=PER_NODE))
    for chips in range(PER_NODE, NODES * PER_NODE + 1, PER_NODE):
        pricer = bounds.pricer.for_chips(chips)
        best = search(replace(asked, chips=chips), 1).best[0]
        assert bounds.may_finish(pricer, best.seconds)
        assert pricer.degrees_lower_bound(best.candidate.shape) <= best.seconds
        again = search(pricer.request, 1, pricer=pricer).best[0]
        assert (again.plan, again.seconds) == (best.plan, best.seconds)
    assert not bounds.may_finish(pricer, 1e-6)


def test_the_bounds_of_partly_filled_nodes_are_their_own() -> None:
    from danlu.planner.pricing import PlanPricer

    full = PlanPricer(question(cluster=machine(nodes=4, per_node=4), chips=8))
    full.degrees_lower_bound(ShapeKnobs(1, 1, 2, 1, 4, 1))
    assert full._passes
    assert full.for_chips(16)._passes is full._passes
    assert not full.for_chips(6)._passes


def test_the_least_memory_is_that_of_the_fewest_or_of_the_most_microbatches() -> None:
    """So that a schedule of which neither the fewest nor the most fit is skipped."""
    from danlu.planner.pricing import PlanPricer

    for asked in (question(sequences=64, chips=8), question(EXPERTS, chips=8, sequences=96)):
        space, pricer = SearchSpace(asked), PlanPricer(asked)
        for shape in space.degree_shapes(8):
            for schedule in space.schedules(shape.pp)[::5]:
                gathers = shape.tp > 1
                numbers = [
                    n for n in space.microbatches(shape) if schedule in space._filled_schedules(shape.pp, n, gathers)
                ]
                taken = [
                    min(
                        pricer.memory(one).device_bytes
                        for one in space.most_sharded(shape._replace(microbatches=number), schedule)
                    )
                    for number in numbers
                ] or [0]
                assert min(taken) == min(taken[0], taken[-1]), (shape, schedule)


def test_a_search_with_a_limit_finds_what_is_within_and_nothing_else() -> None:
    asked = question(chips=8, cluster=machine(nodes=2))
    best = search(asked, 1).best[0]
    assert search(asked, 1, None, best.seconds * 1.0001).best[0].plan == best.plan
    late = search(asked, 1, None, best.seconds * 0.9999)
    assert (late.best, late.least_memory) == ((), None)
