"""The dry run at sizes this machine does not have."""

from functools import cache
from pathlib import Path

import pytest
from made_dryruns import made_dryrun
from typer.testing import CliRunner

from danlu.cli.app import app
from danlu.cost.parameter_count import flops_per_token
from danlu.dryrun import dry_run
from danlu.dryrun.dry_run import dry_run_rank, dry_run_ranks
from danlu.report.dryrun_memory import describe_instant
from danlu.report.dryrun_tables import memory_table, operator_table, table_notes, traffic_table
from danlu.spec import load_cluster
from danlu.spec.load import load_model
from danlu.spec.plan import Degrees, PipelineConfig, Plan
from danlu.spec.recipe import BatchConfig, DataConfig, PrecisionConfig, Recipe
from danlu.spec.trace import MEMORY_KINDS, DryRun, Trace

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.toml"


def recipe(model: str = "tiny-llama", sequences: int = 512, compute: str = "fp32") -> Recipe:
    return Recipe(
        name="dry",
        steps=1,
        model=load_model(model),
        data=DataConfig(shards="none"),
        batch=BatchConfig(sequences=sequences, length=64),
        precision=PrecisionConfig(compute=compute),
    )


@cache
def one_rank(recompute: str = "none") -> Trace:
    """Eight sequences on one rank, run once for all tests that look at it."""
    return dry_run_rank(recipe(sequences=8), Plan.model_validate({"recompute": recompute}), None, 0)


def total(trace: Trace, axes: str) -> int:
    return sum(call.total_payload for call in trace.collectives if call.axes == axes)


def held(trace: Trace, kind: str) -> int:
    return trace.peak.held[MEMORY_KINDS.index(kind)]


def test_a_rank_of_two_thousand_is_run_here() -> None:
    plan = Plan(degrees=Degrees(replicate=2, shard=256, tp=4))
    trace = dry_run_rank(recipe(), plan, load_cluster("h100-pod"), rank=2047)
    assert (trace.rank, trace.world, trace.stands_for) == (2047, 2048, 2048)
    assert trace.place == {"pp": 0, "replicate": 1, "shard": 255, "cp": 0, "tp": 3}
    levels = {call.axes: call.level for call in trace.collectives}
    assert levels == {"tp": "node", "shard": "pod", "replicate": "pod", "world": "pod"}


def test_sharding_divides_the_states_and_a_replica_adds_none() -> None:
    one = one_rank()
    eight = dry_run_rank(recipe(sequences=8), Plan(degrees=Degrees(shard=8)), None, rank=3)
    for kind in ("parameters", "optimizer"):
        assert held(eight, kind) == pytest.approx(held(one, kind) / 8, rel=0.01)
    assert one.collectives == ()


def test_recompute_lowers_the_peak() -> None:
    peaks = [one_rank(mode).peak.total for mode in ("none", "selective", "full")]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == 3


def test_stages_of_a_pipeline_differ() -> None:
    plan = Plan(degrees=Degrees(pp=4, shard=16), microbatches=8, pipeline=PipelineConfig(schedule="1f1b"))
    first, last = (dry_run_rank(recipe(), plan, None, rank) for rank in (0, 63))
    assert total(first, "pp") == total(last, "pp") > 0
    assert first.peak.total != last.peak.total


def test_experts_are_routed_evenly_and_exchanged_among_the_ranks_that_hold_them() -> None:
    plan = Plan(degrees=Degrees(shard=64, ep=8))
    trace = dry_run_rank(recipe("tiny-moe"), plan, None, rank=63)
    exchanges = [call for call in trace.collectives if call.operation == "all_to_all" and call.dtype == "float32"]
    copies, width, layers = 512 // 64 * 64 * 2, 64, 3
    assert {call.axes for call in exchanges} == {"ep"}
    assert [call.payload for call in exchanges] == [copies * width * 4]
    assert sum(call.count for call in exchanges) == 4 * layers, "there and back, forward and backward"
    assert trace.place["ep"] == 7


def test_tokens_that_are_sent_once_are_counted_once() -> None:
    plan = Plan(degrees=Degrees(shard=64, ep=8), token_dispatcher="deduplicated")
    trace = dry_run_rank(recipe("tiny-moe"), plan, None, rank=63)
    exchanges = [call for call in trace.collectives if call.operation == "all_to_all" and call.dtype == "float32"]
    rows, width, top_k, layers = 8 * round((1 - (7 / 8) ** 2) * 512), 64, 2, 3
    counts = {rows * width * 4: 4 * layers, rows * top_k * 4: 2 * layers}
    assert {call.payload: call.count for call in exchanges} == counts, "rows there and back, and the router's weights"


