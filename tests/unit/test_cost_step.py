"""The prediction of a step: its parts, its limits, and what must make it slower or larger."""

import time
from dataclasses import replace

import pytest

from danlu.cost.bubble import StageTime, pipeline_time
from danlu.cost.calibration import calibration
from danlu.cost.layout import Layout, layout_of
from danlu.cost.model import flops_per_token, parameters
from danlu.cost.overlap import exposed
from danlu.cost.pipeline import simulate
from danlu.cost.schedule import actions_of
from danlu.cost.software import OURS, ZERO_1, Software
from danlu.cost.step import Predictor, predict
from danlu.spec.cluster import Chip, Cluster, Level
from danlu.spec.load import load_cluster, load_model
from danlu.spec.model import Model, Moe
from danlu.spec.plan import Degrees, Pipeline, Plan, Schedule
from danlu.spec.recipe import Batch

LLAMA, BATCH, POD = load_model("llama3-8b"), Batch(sequences=256, length=8192), load_cluster("h100-pod")
MIXTRAL = load_model("mixtral-8x7b")


def seconds(layout: Layout, model: Model = LLAMA, software: Software = OURS, cluster: Cluster = POD) -> float:
    return Predictor(model, BATCH, cluster, software).step(layout).seconds


@pytest.mark.parametrize(
    "layout",
    [
        Layout(shard=64, microbatches=2, reshards=True),
        Layout(pp=4, shard=8, tp=2, microbatches=16),
        Layout(pp=4, shard=8, tp=2, microbatches=16, schedule="interleaved", stages_per_rank=2),
        Layout(replicate=4, shard=4, cp=2, tp=2, microbatches=4, reshards=True),
    ],
)
def test_the_parts_add_up(layout: Layout) -> None:
    found = Predictor(LLAMA, BATCH, POD).step(layout)
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    assert all(part >= 0 for part in found.parts.values())


def test_a_step_is_never_faster_than_the_peak() -> None:
    layout = Layout(shard=64, microbatches=2, reshards=True)
    floor = BATCH.tokens * flops_per_token(LLAMA, BATCH.length) / (64 * POD.chip.peak["bf16"])
    assert 1.4 * floor < seconds(layout) < 3 * floor


def test_tensor_parallelism_across_nodes_is_slow() -> None:
    assert seconds(Layout(shard=8, tp=16, microbatches=8)) > 1.3 * seconds(Layout(shard=16, tp=8, microbatches=4))


def test_a_narrow_fabric_slows_what_crosses_it() -> None:
    outer = POD.levels[1].model_copy(update={"bandwidth": POD.levels[1].bandwidth / 8})
    narrow = POD.model_copy(update={"levels": (POD.levels[0], outer, POD.levels[2])})
    everywhere, inside = Layout(shard=256, reshards=True), Layout(replicate=32, shard=8, reshards=True)
    assert seconds(everywhere, cluster=narrow) > 1.2 * seconds(everywhere)
    # between groups half-precision gradients go twice, across all ranks parameters too
    half = replace(OURS, gradient_bytes=2)
    assert seconds(inside, cluster=narrow, software=half) < seconds(everywhere, cluster=narrow, software=half)


def test_recompute_takes_a_third_more_and_saves_memory() -> None:
    layout = Layout(shard=64, microbatches=2, reshards=True)
    plain, again = (
        Predictor(LLAMA, BATCH, POD, replace(OURS, recompute=word)).step(layout) for word in ("none", "full")
    )
    assert 1.2 < again.seconds / plain.seconds < 1.4
    assert again.memory.activations < 0.2 * plain.memory.activations
    assert not plain.fits(again.memory.device)
    assert again.fits(again.memory.device)


def test_experts_out_of_balance_cost_their_excess() -> None:
    layout = Layout(shard=32, ep=8, microbatches=4, reshards=True)
    even, uneven = (seconds(layout, MIXTRAL, replace(OURS, imbalance=factor)) for factor in (1.0, 1.5))
    assert 1.1 * even < uneven < 1.5 * even


