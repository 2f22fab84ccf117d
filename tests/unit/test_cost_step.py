"""The prediction of a step: its parts, its limits, and what must make it slower or larger."""

import time
from dataclasses import replace
from math import inf

import pytest

from danlu.cost.calibration import load_calibration
from danlu.cost.collectives import Link, Network
from danlu.cost.overlap import exposed_time
from danlu.cost.parallel_layout import LayoutGroups, ParallelLayout, layout_from_plan
from danlu.cost.parameter_count import count_parameters, flops_per_token
from danlu.cost.pipeline_formula import StageTime, pipeline_time
from danlu.cost.pipeline_schedules import pipeline_actions
from danlu.cost.pipeline_simulator import simulate
from danlu.cost.software import DANLU, ZERO_1, Software, TokenDispatch
from danlu.cost.step_prediction import Predictor, predict
from danlu.spec.cluster import Chip, Cluster, NetworkLevel
from danlu.spec.load import load_cluster, load_model
from danlu.spec.model import Model, Moe
from danlu.spec.plan import Degrees, PipelineConfig, PipelineSchedule, Plan
from danlu.spec.recipe import BatchConfig

LLAMA, BATCH, POD = load_model("llama3-8b"), BatchConfig(sequences=256, length=8192), load_cluster("h100-pod")
MIXTRAL = load_model("mixtral-8x7b")


def seconds(layout: ParallelLayout, model: Model = LLAMA, software: Software = DANLU, cluster: Cluster = POD) -> float:
    return Predictor(model, BATCH, cluster, software).predict(layout).seconds


@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(shard=64, microbatches=2, reshard_after_forward=True),
        ParallelLayout(pp=4, shard=8, tp=2, microbatches=16),
        ParallelLayout(pp=4, shard=8, tp=2, microbatches=16, schedule="interleaved", stages_per_rank=2),
        ParallelLayout(replicate=4, shard=4, cp=2, tp=2, microbatches=4, reshard_after_forward=True),
    ],
)
def test_the_parts_add_up(layout: ParallelLayout) -> None:
    found = Predictor(LLAMA, BATCH, POD).predict(layout)
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    assert all(part >= 0 for part in found.parts.values())


def test_a_step_is_never_faster_than_the_peak() -> None:
    layout = ParallelLayout(shard=64, microbatches=2, reshard_after_forward=True)
    floor = BATCH.tokens * flops_per_token(LLAMA, BATCH.length) / (64 * POD.chip.peak["bf16"])
    assert 1.4 * floor < seconds(layout) < 3 * floor


def test_tensor_parallelism_across_nodes_is_slow() -> None:
    assert seconds(ParallelLayout(shard=8, tp=16, microbatches=8)) > 1.3 * seconds(
        ParallelLayout(shard=16, tp=8, microbatches=4)
    )


def test_a_narrow_fabric_slows_what_crosses_it() -> None:
    outer = POD.levels[1].model_copy(update={"bandwidth": POD.levels[1].bandwidth / 8})
    narrow = POD.model_copy(update={"levels": (POD.levels[0], outer, POD.levels[2])})
    everywhere, inside = (
        ParallelLayout(shard=256, reshard_after_forward=True),
        ParallelLayout(replicate=32, shard=8, reshard_after_forward=True),
    )
    assert seconds(everywhere, cluster=narrow) > 1.2 * seconds(everywhere)
    # between groups half-precision gradients go twice, across all ranks parameters too
    half = replace(DANLU, gradient_bytes=2)
    assert seconds(inside, cluster=narrow, software=half) < seconds(everywhere, cluster=narrow, software=half)


def test_recompute_takes_a_third_more_and_saves_memory() -> None:
    layout = ParallelLayout(shard=64, microbatches=2, reshard_after_forward=True)
    plain, again = (
        Predictor(LLAMA, BATCH, POD, replace(DANLU, recompute=word)).predict(layout) for word in ("none", "full")
    )
    assert 1.2 < again.seconds / plain.seconds < 1.4
    assert again.memory.activations < 0.2 * plain.memory.activations
    assert not plain.fits(again.memory.device_bytes)
    assert again.fits(again.memory.device_bytes)


