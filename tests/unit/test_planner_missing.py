"""What the runtime lacks: every gain is the difference of two predictions, and nothing is listed without its reason."""

from dataclasses import replace

import pytest
from made_questions import DENSE, EXPERTS, machine, question

from danlu.cost import predict
from danlu.cost.software import TokenDispatch
from danlu.planner import PlanRequest, price_plan
from danlu.planner.missing import MissingFeature, missing_features
from danlu.planner.pricing import software_for
from danlu.spec.load import load_cluster
from danlu.spec.plan import Degrees, Plan

EVERYWHERE = {"compiled blocks", "fp8 matmuls", "activation offload"}
DISPATCH = {"overlapped expert dispatch", "tokens sent once, in parts"}
BY_LAYOUT: dict[str, tuple[PlanRequest, Plan, set[str]]] = {
    "sharded": (question(chips=8, cluster=machine(nodes=2)), Plan(degrees=Degrees(shard=8)), set()),
    "cp": (question(chips=8), Plan(degrees=Degrees(shard=4, cp=2)), set()),
    "tp": (question(chips=8), Plan(degrees=Degrees(shard=4, tp=2)), {"asynchronous tensor parallelism"}),
    "experts": (question(EXPERTS, chips=8), Plan(degrees=Degrees(shard=8, ep=4)), DISPATCH),
    "experts with tp": (
        question(EXPERTS, chips=8),
        Plan(degrees=Degrees(shard=4, tp=2, ep=4)),
        {*DISPATCH, "asynchronous tensor parallelism", "tensor parallelism inside experts"},
    ),
}


def found(name: str) -> dict[str, MissingFeature]:
    asked, plan, _ = BY_LAYOUT[name]
    return {feature.name: feature for feature in missing_features(price_plan(asked, plan))}


@pytest.mark.parametrize("name", BY_LAYOUT)
def test_what_a_layout_could_use_is_listed_with_a_reason(name: str) -> None:
    features = found(name)
    assert set(features) == EVERYWHERE | BY_LAYOUT[name][2]
    for feature in features.values():
        assert feature.reason
        assert bool(feature.not_priced) == (feature.seconds is None) == (feature.share is None)


@pytest.mark.parametrize(
    ("name", "feature", "traits"),
    [
        ("sharded", "compiled blocks", {"eager": False}),
        ("tp", "asynchronous tensor parallelism", {"overlap_tp_comm": True}),
        ("experts", "overlapped expert dispatch", {"overlap_ep_comm": True}),
        ("experts", "tokens sent once, in parts", {"dispatch": TokenDispatch(deduplicated=True, chunks=2)}),
    ],
)
def test_a_gain_is_the_difference_of_two_predictions(name: str, feature: str, traits: dict[str, object]) -> None:
    """Of the same plan, by the cost model alone."""
    asked, plan, _ = BY_LAYOUT[name]
    software = software_for(asked, plan.recompute)
    now, then = (
        predict(asked.model, plan, asked.recipe.batch, asked.cluster, each)
        for each in (software, replace(software, **traits))  # type: ignore[arg-type]
    )
    gain = found(name)[feature]
    assert gain.seconds == pytest.approx(now.seconds - then.seconds, rel=1e-6, abs=1e-12)
    assert gain.share == pytest.approx(1 - then.seconds / now.seconds, rel=1e-6, abs=1e-12)
    assert gain.bytes == pytest.approx(now.memory.device_bytes - then.memory.device_bytes, abs=1.0)


def test_no_more_is_gained_than_the_traffic_takes() -> None:
    priced = price_plan(*BY_LAYOUT["experts with tp"][:2])
    features = found("experts with tp")
    for name, part in (("asynchronous tensor parallelism", "tensor"), ("overlapped expert dispatch", "expert")):
        gain = features[name].seconds
        assert gain is not None
        assert 0 < gain <= 1.05 * priced.prediction.parts[part]  # and the stragglers of that part


def test_fp8_is_priced_where_the_chip_has_it() -> None:
    asked, plan, _ = BY_LAYOUT["tp"]
    old = found("tp")["fp8 matmuls"]
    assert old.seconds is None and "fp8" in old.not_priced
    new = replace(asked, cluster=load_cluster("h100-pod"))
    gain = next(each for each in missing_features(price_plan(new, plan)) if each.name == "fp8 matmuls")
    assert gain.share is not None and 0 < gain.share < 0.5


def test_the_largest_gain_comes_first_and_what_is_not_priced_last() -> None:
    asked, plan, _ = BY_LAYOUT["experts with tp"]
    chosen = price_plan(asked, plan)
    gains = [feature.seconds for feature in missing_features(chosen)]
    priced = [gain for gain in gains if gain is not None]
    assert priced == sorted(priced, reverse=True)
    assert gains[: len(priced)] == priced


def test_what_the_plan_already_has_is_not_missing() -> None:
    asked, plan = question(DENSE, chips=8), Plan(degrees=Degrees(shard=8), compile=True)
    assert "compiled blocks" not in {feature.name for feature in missing_features(price_plan(asked, plan))}
