"""Predictions from what a probe measured: between the points, beyond them, and instead of the data sheet."""

from itertools import pairwise
from typing import get_args

import pytest
from made_questions import DENSE, EXPERTS, machine, question
from pydantic import ValidationError

from danlu.cost.collectives import all_gather_time, all_reduce_time, build_network, p2p_time, reduce_scatter_time
from danlu.cost.measured_times import CollectiveTimes, InterpolatedCurve
from danlu.cost.parallel_layout import ParallelLayout
from danlu.cost.software import DANLU
from danlu.cost.step_prediction import Predictor
from danlu.cost.stragglers import slowest_chip_lag
from danlu.planner.mesh_placement import PlacementEnumerator
from danlu.planner.pricing import PlanPricer
from danlu.planner.search_space import SearchSpace
from danlu.spec import load_cluster
from danlu.spec.cluster import TP_PROBE_TOKENS, TP_PROBE_WIDTH, Cluster, CollectiveCurve, OperatorName, TimingCurve
from danlu.spec.recipe import BatchConfig
from danlu.spec.toml import dumps

BATCH = BatchConfig(sequences=16, length=2048)
OPERATORS = {operator: TimingCurve(sizes=(1.0, 1e12), seconds=(1e-9, 1e3)) for operator in get_args(OperatorName)}
"""Every operator takes a nanosecond for each of its size."""


def probed(**chip: object) -> Cluster:
    """A small machine whose operators and collectives were measured."""
    collectives = [
        CollectiveCurve(operation=operation, ranks=ranks, sizes=(1e3, 1e9), seconds=(1e-4, ranks * 1.0))
        for operation in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p")
        for ranks in (2, 4)
    ]
    cluster = machine(nodes=2, per_node=2)
    levels = tuple(level.model_copy(update={"collectives": tuple(collectives)}) for level in cluster.levels)
    made = cluster.chip.model_copy(update={"name": "unheard of", "operators": {"bf16": OPERATORS}} | chip)
    return cluster.model_copy(update={"chip": made, "levels": levels})


def test_a_curve_passes_through_its_points_and_grows_between_them() -> None:
    line = InterpolatedCurve(TimingCurve(sizes=(10.0, 100.0, 1000.0), seconds=(1e-3, 2e-3, 3e-2)))
    assert [line.seconds_at(size) for size in (10, 100, 1000)] == pytest.approx([1e-3, 2e-3, 3e-2])
    assert line.seconds_at(0) == 0
    times = [line.seconds_at(size) for size in (1, 5, 10, 31.6, 100, 316, 1000, 5000)]
    assert all(low <= high for low, high in pairwise(times))
    assert line.seconds_at(10000) >= 10 * line.seconds_at(1000)


def test_a_latency_stays_and_a_square_goes_on() -> None:
    flat = InterpolatedCurve(TimingCurve(sizes=(10.0, 100.0), seconds=(1e-3, 1e-3)))
    assert flat.seconds_at(1) == pytest.approx(1e-3)
    square = InterpolatedCurve(TimingCurve(sizes=(10.0, 100.0), seconds=(1e-3, 1e-1)))
    assert square.seconds_at(1000) == pytest.approx(10.0)


def test_traffic_grows_with_its_bytes_and_no_faster() -> None:
    burst = CollectiveCurve(
        operation="p2p", ranks=2, sizes=(1e5, 1e6), seconds=(1e-3, 5e-2)
    )  # its first bytes were free
    assert CollectiveTimes([burst]).seconds("p2p", 2, 1e8) == pytest.approx(5.0)


def test_a_group_of_another_size_is_taken_from_the_closest() -> None:
    times = CollectiveTimes(
        CollectiveCurve(operation="all_gather", ranks=ranks, sizes=(1.0, 1e6), seconds=(1.0, 1.0 * ranks))
        for ranks in (2, 8)
    )
    assert times.seconds("all_gather", 2, 1e6) == pytest.approx(2.0)
    assert times.seconds("all_gather", 16, 1e6) == pytest.approx(8.0 * (15 / 16) / (7 / 8))
    assert times.seconds("all_reduce", 2, 1e6) is None


