"""What programs do that a plan does not say, as the cost model prices it: kernels, graphs, tokens ahead, ends."""

from dataclasses import replace

import pytest

from danlu.cost import count_parameters
from danlu.cost.parallel_layout import ParallelLayout
from danlu.cost.software import ZERO_3, Software
from danlu.cost.step_prediction import Predictor, StepPrediction
from danlu.cost.stragglers import slowest_chip_lag, straggler_slowdown
from danlu.spec import load_cluster
from danlu.spec.load import load_model
from danlu.spec.model import Moe
from danlu.spec.recipe import BatchConfig

POD = load_cluster("h100-pod")
DENSE = load_model("llama3-70b")
MOE = DENSE.model_copy(update={"moe": Moe(experts=64, top_k=8, width=2048)})
PLAIN = Software(reduce_every_microbatch=False, recompute="none")
SPREAD_EXPERTS = ParallelLayout(pp=2, shard=32, ep=8, microbatches=8)


def step(
    software: Software, layout: ParallelLayout = SPREAD_EXPERTS, dtype: str = "fp8", length: int = 4096
) -> StepPrediction:
    return Predictor(MOE, BatchConfig(sequences=256, length=length), POD, software, dtype).predict(layout)


def test_fused_experts_are_faster_products_and_fewer_bytes() -> None:
    plain, fused = step(PLAIN), step(replace(PLAIN, fused_grouped_gemm=True))
    assert fused.parts["linear"] < plain.parts["linear"]
    assert fused.parts["elementwise"] < plain.parts["elementwise"]
    assert fused.parts["attention"] == plain.parts["attention"]


def test_attention_in_fp8_is_faster_only_where_products_are() -> None:
    faster = replace(PLAIN, fp8_attention=True)
    assert step(faster).parts["attention"] < step(PLAIN).parts["attention"]
    assert step(faster, dtype="bf16").seconds == step(PLAIN, dtype="bf16").seconds


def test_a_recorded_step_never_waits_for_the_host() -> None:
    assert step(PLAIN, length=128).parts["waiting"] > 0
    assert step(replace(PLAIN, graph_capture=True), length=128).parts["waiting"] == 0


def test_hidden_dispatch_leaves_its_contention_and_what_compute_does_not_cover() -> None:
    plain, hidden = step(PLAIN), step(replace(PLAIN, overlap_ep_comm=True))
    assert 0 < hidden.parts["expert"] < 0.5 * plain.parts["expert"]
    across = ParallelLayout(
        pp=2, shard=32, ep=32, microbatches=8
    )  # beyond a node: longer than the compute that hides it
    assert step(replace(PLAIN, overlap_ep_comm=True), across).parts["expert"] > hidden.parts["expert"]


def test_a_token_ahead_is_one_more_pass_through_the_head() -> None:
    plain, ahead = (
        step(PLAIN, ParallelLayout(shard=64, ep=8)),
        step(replace(PLAIN, mtp_layers=1), ParallelLayout(shard=64, ep=8)),
    )
    assert plain.parts["head"] < ahead.parts["head"] < 2 * plain.parts["head"]  # the embedding is looked up once


def test_the_ends_of_a_pipeline_send_half_as_often() -> None:
    predictor = Predictor(DENSE, BatchConfig(sequences=256, length=4096), POD, PLAIN)
    two, four = (
        predictor.predict(ParallelLayout(pp=pp, shard=4, tp=8, microbatches=16)).parts["transfer"] for pp in (2, 4)
    )
    assert two == pytest.approx(four)  # the stage with the head is the slowest, and the last of both
    heavy = predictor.predict(ParallelLayout(pp=4, shard=4, tp=8, microbatches=16, stage_layers=(18, 26, 18, 18)))
    assert heavy.parts["transfer"] == pytest.approx(2 * four)  # the slowest stage lies in the middle


def test_a_model_built_whole_must_fit_before_it_is_split() -> None:
    batch, layout = BatchConfig(sequences=64, length=512), ParallelLayout(shard=64, tp=8, reshard_after_forward=True)
    split = Software(sharding=ZERO_3, keep_half_parameters=False, recompute="full")
    late, early = (
        Predictor(DENSE, batch, POD, software).memory(layout).allocated
        for software in (split, replace(split, init_unsharded=True))
    )
    assert early == pytest.approx(2 * count_parameters(DENSE) / 8, rel=0.01)
    assert late < 0.5 * early


def test_a_slow_chip_is_lost_in_a_stage_with_time_to_spare() -> None:
    assert straggler_slowdown([1.0] * 4, 16, 0.01) == pytest.approx(slowest_chip_lag(64, 0.01))
    assert straggler_slowdown([0.5, 0.5, 0.5, 1.0], 16, 0.01) == pytest.approx(slowest_chip_lag(16, 0.01))
    assert (
        slowest_chip_lag(16, 0.01)
        < straggler_slowdown([0.999, 0.999, 0.999, 1.0], 16, 0.01)
        < slowest_chip_lag(64, 0.01)
    )
    assert straggler_slowdown([1.0], 1, 0.01) == 0.0