def test_experts_out_of_balance_cost_their_excess() -> None:
    layout = ParallelLayout(shard=32, ep=8, microbatches=4, reshard_after_forward=True)
    even, uneven = (seconds(layout, MIXTRAL, replace(DANLU, expert_imbalance=factor)) for factor in (1.0, 1.5))
    assert 1.1 * even < uneven < 1.5 * even


def test_a_rank_that_has_all_experts_knows_no_imbalance() -> None:
    layout = ParallelLayout(shard=32, microbatches=4, reshard_after_forward=True)
    even, uneven = (seconds(layout, MIXTRAL, replace(DANLU, expert_imbalance=factor)) for factor in (1.0, 1.5))
    assert even == uneven


def test_experts_in_one_node_beat_experts_across() -> None:
    inside = ParallelLayout(shard=64, ep=8, microbatches=4, reshard_after_forward=True)
    across = inside._replace(group_shapes=(("ep", (1, 8, 1)),))
    assert seconds(across, MIXTRAL) > 1.05 * seconds(inside, MIXTRAL)


def test_parts_hide_all_ways_but_two() -> None:
    """Of the first part the way to the experts, of the last the way back; of many parts, latencies are left."""

    layout = ParallelLayout(shard=8, ep=8, microbatches=32, reshard_after_forward=True)

    def expert_seconds(chunks: int) -> float:
        software = replace(DANLU, dispatch=TokenDispatch(chunks=chunks))
        return Predictor(MIXTRAL, BATCH, POD, software).predict(layout).parts["expert"]

    whole, halves, quarters = (expert_seconds(chunks) for chunks in (1, 2, 4))
    contention = load_calibration().overheads.contention
    assert 0.5 + 0.5 * contention <= halves / whole < 0.7, "and the latency of twice as many sends"
    assert 0.25 + 0.75 * contention <= quarters / whole < 0.55


def test_parts_of_tokens_that_are_sent_once_hide_the_outermost_level_alone() -> None:
    """Over four nodes of two ranks each: what is sent inside a node is waited for, whatever the parts."""
    groups = (("ep", (2, 4, 1)), ("expert_shard", (4, 1, 1)))
    layout = ParallelLayout(shard=32, ep=8, microbatches=8, reshard_after_forward=True, group_shapes=groups)

    def expert_seconds(chunks: int, free: int | None = None) -> float:
        predictor = Predictor(MIXTRAL, BATCH, POD, replace(DANLU, dispatch=TokenDispatch(True, chunks)))
        network = predictor.context.network
        links = [
            replace(link, bandwidth=inf, latency=0.0) if free == i else link for i, link in enumerate(network.links)
        ]
        return (
            predictor.on(replace(network, links=tuple(links), collective_latency=0.0)).predict(layout).parts["expert"]
        )

    inside, across = expert_seconds(1, free=1), expert_seconds(1, free=0)
    assert expert_seconds(1) == pytest.approx(inside + across)
    hidden = across - expert_seconds(4, free=0)
    assert 0.4 * across < hidden < 0.75 * across
    assert expert_seconds(4) == pytest.approx(inside + across - hidden, rel=0.02), "and latencies of more sends"


def test_a_plan_is_laid_out_as_it_says() -> None:
    plan = Plan(
        degrees=Degrees(pp=4, replicate=2, shard=4, tp=8),
        mapping={"tp": {"node": 8}, "shard": {"pod": 4}},
        microbatches=32,
        pipeline=PipelineConfig(schedule="interleaved", stages_per_rank=2),
        recompute="full",
    )
    layout = layout_from_plan(plan, POD)
    assert layout.world == 256 and layout.stages_per_rank == 2 and not layout.reshard_after_forward
    assert layout.group_shapes == (("shard", (1, 4, 1)), ("tp", (8, 1, 1)))
    found = predict(LLAMA, plan, BATCH, POD)
    assert found.parts["recompute"] > 0
    assert found.seconds == Predictor(LLAMA, BATCH, POD, replace(DANLU, recompute="full")).predict(layout).seconds