def test_measured_collectives_stand_in_for_bandwidth() -> None:
    network = build_network(probed(), 1.0, 1.0, 1e-5)
    assert all_gather_time(network, (2, 1), 1e9) == pytest.approx(2.0)
    assert reduce_scatter_time(network, (2, 2), 1e9) == pytest.approx(4.0)
    assert all_reduce_time(network, (1, 1), 1e9) == 0.0
    assert p2p_time(network, 0, 1e9) == pytest.approx(2.0)
    assert all_gather_time(build_network(machine(), 1.0, 1.0, 1e-5), (2, 1), 1e9) < 0.1


def test_a_probed_chip_is_predicted_from_its_operators() -> None:
    layout = ParallelLayout(shard=4, reshard_after_forward=True)
    slow = {name: curve.model_copy(update={"seconds": (2e-9, 2e3)}) for name, curve in OPERATORS.items()}
    once = Predictor(DENSE, BATCH, probed(), DANLU).predict(layout)
    twice = Predictor(DENSE, BATCH, probed(operators={"bf16": slow}), DANLU).predict(layout)
    for part in ("linear", "attention", "elementwise", "head", "optimizer"):
        assert twice.parts[part] == pytest.approx(2 * once.parts[part])
    assert once.seconds == pytest.approx(sum(once.parts.values()))
    assert not once.assumptions


@pytest.mark.parametrize(
    "operator", [name for name in get_args(OperatorName) if "dispatch" not in name and name != "split"]
)
def test_no_measured_operator_is_forgotten(operator: OperatorName) -> None:
    layout = ParallelLayout(shard=4, reshard_after_forward=True)
    slower = OPERATORS | {operator: TimingCurve(sizes=(1.0, 1e12), seconds=(1e-8, 1e4))}
    seconds = [
        Predictor(DENSE, BATCH, probed(operators={"bf16": curves}), DANLU).predict(layout).seconds
        for curves in (OPERATORS, slower)
    ]
    assert seconds[1] > seconds[0]


def test_shared_matrices_cost_the_host_as_measured() -> None:
    slower = OPERATORS | {"split": TimingCurve(sizes=(1.0, 2.0), seconds=(1.0, 2.0))}
    seconds = [
        Predictor(DENSE, BATCH, probed(operators={"bf16": curves}), DANLU)
        .predict(ParallelLayout(shard=2, tp=tp))
        .seconds
        for tp in (1, 2)
        for curves in (OPERATORS, slower)
    ]
    assert seconds[0] == seconds[1]
    assert seconds[3] - seconds[2] >= DENSE.layers


def test_collectives_of_shared_layers_are_not_counted_twice() -> None:
    short = DENSE.model_copy(update={"width": TP_PROBE_WIDTH, "heads": 4, "kv_heads": 4, "mlp_width": 512})
    tensor = [
        Predictor(short, BatchConfig(sequences=1, length=length), probed(), DANLU)
        .predict(ParallelLayout(tp=2))
        .parts["tensor"]
        for length in (TP_PROBE_TOKENS, 64 * TP_PROBE_TOKENS)
    ]
    assert tensor[0] == 0
    assert tensor[1] > 0


def test_experts_are_dispatched_as_measured() -> None:
    slower = OPERATORS | {"dispatch": TimingCurve(sizes=(1.0, 1e12), seconds=(1e-8, 1e4))}
    layout = ParallelLayout(shard=4, ep=4, reshard_after_forward=True)
    seconds = [
        Predictor(EXPERTS, BATCH, probed(operators={"bf16": curves}), DANLU).predict(layout).seconds
        for curves in (OPERATORS, slower)
    ]
    assert seconds[1] > seconds[0]


