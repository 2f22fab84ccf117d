"""By which algorithm a collective runs, from the times that were measured."""

import pytest

from danlu.comm.chosen_collectives import ChosenCollectives, MeasuredChoice
from danlu.comm.level_collectives import LevelCollectives
from danlu.comm.level_groups import LevelGroups
from danlu.cost.collectives import all_reduce_time, build_network
from danlu.report.collective_tables import algorithm_choices
from danlu.spec import Cluster
from danlu.spec.cluster import CollectiveAlgorithm, CollectiveCurve, CollectiveOp

SIZES = (1_000.0, 1_000_000.0, 100_000_000.0)


def curve(
    algorithm: CollectiveAlgorithm, *seconds: float, operation: CollectiveOp = "all_reduce", ranks: int = 8
) -> CollectiveCurve:
    return CollectiveCurve(operation=operation, ranks=ranks, algorithm=algorithm, sizes=SIZES, seconds=seconds)


def cluster(*curves: CollectiveCurve) -> Cluster:
    measured = [each.model_dump() for each in curves]
    levels = [
        {"name": "node", "fanout": 4, "bandwidth": 1e10, "latency": 1e-6},
        {"name": "trunk", "fanout": 2, "bandwidth": 1e9, "latency": 1e-5, "collectives": measured},
    ]
    chip = {"name": "core", "kind": "cpu", "memory": 10**9, "memory_bandwidth": 1e10, "peak": {"fp32": 1e11}}
    return Cluster.model_validate({"name": "tuned", "chip": chip, "levels": levels})


TUNED = cluster(
    curve("library", 1e-4, 2e-2, 3.0),
    curve("host", 2e-4, 1e-2, 1.5),
    curve("levels", 3e-4, 2e-2, 1.0),
    curve("library", 1e-4, 2e-2, 1.0, operation="all_to_all"),
    curve("levels", 1e-3, 3e-2, 2.0, operation="all_to_all"),
)


def test_the_fastest_is_chosen_at_every_size() -> None:
    choose = MeasuredChoice(TUNED.levels).for_group(1, 8)
    assert choose is not None
    assert [choose("all_reduce", int(size)) for size in SIZES] == ["library", "host", "levels"]
    assert choose("all_reduce", 30_000_000) == "levels", "between two sizes the curves are interpolated"
    assert choose("all_to_all", 50_000_000) == "library"
    assert choose("all_gather", 1_000) == "default", "it was not measured"


@pytest.mark.parametrize(
    ("chosen", "answered"), [("levels", True), ("library", False), ("host", True), ("memory", True), ("default", True)]
)
def test_a_group_without_the_fastest_algorithm_goes_the_usual_way(chosen: CollectiveAlgorithm, answered: bool) -> None:
    """Of one rank per host in every supernode, levels and hosts are the same: it has no second way."""
    own = LevelCollectives(LevelGroups(()))
    group = ChosenCollectives({"levels": own}, lambda operation, size: chosen)
    assert group.answers("all_reduce", 8) is answered
    assert group.answers("all_to_all", 8) is (chosen == "levels"), "the usual way of all-to-alls is the library's"
    assert not group.answers("all_to_all", 0)


def test_groups_that_nothing_was_measured_for_have_no_choice() -> None:
    assert MeasuredChoice(TUNED.levels).for_group(0, 4) is None
    probed = cluster(curve("default", 1e-4, 1e-2, 1.0))
    assert MeasuredChoice(probed.levels).for_group(1, 8) is None


def test_a_prediction_takes_the_time_of_the_fastest() -> None:
    network = build_network(TUNED, 1.0, 1.0, 0.0)
    assert [all_reduce_time(network, (4, 2), size) for size in SIZES] == pytest.approx([1e-4, 1e-2, 1.0])


def test_the_table_says_what_the_others_take() -> None:
    small, middle, large, exchange = algorithm_choices(TUNED)
    assert (small.algorithm, middle.algorithm, large.algorithm) == ("library", "host", "levels")
    assert large.others == pytest.approx({"library": 3.0, "host": 1.5})
    assert (exchange.operation, exchange.smallest, exchange.largest) == ("all_to_all", SIZES[0], SIZES[-1])
    assert algorithm_choices(cluster(curve("default", 1e-4, 1e-2, 1.0))) == []