def a_chip(name: str, kind: str = "cuda") -> Chip:
    return Chip(name=name, kind=kind, memory=10**11, memory_bandwidth=2e12, peak={"bf16": 3e14})


def test_a_chip_without_calibration_says_so() -> None:
    chip = a_chip("Elixir-1", "cpu")
    level = NetworkLevel(name="node", fanout=8, bandwidth=1e11, latency=1e-6)
    found = predict(LLAMA, Plan(degrees=Degrees(shard=8)), BATCH, Cluster(name="x", chip=chip, levels=(level,)))
    assert found.assumptions == ("no calibration for Elixir-1: using the default efficiencies, an A100's",)
    assert load_calibration().efficiency_of(chip) == load_calibration().default


def test_calibration_is_found_by_the_longest_name() -> None:
    constants = load_calibration()
    a100, h100 = a_chip("A100-SXM-80GB"), a_chip("H100-SXM-80GB")
    assert constants.efficiency_of(a100) == constants.chips["A100"]
    assert constants.efficiency_of(a_chip("GB200")) == constants.chips["GB200"] != constants.chips["B200"]
    assert constants.efficiency_of(h100, native=True) == constants.chips["H100 native"]
    assert constants.efficiency_of(a100, native=True) == constants.chips["A100"]
    assert constants.assumptions(h100, "bf16") == ()