def test_fp16_has_a_peak_of_its_own() -> None:
    peaks = {"bf16": 1e12, "fp16": 4e12, "fp32": 1e11}
    cluster = probed(peak=peaks, operators={})
    slow, fast = (Predictor(DENSE, BATCH, cluster, DANLU, dtype=dtype).context.device for dtype in ("bf16", "fp16"))
    assert (slow.peak, fast.peak) == (1e12, 4e12)


def test_what_was_not_probed_is_said() -> None:
    (note,) = Predictor(DENSE, BATCH, probed(), DANLU, dtype="fp32").context.assumptions
    assert "bf16" in note and "fp32" in note
    (note,) = Predictor(DENSE, BATCH, probed(operators={}), DANLU).context.assumptions
    assert "no calibration for unheard of" in note


def test_ranks_that_wait_leave_their_cores_to_the_others() -> None:
    pipeline, flat = ParallelLayout(pp=4, microbatches=4), ParallelLayout(shard=4, reshard_after_forward=True)
    for layout, differs in ((pipeline, True), (flat, False)):
        apart, sharing = (
            Predictor(DENSE, BATCH, probed(alone=alone), DANLU).predict(layout).seconds for alone in (1.0, 2.0)
        )
        assert (sharing < apart) is differs


@pytest.mark.parametrize(
    "layout",
    [ParallelLayout(shard=4, reshard_after_forward=True), ParallelLayout(shard=2, tp=2)],
    ids=["sharded", "tensor parallel"],
)
def test_ranks_that_come_late_are_waited_for_as_measured(layout: ParallelLayout) -> None:
    even, uneven = (
        Predictor(DENSE, BATCH, probed(spread=spread), DANLU).predict(layout).parts for spread in (0.0, 0.1)
    )
    computed = sum(even[part] for part in ("linear", "attention", "elementwise", "head"))
    assert even["stragglers"] == 0
    assert uneven["stragglers"] == pytest.approx(slowest_chip_lag(4, 0.1) * computed)
    assert even["tensor"] > 0 or layout.tp == 1


def test_a_chip_that_waits_for_its_collectives_hides_nothing() -> None:
    hides, waits = (
        Predictor(DENSE, BATCH, probed(overlaps=overlaps), DANLU)
        .predict(ParallelLayout(shard=4, reshard_after_forward=True))
        .parts["gather"]
        for overlaps in (True, False)
    )
    assert waits > hides


def test_bounds_hold_on_a_probed_machine() -> None:
    asked = question(DENSE, probed(alone=2.0, overlaps=False), without="zbv,zero-bubble")
    pricing, places = PlanPricer(asked), PlacementEnumerator(asked.cluster)
    for candidate in SearchSpace(asked).candidates():
        for place in places.placements(candidate.degrees):
            exact = pricing.price(candidate, place).seconds
            assert pricing.lower_bound(candidate).seconds <= exact * (1 + 1e-9)
            of_shape = pricing.shape_lower_bound(candidate.shape, candidate.schedule, (candidate.data,))
            assert of_shape <= exact * (1 + 1e-9)


def test_a_probed_cluster_round_trips_through_its_file(tmp_path: object) -> None:
    cluster = probed(alone=1.5, overlaps=False)
    file = tmp_path / "cluster.toml"  # type: ignore[operator]
    file.write_text(dumps(cluster))
    assert load_cluster(str(file)) == cluster


@pytest.mark.parametrize(
    ("sizes", "seconds", "said"),
    [
        ((1.0, 2.0), (1.0,), "at least 2"),
        ((1.0, 2.0, 3.0), (1.0, 2.0), "must have the same length"),
        ((2.0, 1.0), (1.0, 2.0), "must be above 0 and increasing"),
        ((0.0, 1.0), (1.0, 2.0), "must be above 0 and increasing"),
        ((1.0, 2.0), (0.0, 2.0), "must be above 0, but one is 0.0"),
    ],
)
def test_a_curve_that_cannot_be_is_refused(sizes: tuple[float, ...], seconds: tuple[float, ...], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        TimingCurve(sizes=sizes, seconds=seconds)
