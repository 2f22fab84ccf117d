"""Which implementation of an operator runs: what a plan chooses, what `danlu ops` says, and what it measures."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from typer.testing import CliRunner

from danlu.chips import find_chip
from danlu.cli.app import app
from danlu.dryrun.dry_run import dry_run_ranks
from danlu.dryrun.operator_tuning import operator_calls, tune_operators
from danlu.ops.operators import norm
from danlu.ops.operators.measuring import measure_implementations
from danlu.ops.operators.norm import RMS_NORM
from danlu.ops.operators.routing import OPERATORS, RoutingError, route_operators
from danlu.spec import Degrees, Plan, load_recipe, toml
from danlu.spec.check import load_run_spec
from danlu.spec.cluster import OperatorName, TimingCurve
from danlu.spec.load import load_cluster, load_operator_table, load_plan
from danlu.spec.model import Moe
from danlu.spec.operator_table import MeasuredCall, OperatorTable, with_operator_times
from danlu.spec.problem import SpecError
from danlu.spec.recipe import BatchConfig

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "quickstart.toml"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def unrouted() -> Iterator[None]:
    yield
    route_operators({}, CPU)


def table(**seconds: dict[str, float]) -> OperatorTable:
    """One call of each named operator, two sizes of it, the second not of the recipe."""
    calls = [
        MeasuredCall(operator=name, backward=backward, inputs=(f"bf16[{rows}, 64]",), calls=calls, seconds=taken)
        for name, taken in seconds.items()
        for backward in (False, True)
        for rows, calls in ((8, 3), (32, 0))
    ]  # fmt: skip
    return OperatorTable(chip="cpu", device="here", threads=1, torch="2", recipe="r", calls=tuple(calls))


# ---- a plan chooses


def test_a_plan_s_choice_runs_and_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(4, 8), torch.ones(8)
    assert RMS_NORM.implementation(x).name == "native"
    route_operators({"rms_norm": "torch"}, CPU)
    assert RMS_NORM.implementation(x).name == "torch"
    monkeypatch.setattr("danlu.ops.operators.cpu.call", lambda *_: pytest.fail("native code ran"))
    torch.testing.assert_close(norm.rms_norm(x, weight, 1e-6), norm.reference(x, weight, 1e-6, 0.0))
    route_operators({}, CPU)
    assert RMS_NORM.implementation(x).name == "native"


def test_a_choice_that_does_not_take_a_tensor_is_said() -> None:
    route_operators({"rms_norm": "native"}, CPU)
    with pytest.warns(RuntimeWarning, match=r"asks for native, which does not take torch.float64"):
        assert RMS_NORM.implementation(torch.ones(2, 2, dtype=torch.float64)).name == "torch"


def test_what_cannot_run_here_is_refused_before_anything_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RoutingError, match=r'must be one of torch, native, but is "cutlass"'):
        route_operators({"rms_norm": "cutlass"}, CPU)
    monkeypatch.setattr("danlu.ops.operators.cpu.cpu_library", lambda: None)
    with pytest.raises(RoutingError, match=r"does not run on cpu here: danlu was installed without a C compiler"):
        route_operators({"rotate": "torch", "rms_norm": "native"}, CPU)
    assert OPERATORS["rotate"].chosen is None


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ('operators = {rms_norn = "torch"}', "rms_norm"),
        ('compile = true\noperators = {rotate = "torch"}', "compilers make their own kernel"),
        ('operators = {masked_attention = "torch"}', "every token sees all before it"),
        ('operators = {grouped_mm = "torch"}', "this model has no experts"),
        ('operators = {quantize_rows = "torch"}', "no product of this recipe is of fp8"),
        (
            'context_parallel = "ring"\noperators = {masked_attention = "torch"}\n[degrees]\ncp = 2',
            "an operator of its own",
        ),
    ],
)
def test_a_plan_that_chooses_in_vain_is_refused(tmp_path: Path, plan: str, said: str) -> None:
    (tmp_path / "plan.toml").write_text(plan)
    with pytest.raises(SpecError, match=said):
        load_run_spec(RECIPE, tmp_path / "plan.toml", None, default=Plan())


# ---- the table


def test_the_fastest_is_by_all_calls_of_a_step() -> None:
    measured = table(rms_norm={"torch": 3.0, "native": 1.0}, rotate={"torch": 1.0, "native": 2.0})
    assert measured.fastest == {"rms_norm": "native", "rotate": "torch"}
    assert measured.implementations("rms_norm") == {"native": 6.0, "torch": 18.0}
    assert measured.seconds("gated_product", "torch") is None, "the recipe has none"


def test_predictions_take_the_fastest_implementation_s_times() -> None:
    points = {"sizes": (1.0, 2.0), "seconds": (5.0, 5.0)}
    cluster = load_cluster("h100-pod")
    chip = cluster.chip.model_copy(update={"operators": {"bf16": {"norm": points, "loss": points}}})
    probed = cluster.model_copy(update={"chip": chip})
    measured = table(rms_norm={"torch": 3.0, "native": 1.0})
    found = with_operator_times(probed, measured, "bf16").chip.operators["bf16"]
    assert found["norm"] == TimingCurve(sizes=(512.0, 2048.0), seconds=(1.0, 1.0))
    assert found["norm_backward"] == TimingCurve(sizes=(512.0, 2048.0), seconds=(1.0, 1.0))
    assert found["loss"] == points, "what was not measured again stays"


# ---- measuring


def test_the_calls_of_a_recipe_are_those_of_its_dry_run() -> None:
    run = dry_run_ranks(load_recipe(RECIPE), Plan(degrees=Degrees(tp=2)), None, [0])
    found = {(call.operator, call.backward): call for call in operator_calls(run)}
    layers = load_recipe(RECIPE).decoder.layers
    assert found["gated_product", False].calls == found["gated_product", True].calls == layers
    rotated = [call.calls for call in operator_calls(run) if (call.operator, call.backward) == ("rotate", False)]
    assert rotated == [layers, layers], "queries and keys"
    assert found["cross_entropy", True].calls == 1
    assert f"{load_recipe(RECIPE).decoder.vocabulary // 2}]" in found["cross_entropy", False].inputs[0]


def test_a_recipe_is_tuned_and_its_file_read_again(tmp_path: Path) -> None:
    recipe = load_recipe(RECIPE)
    changed = {
        "data": recipe.data.model_copy(update={"document_mask": True}),
        "model": recipe.decoder.model_copy(update={"moe": Moe(experts=4, top_k=2, width=32)}),
        "batch": BatchConfig(sequences=2, length=256),
    }
    run = dry_run_ranks(recipe.model_copy(update=changed), Plan(), None, [0])
    seen: list[int] = []
    measured = tune_operators(run, find_chip("cpu"), 0.5, lambda name, done, total: seen.append(total - done))
    assert seen == list(range(len(measured.calls), 0, -1))
    assert set(measured.fastest) == set(OPERATORS) - {"quantize_rows"}
    attention = [call for call in measured.calls if call.operator == "masked_attention"]
    assert [(call.calls, set(call.seconds)) for call in attention] == 2 * [(recipe.decoder.layers, {"torch"})]
    products = [call for call in measured.calls if call.operator == "grouped_mm"]
    forward = sum(call.calls for call in products if not call.backward)
    backward = sum(call.calls for call in products if call.backward)
    assert (forward, backward) == (3 * recipe.decoder.layers, 6 * recipe.decoder.layers), "two gradients of a product"
    assert all("torch" in call.seconds for call in products), "the other takes bf16 only where a CPU does not"
    others = [call for call in measured.calls if call not in attention and call not in products]
    assert all(set(call.seconds) == {"torch", "native"} for call in others)
    for dtype in {call.dtype for call in others if call.operator != "cross_entropy"}:
        assert len(measured.curves(measured.fastest, dtype)["norm"].sizes) >= 3, "sizes around those of the recipe"
    (tmp_path / "ops.toml").write_text(toml.dumps(measured))
    assert load_operator_table(tmp_path / "ops.toml") == measured


def test_casts_to_fp8_are_called_and_measured() -> None:
    recipe = load_recipe(RECIPE)
    changed = {
        "precision": recipe.precision.model_copy(update={"matmul": "fp8"}),
        "batch": BatchConfig(sequences=2, length=256),
    }
    run = dry_run_ranks(recipe.model_copy(update=changed), Plan(), None, [0])
    casts = [call for call in operator_calls(run) if call.operator == "quantize_rows"]
    kept = 4 * 2  # of attention, its result, the MLP and its hidden features: along features, and along tokens
    back = 7 * 2  # of seven products' gradients
    assert sum(call.calls for call in casts) == (kept + back) * recipe.decoder.layers
    measured = measure_implementations(OPERATORS["quantize_rows"], False, casts[0].inputs, CPU, 0.05)
    assert set(measured) == {"torch"}


def test_products_of_experts_are_measured_with_even_loads() -> None:
    drawn = torch.rand(10, 8), torch.rand(4, 8, 16), torch.zeros(4, dtype=torch.int32)
    OPERATORS["grouped_mm"].complete(drawn)
    assert drawn[2].tolist() == [2, 5, 7, 10]


def test_every_implementation_is_measured_on_the_same_number_of_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = []
    original = RMS_NORM.implementations[0].forward

    def slower(*arguments: object) -> object:
        slow.append(1)
        torch.ones(2000, 2000).sum()
        return original(*arguments)

    monkeypatch.setattr(
        RMS_NORM,
        "implementations",
        [*RMS_NORM.implementations, replace(RMS_NORM.implementations[0], name="slow", forward=slower)],
    )
    taken = measure_implementations(RMS_NORM, False, ["fp32[8, 64]", "fp32[64]"], CPU, 0.05)
    assert taken["slow"] > 3 * taken["torch"]
    assert len(slow) >= 4, "once to warm up, and three turns"


# ---- the commands


def test_the_command_says_what_runs_and_why(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text('operators = {rotate = "torch"}')
    (tmp_path / "ops.toml").write_text(toml.dumps(table(rms_norm={"torch": 3.0, "native": 1.0})))
    command = [
        "ops",
        str(RECIPE),
        "--plan",
        str(tmp_path / "plan.toml"),
        "--table",
        str(tmp_path / "ops.toml"),
        "--json",
    ]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    rows = {(row["operator"], row["implementation"]): row for row in json.loads(done.output)}
    assert rows["rotate", "torch"]["runs"] and rows["rotate", "torch"]["why"] == "the plan asks for it"
    assert rows["rms_norm", "native"]["runs"] and rows["rms_norm", "native"]["gain"] == 3.0
    assert not rows["rms_norm", "torch"]["runs"]
    assert rows["gated_product", "native"]["seconds"] is None


def test_a_table_of_another_chip_is_refused(tmp_path: Path) -> None:
    other = table(rms_norm={"torch": 3.0}).model_copy(update={"chip": "cuda"})
    (tmp_path / "ops.toml").write_text(toml.dumps(other))
    done = CliRunner().invoke(app, ["ops", "show", str(RECIPE), "--table", str(tmp_path / "ops.toml")])
    assert done.exit_code == 2
    assert "must be of chip cpu" in done.output


def test_a_cluster_that_was_not_probed_takes_no_table(tmp_path: Path) -> None:
    measured = table(rms_norm={"torch": 3.0}).model_copy(update={"chip": load_cluster("h100-pod").chip.kind})
    (tmp_path / "ops.toml").write_text(toml.dumps(measured))
    command = ["plan", str(RECIPE), "--cluster", "h100-pod", "--chips", "8", "--operators", str(tmp_path / "ops.toml")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2
    assert "has no effect with cluster h100-pod" in done.output


def probed(folder: Path) -> str:
    """Write a cluster whose operators were measured, `probed.toml`; the kind of its chip."""
    cluster = load_cluster("h100-pod")
    points = {name: TimingCurve(sizes=(1e3, 1e9), seconds=(1e-6, 1.0)) for name in get_args(OperatorName)}
    chip = cluster.chip.model_copy(update={"operators": {load_recipe(RECIPE).precision.compute: points}})
    (folder / "probed.toml").write_text(toml.dumps(cluster.model_copy(update={"chip": chip})))
    return chip.kind


def test_a_compiled_plan_chooses_what_its_blocks_do_not_compute(tmp_path: Path) -> None:
    measured = table(rms_norm={"torch": 3.0, "native": 1.0}, rotate={"torch": 1.0, "native": 3.0})
    (tmp_path / "ops.toml").write_text(toml.dumps(measured.model_copy(update={"chip": probed(tmp_path)})))
    command = ["plan", str(RECIPE), "--cluster", str(tmp_path / "probed.toml"), "--chips", "8"]
    command += ["--operators", str(tmp_path / "ops.toml"), "--output", str(tmp_path / "plan.toml")]
    done = CliRunner().invoke(app, [*command, "--fix", "compile=true"])
    assert done.exit_code == 0, done.output
    assert "the plan leaves out rotate" in done.output
    assert load_plan(tmp_path / "plan.toml").operators == {"rms_norm": "native"}
    done = CliRunner().invoke(app, [*command, "--fix", "compile=false"])
    assert done.exit_code == 0, done.output
    assert "leaves out" not in done.output
    assert load_plan(tmp_path / "plan.toml").operators == {"rms_norm": "native", "rotate": "torch"}


def test_a_plan_is_written_without_operators_that_it_does_not_call(tmp_path: Path) -> None:
    """They were measured with another recipe, of documents and experts; `danlu check` would refuse the plan."""
    other = {"torch": 1.0}
    measured = table(rms_norm={"torch": 3.0, "native": 1.0}, masked_attention=other, grouped_mm=other)
    (tmp_path / "ops.toml").write_text(toml.dumps(measured.model_copy(update={"chip": probed(tmp_path)})))
    command = ["plan", str(RECIPE), "--cluster", str(tmp_path / "probed.toml"), "--chips", "8"]
    command += ["--operators", str(tmp_path / "ops.toml"), "--output", str(tmp_path / "plan.toml")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "the plan leaves out masked_attention: every token sees all before it" in done.output
    assert "the plan leaves out grouped_mm: this model has no experts" in done.output
    assert load_plan(tmp_path / "plan.toml").operators == {"rms_norm": "native"}


def test_a_plan_that_cannot_run_here_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text('operators = {rotate = "cutlass"}')
    done = CliRunner().invoke(app, ["ops", "show", str(RECIPE), "--plan", str(tmp_path / "plan.toml")])
    assert done.exit_code == 2
    assert "must be one of torch" in done.output
