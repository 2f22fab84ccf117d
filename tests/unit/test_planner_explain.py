"""Why a layout was chosen: levels, neighbors, failures, and variations of the request."""

from dataclasses import replace
from math import prod, sqrt
from pathlib import Path

import pytest
from made_questions import DENSE, EXPERTS, machine, question
from test_cost_curves import probed

from danlu.cost import count_parameters
from danlu.framework.weights import parameter_shapes
from danlu.planner import PlanRequestError, search
from danlu.planner.deadline import fewest_chips
from danlu.planner.explain import PART_LABELS, Explainer, bottleneck, level_costs
from danlu.planner.goodput import checkpoint_bytes, goodput, goodput_share, optimal_save_interval
from danlu.planner.pricing import PlanPricer
from danlu.planner.search_space import SearchSpace
from danlu.planner.what_if import apply_what_if, least_memory_layout, sweep_sequence_length
from danlu.report.plan_tables import plan_with_prediction
from danlu.spec.cluster import FailureRates, StorageTier
from danlu.spec.load import load_plan
from danlu.spec.parameters import is_hidden_matrix
from danlu.spec.plan import Plan
from danlu.spec.recipe import EmaConfig, OptimizerConfig
from danlu.spec.toml import dumps


def test_a_slow_level_is_named_and_a_fast_one_is_not() -> None:
    slow = search(question(chips=8, cluster=machine(slow=1e9)), shown=1).best[0]
    assert bottleneck(slow) == "rack"
    assert level_costs(slow)[0].seconds > 0.1 * slow.seconds
    fast = search(question(chips=4, cluster=machine(nodes=1)), shown=1).best[0]
    assert bottleneck(fast) != "rack"


def test_parts_of_a_step_add_up_and_have_words() -> None:
    best = search(question(EXPERTS, chips=8), shown=1).best[0]
    parts = best.prediction.parts
    assert sum(parts.values()) == pytest.approx(best.seconds)
    assert set(parts) <= set(PART_LABELS)


def test_neighbours_are_refused_for_a_reason_that_holds() -> None:
    asked = question(chips=16, cluster=machine(memory=7.5e9), length=4096)
    best = search(asked, shown=1).best[0]
    refused = Explainer(asked).rejections(best)
    assert {refusal.kind for refusal in refused} == {"rule", "bytes", "seconds", "tie"}
    for refusal in refused:
        assert refusal.reason
        if refusal.kind == "seconds":
            assert "-" not in refusal.reason.split(",")[1], refusal  # none is faster
        if refusal.kind == "bytes":
            assert refusal.remedy


def test_period_leaves_most_time() -> None:
    save, between, recover = 30.0, 3600.0, 120.0
    best = optimal_save_interval(save, between, recover)
    assert best == save + sqrt(2 * (between + recover) * save + save**2)
    for other in (best * 0.8, best * 1.2):
        assert goodput_share(other, save, between, recover) < goodput_share(best, save, between, recover)


def test_goodput_picks_a_tier_and_falls_with_failures() -> None:
    cluster = machine().model_copy(
        update={
            "tiers": (
                StorageTier(name="slow", kind="shared", capacity=10**15, read=1e9, write=1e9),
                StorageTier(name="fast", kind="local", capacity=10**13, read=5e9, write=5e9),
                StorageTier(name="small", kind="memory", capacity=1000, read=1e12, write=1e12),
            ),
            "failures": FailureRates(node_mtbf=86400.0, restart=60.0),
        }
    )
    asked = question(cluster=cluster)
    kept = goodput(asked)
    assert kept is not None
    assert kept.tier == "fast"
    assert kept.between_failures == 86400 / 4
    often = goodput(asked, mtbf=3600.0)
    assert often is not None
    assert often.share < kept.share < 1
    assert goodput(question()) is None or question().cluster.tiers


def test_what_if_of_what_was_measured_is_refused() -> None:
    cluster = probed()
    asked = question(cluster=cluster, chips=4)
    for change in ("node.bandwidth=2x", "rack.latency=2x", "chip.peak=2x"):
        with pytest.raises(PlanRequestError, match=r"has no effect: .* measured"):
            apply_what_if(asked, change)
    assert apply_what_if(asked, "chip.memory=2x").cluster.chip.memory == 2 * cluster.chip.memory


