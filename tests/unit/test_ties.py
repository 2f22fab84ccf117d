"""Layouts too close to call are a tie; its simplest layout is the answer, and the answer is what is written."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from made_questions import EXPERTS, machine, question
from typer.testing import CliRunner

from danlu.cli.app import app
from danlu.planner import PlanRequest, PricedPlan, parse_constraints, search
from danlu.planner.explain import Explainer, level_costs
from danlu.planner.pricing import PlanPricer
from danlu.planner.search_space import SearchSpace
from danlu.planner.ties import TIE_WIDTH, axes_in_use, simplest_first
from danlu.report.plan_confidence import row_labels, shown_plans, tie_text
from danlu.report.plan_page import plan_page
from danlu.report.plan_tables import result_json
from danlu.spec import load_plan
from danlu.spec.load import load_cluster, load_recipe

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

ASKED = {
    "dense": question(chips=8, cluster=machine(nodes=2), fix="schedule=1f1b,reshard=true|false,recompute=none"),
    "hybrid": PlanRequest(
        recipe=load_recipe(Path("recipes/llama3-70b.toml")),
        cluster=load_cluster("h100-pod"),
        chips=1024,
        constraints=parse_constraints("pp=1,cp=1,tp=1|2"),
    ),
    "experts": question(EXPERTS, chips=8, cluster=machine(nodes=2), fix="schedule=1f1b,recompute=full,cp=1"),
}
"""Of `hybrid`, the fastest shards inside groups and replicates over them; sharding over all ranks is a tie."""
COMMAND = ["plan", "recipes/llama3-70b.toml", "--cluster", "h100-pod", "--chips", "1024", "--fix", "pp=1,cp=1"]


def _fastest_of_all_degrees(asked: PlanRequest) -> list[PricedPlan]:
    """The fastest layout of every combination of degrees, by pricing every layout at every placement."""
    pricer, best = PlanPricer(asked), {}
    for candidate in SearchSpace(asked).candidates():
        priced = pricer.price_best_placement(candidate)
        if priced is not None and priced.fits:
            known = best.get(candidate.degrees)
            if known is None or priced.sort_key < known.sort_key:
                best[candidate.degrees] = priced
    return list(best.values())


@pytest.mark.parametrize("width", [0.0, TIE_WIDTH, pytest.param(0.2, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", ASKED)
def test_a_tie_is_all_that_pricing_every_layout_finds(name: str, width: float) -> None:
    every = _fastest_of_all_degrees(ASKED[name])
    fastest = min(priced.seconds for priced in every)
    tied = {priced.plan.degrees for priced in every if priced.seconds <= fastest * (1 + width)}
    for shown in (1, 3):
        found = search(ASKED[name], shown, tie_width=width)
        assert {priced.plan.degrees for priced in found.tied} == tied
        assert len(found.tied) == len(tied)
        assert found.best[0].seconds == fastest
        assert found.answer is found.tied[0] is found.ranked[0]
    assert len(tied) > 1 or width < 0.1


def test_fewer_axes_come_first_then_more_free_memory_then_time() -> None:
    found = search(ASKED["hybrid"], 8, tie_width=0.5)
    memory = found.request.cluster.chip.memory
    order = [
        (axes_in_use(priced.candidate), -int(20 * (1 - priced.peak_bytes / memory)), priced.seconds)
        for priced in found.tied
    ]
    assert order == sorted(order)
    assert len({axes for axes, _, _ in order}) > 1 and len({free for _, free, _ in order}) > 2
    assert [seconds for _, _, seconds in order] != sorted(seconds for _, _, seconds in order)
    assert simplest_first(reversed(found.tied)) == found.tied
    # the answer is not just the fastest under another name
    assert found.answer.seconds > found.best[0].seconds
    assert (axes_in_use(found.answer.candidate), axes_in_use(found.best[0].candidate)) == (1, 2)


def test_a_little_more_free_memory_does_not_decide() -> None:
    slow, fast = sorted(search(ASKED["hybrid"], 2, tie_width=0.0).best, key=lambda priced: -priced.seconds)

    def taking(priced: PricedPlan, share: float) -> PricedPlan:
        """The same in two axes, with this share of the chip."""
        chip = priced.request.cluster.chip.model_copy(update={"memory": round(priced.peak_bytes / share)})
        cluster = priced.request.cluster.model_copy(update={"chip": chip})
        return replace(priced, candidate=slow.candidate, request=replace(priced.request, cluster=cluster))

    assert slow.seconds > fast.seconds
    assert simplest_first([taking(slow, 0.81), taking(fast, 0.84)])[0].seconds == fast.seconds
    assert simplest_first([taking(slow, 0.71), taking(fast, 0.84)])[0].seconds == slow.seconds


def test_axes_in_use_are_those_with_more_than_one_rank() -> None:
    def axes(fix: str) -> int:
        return axes_in_use(search(question(chips=8, cluster=machine(nodes=2), fix=fix), 1).best[0].candidate)

    assert axes("shard=8") == axes("replicate=8") == 1
    assert axes("replicate=2,shard=4") == axes("shard=4,tp=2") == 2
    assert axes("pp=2,tp=2,shard=2") == 3


def test_a_limit_bounds_the_tie_too() -> None:
    asked = ASKED["dense"]
    loose = search(asked, 1, tie_width=0.5)
    slowest = max(priced.seconds for priced in loose.tied)
    within = search(asked, 1, None, 0.999 * slowest, tie_width=0.5)
    assert 0 < len(within.tied) < len(loose.tied)
    assert all(priced.seconds <= 0.999 * slowest for priced in within.tied)


def test_a_tie_is_told_with_its_width_and_what_would_tell_apart() -> None:
    found = search(ASKED["hybrid"], 8, tie_width=0.5)
    told = tie_text(found)
    assert f"Within 50 %: a tie of {len(found.tied)} layouts" in told
    assert f"danlu plan --chips 1024 --verify {min(10, len(found.tied))}" in told and "danlu probe" in told
    assert "slower than the fastest by prediction" in told
    labels = row_labels(found)
    assert labels[: len(found.tied)] == [f"{number}=" for number in range(1, len(found.tied) + 1)][: len(labels)]
    alone = search(ASKED["dense"], 8, tie_width=0.0)
    assert tie_text(alone) == "No other layout is within 0 % of it."
    assert row_labels(alone)[:2] == ["1", "2"]
    page = plan_page(found, level_costs(found.answer), [], None)
    assert "Within 50 %: a tie of" in page and "<td>2=</td>" in page
    assert len(shown_plans(found)) <= 10


def test_a_probed_machine_is_not_asked_to_be_probed() -> None:
    found = search(ASKED["dense"], 8, tie_width=0.5)
    chip = found.request.cluster.chip
    measured = chip.model_copy(update={"operators": {"bf16": ()}})
    cluster = found.request.cluster.model_copy(update={"chip": measured})
    assert "danlu probe" not in tie_text(replace(found, request=replace(found.request, cluster=cluster)))


def test_the_same_is_in_json() -> None:
    found = search(ASKED["hybrid"], 2, tie_width=0.5)
    answer = result_json(found, [], [], None)
    assert [plan["seconds"] for plan in answer["best"]] == [priced.seconds for priced in found.ranked]
    assert answer["tie"]["width"] == 0.5 and answer["tie"]["layouts"] == len(found.tied)
    assert answer["tie"]["fastest_seconds"] == found.best[0].seconds < answer["best"][0]["seconds"]
    assert any("--verify" in way for way in answer["tie"]["tell_apart"])
    for plan, priced in zip(answer["best"], found.ranked, strict=True):
        assert plan["fit_chance"] == priced.fit_chance
        assert plan["seconds_band"]["low"] < plan["seconds_band"]["high"]


def test_a_neighbor_in_the_tie_is_called_so_and_one_outside_is_not() -> None:
    asked = ASKED["dense"]
    chosen = search(asked, 1, tie_width=0.0).best[0]
    near = Explainer(asked).rejections(chosen, chosen.seconds)
    far = Explainer(asked).rejections(chosen, chosen.seconds / 2)
    assert not any(one.kind == "tie" for one in far)
    for one in near:
        if one.kind in ("seconds", "tie"):
            more = float(one.reason.partition("(")[2].partition("%")[0]) / 100
            same_degrees = one.change.startswith(
                ("recompute", "microbatch", "reshard", "no reshard", "layers", "sched")
            )
            assert (one.kind == "tie") == (more <= TIE_WIDTH and not same_degrees), one
            assert one.reason.endswith("a tie") == (one.kind == "tie")


def test_the_plan_that_is_written_is_the_simplest_of_the_tie(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    result = CliRunner().invoke(app, [*COMMAND, "--output", str(plan), "--json"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    tied = answer["best"][: answer["tie"]["layouts"]]
    fastest = answer["tie"]["fastest_seconds"]
    assert all(one["seconds"] <= fastest * (1 + answer["tie"]["width"]) for one in tied)
    assert all(one["seconds"] > fastest * (1 + answer["tie"]["width"]) for one in answer["best"][len(tied) :])

    def axes(one: dict[str, dict[str, dict[str, int]]]) -> int:
        return sum(degree > 1 for degree in one["plan"]["degrees"].values())

    assert axes(tied[0]) == min(map(axes, tied))
    written = load_plan(plan)
    assert written.degrees.model_dump() == tied[0]["plan"]["degrees"]
    assert tied[0]["seconds"] > fastest  # so that it is the tie that was decided, not the race
    assert written.prediction is not None and written.prediction.seconds == pytest.approx(tied[0]["seconds"])


def test_why_not_a_layout_of_the_tie_says_that_it_is_one() -> None:
    answer = json.loads(CliRunner().invoke(app, [*COMMAND, "--json"]).stdout)
    tied = answer["best"][: answer["tie"]["layouts"]]
    assert len(tied) > 1
    degrees = tied[-1]["plan"]["degrees"]
    asked = [*COMMAND, "--why-not", f"shard={degrees['shard']}"]
    shown = CliRunner().invoke(app, asked)
    assert shown.exit_code == 0, shown.output
    assert "within 3 % of the fastest: a tie" in shown.stdout and "--verify 2" in shown.stdout
    slow = CliRunner().invoke(app, [*COMMAND, "--why-not", "microbatch=1,reshard=true,tp=2"])
    assert "a tie" not in slow.stdout and "slower than best" in slow.stdout


def test_the_width_is_of_the_size_that_published_layouts_err_by() -> None:
    from validation.residuals import error_between_layouts, judged_points

    known, _ = judged_points()
    assert TIE_WIDTH / 2 < error_between_layouts(known) < 2 * TIE_WIDTH