@pytest.mark.parametrize(
    ("chip", "entry", "why"),
    [
        (a_chip("H800-SXM-80GB"), "H100", "the same architecture"),
        (a_chip("GH200"), "H100", "the same architecture"),
        (a_chip("A800"), "A100", "the same architecture"),
        (a_chip("MI250X", "rocm"), "MI3", "both are driven by rocm"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_chip_of_a_known_architecture_gets_its_efficiencies_and_says_so(chip: Chip, entry: str, why: str) -> None:
    constants = load_calibration()
    assert constants.efficiency_of(chip) == constants.chips[entry]
    assert constants.assumptions(chip, "bf16") == (f"no calibration for {chip.name}: using those of {entry} ({why})",)


def test_full_recompute_ends_before_the_last_matmul() -> None:
    """As PyTorch's checkpointing does: a matmul of the MLP, and under tp its reduction, are spared."""
    layout = ParallelLayout(shard=8, tp=8, microbatches=4)
    early, whole = (
        Predictor(LLAMA, BATCH, POD, replace(DANLU, recompute="full", recompute_stops_early=early))
        .predict(layout)
        .parts
        for early in (True, False)
    )
    down = LLAMA.mlp_width / (3 * LLAMA.mlp_width + 2 * LLAMA.width * (1 + LLAMA.kv_heads / LLAMA.heads))
    forward = whole["linear"] / 3  # the backward pass has two matmuls for every one of the forward pass
    assert whole["recompute"] - early["recompute"] == pytest.approx(down * forward, rel=0.1)
    once = whole["tensor"] / 3  # forward, backward and recompute each have the same traffic
    assert early["tensor"] == pytest.approx(whole["tensor"] - once / 4)


def test_experts_that_are_called_one_by_one_wait_for_the_host() -> None:
    """Of many small experts every matmul is a launch; one grouped kernel, or a captured graph, is not."""
    small = LLAMA.model_copy(update={"moe": Moe(experts=128, top_k=2, width=256)})
    layout = ParallelLayout(shard=8, ep=1, microbatches=32)
    waiting = [
        Predictor(small, BATCH, POD, replace(DANLU, **trait)).predict(layout).parts["waiting"]
        for trait in ({}, {"fused_grouped_gemm": True}, {"graph_capture": True})
    ]
    assert waiting[0] > 2 * waiting[1] and waiting[2] == 0.0


def test_hidden_traffic_costs_its_contention() -> None:
    assert exposed_time(2.0, 10.0, 0.1) == pytest.approx(0.2)
    assert exposed_time(12.0, 10.0, 0.1) == pytest.approx(3.0)


@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved", 4)])
def test_the_closed_form_is_what_the_actions_take(schedule: PipelineSchedule, stages: int) -> None:
    places, microbatches = 4, 16
    order = pipeline_actions(schedule, pp_ranks=places, microbatches=microbatches, stages_per_rank=stages)
    durations = {
        (kind, stage): seconds for stage in range(places * stages) for kind, seconds in (("F", 1.0), ("B", 2.0))
    }
    exact = simulate(order, durations).total  # type: ignore[arg-type]
    times = [StageTime(1.0 * stages, 2.0 * stages, 1.0)] * places
    assert pipeline_time(times, microbatches, schedule, stages) == pytest.approx(exact)


@pytest.mark.parametrize("heavy", [0, 1, 2, 3])
def test_the_closed_form_with_one_slow_stage(heavy: int) -> None:
    order = pipeline_actions("1f1b", pp_ranks=4, microbatches=32)
    slow = {stage: 1.5 if stage == heavy else 1.0 for stage in range(4)}
    durations = {(kind, stage): each * slow[stage] for stage in range(4) for kind, each in (("F", 1.0), ("B", 2.0))}
    exact = simulate(order, durations).total  # type: ignore[arg-type]
    times = [StageTime(slow[stage], 2 * slow[stage], slow[stage]) for stage in range(4)]
    assert pipeline_time(times, 32, "1f1b", 1) == pytest.approx(exact)


def test_the_closed_form_counts_every_way_once() -> None:
    hops = (0.1, 0.7, 0.2)
    order = pipeline_actions("1f1b", pp_ranks=4, microbatches=1)
    durations = {(kind, stage): seconds for stage in range(4) for kind, seconds in (("F", 1.0), ("B", 2.0))}
    transfers = {pair: hop for rank, hop in enumerate(hops) for pair in ((rank, rank + 1), (rank + 1, rank))}
    exact = simulate(order, durations, transfers).total  # type: ignore[arg-type]
    for slowest in range(4):
        times = [
            StageTime(1.0, 2.0 + 1e-9 * (rank == slowest), 1.0, p2p_next=2 * after, p2p_previous=2 * before)
            for rank, (before, after) in enumerate(zip((0.0, *hops), (*hops, 0.0), strict=True))
        ]
        assert pipeline_time(times, 1, "1f1b", 1) == pytest.approx(exact)


def test_a_pipeline_hops_over_the_level_between_two_ranks() -> None:
    inside, across = POD.levels[0].fanout, 4
    network = Predictor(LLAMA, BATCH, POD).context.network
    places = LayoutGroups(ParallelLayout(pp=across * 2, tp=inside // 2), network, expert_tp=1)
    assert [places.p2p_level(rank) for rank in range(4)] == [0, 1, 0, 1]
    places = LayoutGroups(ParallelLayout(pp=across, tp=inside), network, expert_tp=1)
    assert [places.p2p_level(rank) for rank in range(3)] == [1, 1, 1]


def test_what_the_backward_begins_with_is_not_gathered_again() -> None:
    software = replace(DANLU, overlap_grad_reduce=False)
    layout = ParallelLayout(shard=8, microbatches=2, reshard_after_forward=True)
    freed, kept = (
        Predictor(LLAMA, BATCH, POD, software).predict(each).parts
        for each in (layout, layout._replace(reshard_after_forward=False))
    )
    head = LLAMA.vocabulary * LLAMA.width / count_parameters(LLAMA)
    gathered = freed["gather"] - kept["gather"]
    assert gathered > 0
    assert freed["gather"] / gathered == pytest.approx((2 - head + 2) / (1 - head), rel=0.02)  # gradients are fp32


def test_slow_chips_do_not_slow_the_network() -> None:
    narrow = POD.model_copy(
        update={"levels": tuple(level.model_copy(update={"bandwidth": level.bandwidth / 16}) for level in POD.levels)}
    )
    software, layout = (
        replace(DANLU, overlap_grad_reduce=False),
        ParallelLayout(shard=64, microbatches=2, reshard_after_forward=True),
    )
    wide, slow = (Predictor(LLAMA, BATCH, cluster, software).predict(layout) for cluster in (POD, narrow))
    assert slow.seconds > 1.5 * wide.seconds
    assert slow.parts["stragglers"] == pytest.approx(wide.parts["stragglers"])


def test_zero_bubble_waits_less() -> None:
    times = [StageTime(1.0, 2.0, 1.0)] * 8
    plain, zero = (pipeline_time(times, 16, schedule, 1) for schedule in ("1f1b", "zero-bubble"))
    assert plain == 16 * 3 + 7 * 3
    assert zero == 16 * 3 + 7 * 1  # F + B − 2 W
    assert pipeline_time(times, 16, "zbv", 2) == 16 * 3


def test_a_distributed_optimizer_sends_parameters_back() -> None:
    layout = ParallelLayout(pp=4, shard=8, tp=2, microbatches=16)
    megatron = Software(sharding=ZERO_1, reduce_every_microbatch=False, overlap_grad_reduce=False)
    found = Predictor(LLAMA, BATCH, POD, megatron).predict(layout)
    assert found.parts["gradients"] == pytest.approx(2 * found.parts["parameters"], rel=0.05)  # fp32 against half
    hidden = Predictor(LLAMA, BATCH, POD, replace(megatron, overlap_grad_reduce=True)).predict(layout)
    assert hidden.parts["gradients"] < 0.5 * found.parts["gradients"]


def test_a_layout_takes_less_than_a_millisecond() -> None:
    model = LLAMA.model_copy(update={"moe": Moe(experts=64, top_k=4, width=2048)})
    predictor = Predictor(model, BatchConfig(sequences=1024, length=4096), POD)
    layouts = [
        ParallelLayout(pp=pp, shard=512 // (pp * tp), tp=tp, ep=ep, microbatches=microbatches)
        for pp in (1, 2, 4, 8)
        for tp in (1, 2, 4, 8)
        for ep in (1, 2, 4, 8)
        for microbatches in (1, 2)
    ]
    for layout in layouts:
        predictor.predict(layout)
    rounds = []
    for _ in range(5):
        start = time.process_time()
        for layout in layouts:
            predictor.predict(layout)
        rounds.append((time.process_time() - start) / len(layouts))
    # 330 µs on a core at rest; beside other work on a shared core it took 620.
    assert min(rounds) < 1000e-6, rounds


def test_replicas_of_a_pipeline_sum_their_gradients_at_the_end_of_a_step() -> None:
    """On one wire: scattering a whole gradient over two ranks sends half of it, summing that half over two as much."""

    def sent(replicate: int) -> float:
        """Seconds at a byte a second."""
        layout = ParallelLayout(pp=2, shard=2, replicate=replicate, microbatches=4)
        parts = []
        for bandwidth in (1.0, inf):
            predictor = Predictor(LLAMA, BATCH, POD, replace(DANLU, overlap_grad_reduce=False))
            wire = Network((Link(layout.world, bandwidth, latency=0.0),), collective_latency=0.0)
            parts.append(predictor.on(wire).predict(layout).parts["gradients"])
        return parts[0] - parts[1]

    alone = sent(replicate=1)
    assert alone > 0
    assert sent(replicate=2) == pytest.approx(2 * alone)
