"""The dry run at sizes this machine does not have."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from danlu.cli.app import app
from danlu.framework.dryrun import NotYetDryError, dry_run
from danlu.report.trace import traffic_table
from danlu.spec import load_cluster
from danlu.spec.load import load_model
from danlu.spec.plan import Degrees, Pipeline, Plan
from danlu.spec.recipe import Batch, Data, Recipe
from danlu.spec.trace import Trace

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.toml"


def recipe(model: str = "tiny-llama", sequences: int = 512) -> Recipe:
    return Recipe(
        name="dry",
        steps=1,
        model=load_model(model),
        data=Data(shards="none"),
        batch=Batch(sequences=sequences, length=64),
    )


def total(trace: Trace, axes: str) -> int:
    return sum(call.total for call in trace.collectives if call.axes == axes)


def test_a_rank_of_two_thousand_is_run_here() -> None:
    plan = Plan(degrees=Degrees(replicate=2, shard=256, tp=4))
    trace = dry_run(recipe(), plan, load_cluster("h100-pod"), rank=2047)
    assert (trace.rank, trace.world) == (2047, 2048)
    levels = {call.axes: call.level for call in trace.collectives}
    assert levels == {"tp": "node", "shard": "pod", "replicate": "pod", "world": "pod"}
    assert trace.peak == sum(trace.peak_by_kind.values())


def test_sharding_divides_the_states_and_a_replica_adds_none() -> None:
    one = dry_run(recipe(sequences=8), Plan(), None, rank=0)
    eight = dry_run(recipe(sequences=8), Plan(degrees=Degrees(shard=8)), None, rank=3)
    assert eight.peak_by_kind["parameters"] == pytest.approx(one.peak_by_kind["parameters"] / 8, rel=0.01)
    assert eight.peak_by_kind["optimiser"] == pytest.approx(one.peak_by_kind["optimiser"] / 8, rel=0.01)
    assert one.collectives == ()


def test_recompute_lowers_the_peak() -> None:
    peaks = [dry_run(recipe(sequences=8), Plan(recompute=mode), None, 0).peak for mode in ("none", "selective", "full")]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == 3


def test_stages_of_a_pipeline_differ() -> None:
    plan = Plan(degrees=Degrees(pp=4, shard=16), microbatches=8, pipeline=Pipeline(schedule="1f1b"))
    first, last = (dry_run(recipe(), plan, None, rank) for rank in (0, 63))
    assert total(first, "pp") == total(last, "pp") > 0
    assert first.peak != last.peak


def test_experts_are_routed_evenly_and_exchanged_among_the_ranks_that_hold_them() -> None:
    plan = Plan(degrees=Degrees(shard=64, ep=8))
    trace = dry_run(recipe("tiny-moe"), plan, None, rank=63)
    exchanges = [call for call in trace.collectives if call.operation == "all_to_all" and call.dtype == "float32"]
    copies, width, layers = 512 // 64 * 64 * 2, 64, 3
    assert {call.axes for call in exchanges} == {"ep"}
    assert [call.size for call in exchanges] == [copies * width * 4]
    assert sum(call.count for call in exchanges) == 4 * layers, "there and back, forward and backward"


def test_compiled_blocks_are_refused_by_name() -> None:
    with pytest.raises(NotYetDryError, match="`compile` must be false"):
        dry_run(recipe(), Plan(compile=True), None, 0)


def test_the_table_has_every_byte() -> None:
    trace = dry_run(recipe(sequences=8), Plan(degrees=Degrees(shard=4, tp=2)), None, 0)
    assert traffic_table(trace).row_count == len({(call.axes, call.operation) for call in trace.collectives})


@pytest.mark.parametrize(("ranks", "found"), [("first,last", [0, 7]), ("5", [5]), ("0, first", [0])])
def test_the_command_runs_the_ranks_it_is_asked_for(tmp_path: Path, ranks: str, found: list[int]) -> None:
    (tmp_path / "plan.toml").write_text("[degrees]\nshard = 4\ntp = 2\n")
    command = ["dryrun", str(QUICKSTART), "--plan", str(tmp_path / "plan.toml"), "--ranks", ranks]
    result = CliRunner().invoke(app, [*command, "--json"])
    assert result.exit_code == 0, result.output
    assert [trace["rank"] for trace in json.loads(result.stdout)] == found


def test_a_rank_beyond_the_world_is_refused() -> None:
    result = CliRunner().invoke(app, ["dryrun", str(QUICKSTART), "--ranks", "1"])
    assert result.exit_code == 2