def test_experts_in_one_node_beat_experts_across() -> None:
    inside = Layout(shard=64, ep=8, microbatches=4, reshards=True)
    across = inside._replace(spans=(("ep", (1, 8, 1)),))
    assert seconds(across, MIXTRAL) > 1.05 * seconds(inside, MIXTRAL)


def test_a_plan_is_laid_out_as_it_says() -> None:
    plan = Plan(
        degrees=Degrees(pp=4, replicate=2, shard=4, tp=8),
        mapping={"tp": {"node": 8}, "shard": {"pod": 4}},
        microbatches=32,
        pipeline=Pipeline(schedule="interleaved", stages_per_rank=2),
        recompute="full",
    )
    layout = layout_of(plan, POD)
    assert layout.world == 256 and layout.stages_per_rank == 2 and not layout.reshards
    assert layout.spans == (("shard", (1, 4, 1)), ("tp", (8, 1, 1)))
    found = predict(LLAMA, plan, BATCH, POD)
    assert found.parts["recompute"] > 0
    assert found.seconds == Predictor(LLAMA, BATCH, POD, replace(OURS, recompute="full")).step(layout).seconds


def test_a_chip_without_calibration_says_so() -> None:
    chip = Chip(name="Elixir-1", kind="cpu", memory=10**11, memory_bandwidth=2e12, peak={"bf16": 3e14})
    level = Level(name="node", fanout=8, bandwidth=1e11, latency=1e-6)
    found = predict(LLAMA, Plan(degrees=Degrees(shard=8)), BATCH, Cluster(name="x", chip=chip, levels=(level,)))
    assert found.notes == ("no calibration for Elixir-1: the default efficiencies are taken",)
    assert calibration().of("Elixir-1") == calibration().default


def test_calibration_is_found_by_the_longest_name() -> None:
    constants = calibration()
    assert constants.of("A100-SXM-80GB") == constants.chips["A100"]
    assert constants.of("GB200") == constants.chips["GB200"] != constants.chips["B200"]
    assert constants.of("H100-SXM-80GB", native=True) == constants.chips["H100 native"]
    assert constants.of("A100-SXM-80GB", native=True) == constants.chips["A100"]


def test_hidden_traffic_costs_its_contention() -> None:
    assert exposed(2.0, 10.0, 0.1) == pytest.approx(0.2)
    assert exposed(12.0, 10.0, 0.1) == pytest.approx(3.0)


@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved", 4)])
def test_the_closed_form_is_what_the_actions_take(schedule: Schedule, stages: int) -> None:
    places, microbatches = 4, 16
    order = actions_of(schedule, places=places, microbatches=microbatches, stages_per_place=stages)
    durations = {
        (kind, stage): seconds for stage in range(places * stages) for kind, seconds in (("F", 1.0), ("B", 2.0))
    }
    exact = simulate(order, durations).total  # type: ignore[arg-type]
    times = [StageTime(1.0 * stages, 2.0 * stages, 1.0)] * places
    assert pipeline_time(times, microbatches, schedule, stages) == pytest.approx(exact)


@pytest.mark.parametrize("heavy", [0, 1, 2, 3])
def test_the_closed_form_with_one_slow_stage(heavy: int) -> None:
    order = actions_of("1f1b", places=4, microbatches=32)
    slow = {stage: 1.5 if stage == heavy else 1.0 for stage in range(4)}
    durations = {(kind, stage): each * slow[stage] for stage in range(4) for kind, each in (("F", 1.0), ("B", 2.0))}
    exact = simulate(order, durations).total  # type: ignore[arg-type]
    times = [StageTime(slow[stage], 2 * slow[stage], slow[stage]) for stage in range(4)]
    assert pipeline_time(times, 32, "1f1b", 1) == pytest.approx(exact)


def test_the_closed_form_counts_every_way_once() -> None:
    hops = (0.1, 0.7, 0.2)
    order = actions_of("1f1b", places=4, microbatches=1)
    durations = {(kind, stage): seconds for stage in range(4) for kind, seconds in (("F", 1.0), ("B", 2.0))}
    transfers = {pair: hop for rank, hop in enumerate(hops) for pair in ((rank, rank + 1), (rank + 1, rank))}
    exact = simulate(order, durations, transfers).total  # type: ignore[arg-type]
    for slowest in range(4):
        times = [
            StageTime(1.0, 2.0 + 1e-9 * (rank == slowest), 1.0, ahead=2 * after, behind=2 * before)
            for rank, (before, after) in enumerate(zip((0.0, *hops), (*hops, 0.0), strict=True))
        ]
        assert pipeline_time(times, 1, "1f1b", 1) == pytest.approx(exact)