def test_chips_that_do_not_spread_evenly_are_refused_in_the_words_of_check() -> None:
    with pytest.raises(
        PlanRequestError,
        match=r"12 ranks spread evenly over 3 nodes \(4 on each\).*--chips 16, or another multiple of 8",
    ):
        question(chips=12, cluster=machine(nodes=2, per_node=8))


def test_learned_positions_end() -> None:
    learned = DENSE.model_copy(update={"position": "learned", "sequence": 4096})
    with pytest.raises(PlanRequestError, match=r"learned positions .* end at 4,096"):
        question(learned, length=8192)
    found = sweep_sequence_length(question(learned, chips=4, cluster=machine(nodes=1), length=2048), search)
    assert [length for length, _ in found] == [2048, 4096]


def test_a_checkpoint_has_what_is_saved() -> None:
    asked = question(EXPERTS)
    parameters = count_parameters(EXPERTS)
    assert checkpoint_bytes(asked) == 12 * parameters
    averaged = asked.recipe.model_copy(update={"ema": EmaConfig(decay=0.99)})
    assert checkpoint_bytes(replace(asked, recipe=averaged)) == 16 * parameters
    muon = asked.recipe.model_copy(update={"optimizer": OptimizerConfig(kind="muon")})
    matrices = sum(prod(shape) for name, shape in parameter_shapes(EXPERTS).items() if is_hidden_matrix(name, shape))
    assert checkpoint_bytes(replace(asked, recipe=muon)) == 12 * parameters - 4 * matrices


def test_what_if_changes_one_thing() -> None:
    asked = question()
    other = apply_what_if(asked, "rack.bandwidth=2x")
    assert other.cluster.levels[1].bandwidth == 2 * asked.cluster.levels[1].bandwidth
    assert other.cluster.levels[0] == asked.cluster.levels[0]
    assert apply_what_if(asked, "chip.memory=141 GB").cluster.chip.memory == 141 * 10**9
    assert apply_what_if(asked, "batch.length=2x").recipe.batch.length == 2 * asked.recipe.batch.length
    faster = apply_what_if(asked, "chip.peak=2x").cluster.chip.peak
    assert faster["bf16"] == 2 * asked.cluster.chip.peak["bf16"]
    for wrong in ("fabric.bandwidth=2x", "rack.bandwith=2x", "rack.bandwidth", "rack.latency=quick"):
        with pytest.raises(PlanRequestError, match="--what-if"):
            apply_what_if(asked, wrong)


def test_a_faster_network_is_never_slower() -> None:
    asked = question(EXPERTS, chips=8, cluster=machine(nodes=2, slow=5e9), sequences=8)
    now = search(asked, shown=1).best[0]
    then = search(apply_what_if(asked, "rack.bandwidth=4x"), shown=1).best[0]
    assert then.seconds < now.seconds


def test_fewest_chips_that_are_in_time() -> None:
    asked = question(sequences=64)
    fastest = search(asked, shown=1).best[0]
    tokens = 1e9
    days = tokens / fastest.tokens_per_second / 86400
    found = fewest_chips(asked, tokens, days * 3, search)
    assert found.result is not None
    chips = found.result.request.chips
    assert chips < asked.chips
    assert dict(found.tried_chips)[chips] <= days * 3  # type: ignore[operator]
    assert fewest_chips(asked, tokens, days / 10, search).result is None


def test_leanest_takes_fewest_bytes() -> None:
    asked = question(chips=8, cluster=machine(nodes=2))
    assert least_memory_layout(asked).peak_bytes == min(
        PlanPricer(asked).memory(one).device_bytes for one in SearchSpace(asked).candidates()
    )


def test_sequences_grow_until_nothing_fits() -> None:
    found = sweep_sequence_length(question(chips=4, cluster=machine(nodes=1, memory=10e9), sequences=64), search)
    assert found[-1][1] is None
    assert all(choice is not None and choice.fits for _, choice in found[:-1])
    assert [length for length, _ in found] == [2048 * 2**power for power in range(len(found))]


def test_a_plan_keeps_what_was_predicted(tmp_path: Path) -> None:
    best = search(question(chips=8, cluster=machine(nodes=2)), shown=1).best[0]
    plan = plan_with_prediction(best, None)
    (tmp_path / "plan.toml").write_text(dumps(plan))
    again = load_plan(tmp_path / "plan.toml")
    assert again == plan
    assert again.prediction is not None
    assert again.prediction.seconds == best.seconds
    assert Plan().prediction is None