def test_parts_of_tokens_are_sent_one_by_one_and_parameters_gathered_once() -> None:
    whole, parts = (
        dry_run_rank(recipe("tiny-moe"), Plan(degrees=Degrees(shard=64, ep=8), dispatch_chunks=chunks), None, rank=63)
        for chunks in (1, 4)
    )
    assert whole.flops == parts.flops

    def calls(trace: Trace, operation: str) -> dict[tuple[str, int], int]:
        found = (call for call in trace.collectives if call.operation == operation)
        return {(call.dtype, call.payload): call.count for call in found}

    for operation in ("all_gather", "reduce_scatter"):
        assert calls(parts, operation) == calls(whole, operation)
    payload, sends = 512 // 64 * 64 * 2 * 64 * 4, 4 * 3  # there and back, forward and backward, in every layer
    assert calls(whole, "all_to_all")["float32", payload] == sends
    assert calls(parts, "all_to_all")["float32", payload // 4] == 4 * sends


def test_parts_of_tokens_that_are_sent_once_are_sent_one_by_one() -> None:
    def rows(chunks: int) -> dict[int, int]:
        plan = Plan(degrees=Degrees(shard=64, ep=8), token_dispatcher="deduplicated", dispatch_chunks=chunks)
        trace = dry_run_rank(recipe("tiny-moe"), plan, None, rank=63)
        sent = (call for call in trace.collectives if call.operation == "all_to_all" and call.dtype == "float32")
        return {call.payload: call.count for call in sent}

    whole, parts = rows(1), rows(4)
    assert {payload // 4: 4 * count for payload, count in whole.items()} == parts


@pytest.mark.full
def test_exact_balance_gathers_the_scores_of_a_sequence_that_ranks_share() -> None:
    plain = recipe("tiny-moe")
    assert plain.model.moe is not None
    moe = plain.model.moe.model_copy(update={"balance": "exact"})
    exact = plain.model_copy(update={"model": plain.model.model_copy(update={"moe": moe})})
    plan = Plan(degrees=Degrees(shard=4, ep=4, tp=2))
    gathered = [
        sum(call.count for call in dry_run_rank(made, plan, None, 0).collectives if call.operation == "all_gather")
        for made in (plain, exact)
    ]
    assert gathered[1] == gathered[0] + 3, "one a layer"


@pytest.mark.parametrize("degrees", [Degrees(), Degrees(tp=2), Degrees(shard=2, cp=2), Degrees(pp=2, tp=2)])
def test_flops_are_those_of_the_mathematics_and_divide_over_the_ranks(degrees: Degrees) -> None:
    made = recipe(sequences=8)
    plan = Plan(degrees=degrees, microbatches=2)
    places = [dry_run_rank(made, plan, None, place * degrees.ranks_per_stage) for place in range(degrees.pp)]
    model, length = made.model, made.batch.length
    needed = flops_per_token(model, length) * made.batch.tokens
    # Elementwise work is not counted. A norm's parameter is not multiplied by a matrix, attention takes five products
    # backward instead of four, and the diagonal belongs to a causal half.
    norms = 6 * made.batch.tokens * model.width * (2 * model.layers + 1)
    attention = 2 * made.batch.tokens * model.layers * model.heads * model.head_dim * (length + 1) / 2
    expected = needed - norms + attention * (2 + 5) - attention * 6 * length / (length + 1)
    assert sum(trace.flops for trace in places) * degrees.ranks_per_stage == pytest.approx(expected, rel=1e-9)


def test_operators_are_told_by_module_and_phase() -> None:
    trace = dry_run_rank(recipe(sequences=8, compute="bf16"), Plan(degrees=Degrees(tp=2), recompute="full"), None, 0)
    products = {
        phase: next(o for o in trace.operators if (o.name, o.module, o.phase) == ("aten.mm", "blocks.*.mlp.up", phase))
        for phase in ("forward", "recompute", "backward")
    }
    tokens, width, hidden = 8 * 64, 64, 128 // 2
    forward = products["forward"]
    assert forward.inputs == (f"bf16[{tokens}, {width}]", f"bf16[{width}, {hidden}]")
    assert forward.outputs == (f"bf16[{tokens}, {hidden}]",)
    assert forward.flops == 2 * tokens * width * hidden
    assert forward.bytes == 2 * (tokens * width + width * hidden + tokens * hidden)
    assert forward.count == load_model("tiny-llama").layers == products["recompute"].count
    assert {operator.module for operator in trace.operators if operator.phase == "optimizer"} == {""}
    assert not any("view" in operator.name or operator.name == "aten.empty" for operator in trace.operators)


def test_what_is_recomputed_computes_the_same_again() -> None:
    plain, full = one_rank("none"), one_rank("full")

    def flops(trace: Trace, phase: str) -> float:
        return sum(o.flops * o.count for o in trace.operators if o.phase == phase and o.module.startswith("blocks"))

    # Recompute stops before the last product of a block: nobody needs its result for the backward pass.
    last = sum(o.flops * o.count for o in plain.operators if (o.module, o.phase) == ("blocks.*.mlp.down", "forward"))
    assert flops(full, "recompute") == flops(plain, "forward") - last
    assert flops(full, "backward") == flops(plain, "backward")
    assert flops(plain, "recompute") == 0


def test_gradients_wait_for_the_optimizer_and_are_told_from_activations() -> None:
    trace = dry_run_rank(recipe(sequences=8), Plan(degrees=Degrees(shard=4)), None, 0)
    parameters, gradients = MEMORY_KINDS.index("parameters"), MEMORY_KINDS.index("gradients")
    after = next(instant for instant in trace.memory if instant.phase == "optimizer")
    assert after.held[gradients] == after.held[parameters], "the shards of all, before the optimizer has taken them"
    assert trace.memory[0].held[gradients] == 0
    during = max(instant.held[gradients] for instant in trace.memory if instant.phase == "backward")
    assert during > after.held[gradients], "whole gradients of a layer, until they are reduced"


def test_the_timeline_is_short_and_has_the_peak() -> None:
    trace = one_rank("full")
    assert 100 < len(trace.memory) <= 300
    assert trace.peak in trace.memory
    assert trace.peak.total == max(instant.total for instant in trace.memory)
    assert [instant.at for instant in trace.memory] == sorted(instant.at for instant in trace.memory)
    assert {instant.phase for instant in trace.memory} == {"forward", "recompute", "backward", "optimizer"}


def test_compiled_blocks_are_run_as_written_and_a_note_says_so() -> None:
    compiled = dry_run_ranks(recipe(sequences=8), Plan(compile=True), None, [0])
    assert compiled.traces[0].operators == one_rank().operators
    assert [note.split(":")[0] for note in compiled.notes] == ["`compile` is true"]


def test_the_tables_have_every_byte_and_name_the_peak() -> None:
    run = dry_run_ranks(recipe(sequences=8), Plan(degrees=Degrees(shard=4, tp=2)), load_cluster("h100-pod"), [0])
    (trace,) = run.traces
    assert run.notes == ()
    assert traffic_table(trace).row_count == len({(call.axes, call.operation) for call in trace.collectives})
    assert operator_table(trace).row_count == 10
    kinds = sum(1 for size in trace.peak.held if size)
    assert memory_table(run).row_count == kinds + 2
    assert describe_instant(trace.peak) == f"{trace.peak.phase} of {trace.peak.module}, microbatch 0"
    assert table_notes(run)[0] == "computed in fp32" and describe_instant(trace.peak) in table_notes(run)[1]


@pytest.mark.parametrize(
    ("ranks", "found"), [("first,last", [0, 7]), ("0, first", [0]), ("classes", [0, 4]), ("", [0, 4])]
)
def test_the_command_asks_for_the_ranks_that_were_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: str, found: list[int]
) -> None:
    asked: list[list[int]] = []

    def note(recipe: Recipe, plan: Plan, cluster: object, numbers: list[int], **settings: object) -> DryRun:
        asked.append(numbers)
        return made_dryrun()

    monkeypatch.setattr(dry_run, "dry_run_ranks", note)
    (tmp_path / "plan.toml").write_text("microbatches = 2\n[degrees]\npp = 2\nshard = 2\ntp = 2\n")
    command = ["dryrun", str(QUICKSTART), "--plan", str(tmp_path / "plan.toml"), "--ranks", ranks, "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert asked == [found]


def test_the_command_runs_the_rank_it_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("microbatches = 2\n[degrees]\npp = 2\nshard = 2\ntp = 2\n")
    command = ["dryrun", str(QUICKSTART), "--plan", str(tmp_path / "plan.toml"), "--ranks", "5"]
    result = CliRunner().invoke(app, [*command, "--json", "--output", str(tmp_path / "dry.json")])
    assert result.exit_code == 0, result.output
    run = DryRun.model_validate_json(result.stdout)
    assert [trace.rank for trace in run.traces] == [5]
    assert run == DryRun.model_validate_json((tmp_path / "dry.json").read_text())
    assert len(run.schedule) == run.degrees["pp"] == 2


def test_a_rank_beyond_the_world_is_refused() -> None:
    result = CliRunner().invoke(app, ["dryrun", str(QUICKSTART), "--ranks", "1"])
    assert result.exit_code == 2