def test_a_pipeline_hops_over_the_level_between_two_ranks() -> None:
    inside, across = POD.levels[0].fanout, 4
    places = Predictor(LLAMA, BATCH, POD).places(Layout(pp=across * 2, tp=inside // 2))
    assert [places.hop(rank) for rank in range(4)] == [0, 1, 0, 1]
    places = Predictor(LLAMA, BATCH, POD).places(Layout(pp=across, tp=inside))
    assert [places.hop(rank) for rank in range(3)] == [1, 1, 1]


def test_what_the_backward_begins_with_is_not_gathered_again() -> None:
    software = replace(OURS, hides_gradients=False)
    layout = Layout(shard=8, microbatches=2, reshards=True)
    freed, kept = (
        Predictor(LLAMA, BATCH, POD, software).step(each).parts for each in (layout, layout._replace(reshards=False))
    )
    head = LLAMA.vocabulary * LLAMA.width / parameters(LLAMA)
    gathered = freed["gather"] - kept["gather"]
    assert gathered > 0
    assert freed["gather"] / gathered == pytest.approx((2 - head + 2) / (1 - head), rel=0.02)  # gradients are fp32


def test_slow_chips_do_not_slow_the_network() -> None:
    narrow = POD.model_copy(
        update={"levels": tuple(level.model_copy(update={"bandwidth": level.bandwidth / 16}) for level in POD.levels)}
    )
    software, layout = replace(OURS, hides_gradients=False), Layout(shard=64, microbatches=2, reshards=True)
    wide, slow = (Predictor(LLAMA, BATCH, cluster, software).step(layout) for cluster in (POD, narrow))
    assert slow.seconds > 1.5 * wide.seconds
    assert slow.parts["stragglers"] == pytest.approx(wide.parts["stragglers"])


def test_zero_bubble_waits_less() -> None:
    times = [StageTime(1.0, 2.0, 1.0)] * 8
    plain, zero = (pipeline_time(times, 16, schedule, 1) for schedule in ("1f1b", "zero-bubble"))
    assert plain == 16 * 3 + 7 * 3
    assert zero == 16 * 3 + 7 * 1  # F + B − 2 W
    assert pipeline_time(times, 16, "zbv", 2) == 16 * 3


def test_a_distributed_optimizer_sends_parameters_back() -> None:
    layout = Layout(pp=4, shard=8, tp=2, microbatches=16)
    megatron = Software(sharding=ZERO_1, synchronises_every_microbatch=False, hides_gradients=False)
    found = Predictor(LLAMA, BATCH, POD, megatron).step(layout)
    assert found.parts["gradients"] == pytest.approx(2 * found.parts["parameters"], rel=0.05)  # fp32 against half
    hidden = Predictor(LLAMA, BATCH, POD, replace(megatron, hides_gradients=True)).step(layout)
    assert hidden.parts["gradients"] < 0.5 * found.parts["gradients"]


def test_a_hundred_thousand_layouts_in_a_minute() -> None:
    model = LLAMA.model_copy(update={"moe": Moe(experts=64, top_k=4, width=2048)})
    predictor = Predictor(model, Batch(sequences=1024, length=4096), POD)
    layouts = [
        Layout(pp=pp, shard=512 // (pp * tp), tp=tp, ep=ep, microbatches=microbatches)
        for pp in (1, 2, 4, 8)
        for tp in (1, 2, 4, 8)
        for ep in (1, 2, 4, 8)
        for microbatches in (1, 2)
    ]
    for layout in layouts:
        predictor.step(layout)
    start = time.process_time()
    for _ in range(5):
        for layout in layouts:
            predictor.step(layout)
    assert (time.process_time() - start) / (5 * len(layouts)) < 600e-6
