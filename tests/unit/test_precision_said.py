"""A speed is never said without its precision, and fp32 on a chip that is far faster in bf16 is warned of."""

import json
from pathlib import Path

import pytest
from made_dryruns import made_dryrun
from made_questions import DENSE, machine, question
from made_runs import append, make_run, started, step
from rich.console import Console
from typer.testing import CliRunner

from danlu.cli.app import app
from danlu.planner import PlanRequestError, search
from danlu.planner.explain import level_costs
from danlu.report.plan_page import plan_page
from danlu.report.run_page import write_run_page
from danlu.report.run_tables import list_runs, runs_table, summary
from danlu.spec.load import load_cluster
from danlu.spec.plan import Degrees, Plan
from danlu.spec.recipe import LayerPrecision, PrecisionConfig

EIGHT = """name = "eight"
steps = 10
[model]
base = "llama3-8b"
[data]
shards = "none"
[batch]
sequences = 64
length = 2048
"""
PLAN = "[degrees]\nshard = 32\n"
ASKED = ["--cluster", "dgx-a100", "--chips", "32", "--exclude", "pp,cp", "--fix", "tp=1|2"]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "eight.toml"
    path.write_text(EIGHT)
    return path


def _run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


def test_a_plan_names_its_precision_and_warns_of_fp32(recipe: Path, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    code, shown, said = _run("plan", str(recipe), *ASKED, "--html", str(page), "--output", str(tmp_path / "plan.toml"))
    assert code == 0, said
    head = shown.splitlines()[0]
    assert "llama3-8b in fp32, peak 19.5 TFLOP/s a chip, on 32 of the 3,072 chips" in head
    warning = 'fp32: 19.5 of 312 TFLOP/s a chip; the same layout with [precision] compute = "bf16" is predicted 13.'
    assert warning in shown.splitlines()[1]
    assert "fp32, peak 19.5 TFLOP/s a chip" in page.read_text()
    assert "TFLOP/s a chip; the same layout with" in page.read_text()
    assert 'dtype = "fp32"' in (tmp_path / "plan.toml").read_text()
    half = tmp_path / "half.toml"
    half.write_text(EIGHT + '[precision]\ncompute = "bf16"\n')
    code, shown, _ = _run("plan", str(half), *ASKED, "--json")
    answer = json.loads(shown)
    assert (answer["warnings"], answer["best"][0]["dtype"], answer["best"][0]["peak"]) == ([], "bf16", 312e12)


@pytest.mark.parametrize("asked", [["--why-not", "tp=2"], ["--min-memory"], ["--days", "3000", "--tokens", "1B"]])
def test_every_question_of_the_planner_names_the_precision(recipe: Path, asked: list[str]) -> None:
    code, shown, said = _run("plan", str(recipe), *ASKED, *asked)
    assert code == 0, said
    assert "in fp32, peak 19.5 TFLOP/s a chip" in shown
    assert "warning: fp32" in shown


def test_check_names_the_precision_and_what_it_costs(recipe: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(PLAN)
    code, shown, said = _run("check", str(recipe), "--cluster", "dgx-a100", "--plan", str(plan))
    assert code == 0
    assert "8.03B parameters, fp32, 32 ranks" in shown
    assert "warning: fp32: 19.5 of 312 TFLOP/s a chip" in said
    assert "× faster" in said
    assert "warning" not in _run("check", str(recipe), "--cluster", "local")[2]  # as fast in both


def test_the_gain_is_what_pricing_in_both_says() -> None:
    from danlu.planner.precision import slow_precision

    asked = question(chips=8, cluster=machine(nodes=2))
    now = asked.recipe.model_copy(update={"precision": PrecisionConfig(compute="fp32")})
    plan = Plan(degrees=Degrees(shard=8))
    slow = slow_precision(now, plan, asked.cluster)
    assert slow is not None
    assert slow.speedup is not None
    assert 1.5 < slow.speedup < 16.5  # no more than the peaks say, and the network is there in both
    assert slow_precision(asked.recipe, plan, asked.cluster) is None


def test_a_precision_without_a_peak_is_refused_by_the_planner() -> None:
    values = {"fp32": 1e12}
    chip = load_cluster("dgx-a100").chip.model_copy(update={"peak": values})
    with pytest.raises(PlanRequestError, match=r'computes in bf16, but the chip of "small" states no peak.*"fp32"'):
        question(DENSE, machine(nodes=2).model_copy(update={"chip": chip}))


def test_the_page_of_a_plan_in_mixed_precision_says_so() -> None:
    asked = question(chips=8, cluster=machine(nodes=2), without="pp")
    mixed = PrecisionConfig(compute="bf16", layers=(LayerPrecision(match="blocks.0", compute="fp32"),))
    answer = search(asked, shown=1)
    assert asked.recipe.precision.label == "bf16"
    assert mixed.label == "bf16 (fp32 in blocks.0)"
    assert "bf16, peak 312 TFLOP/s a chip" in plan_page(answer, level_costs(answer.best[0]), [], None)


def test_a_run_says_its_precision_wherever_it_says_its_speed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "first")
    append(run, [started(dtype="bf16", host="atlas", peak_spread=0.04), *(step(number) for number in (1, 2, 3))])
    console = Console(width=160, record=True)
    console.print(summary(run))
    console.print(runs_table(list_runs(tmp_path), width=160))
    shown = console.export_text()
    assert "(median step), computed in bf16" in shown
    assert "of 90 GFLOP/s in bf16, data sheet (measurements 4.00 % apart)" in shown
    assert "dtype" in shown
    first = list_runs(tmp_path)[0]
    assert (first.precision, first.host) == ("bf16", "atlas")
    page = write_run_page(run).read_text()
    for fact in ("<dt>precision</dt><dd>bf16</dd>", "on atlas", "<dt>batch</dt><dd>10 × 100 tokens</dd>"):
        assert fact in page


def test_a_run_of_an_older_version_takes_its_recipe_s_precision(tmp_path: Path) -> None:
    run = make_run(tmp_path / "first")
    append(run, [started(), step(1)])
    assert list_runs(tmp_path)[0].precision == "fp32"


def test_a_dry_run_says_its_precision() -> None:
    from danlu.report.dryrun_page import dryrun_page
    from danlu.report.dryrun_tables import table_notes

    run = made_dryrun().model_copy(update={"precision": "bf16"})
    assert "computed in bf16" in table_notes(run)
    assert "<dt>precision</dt><dd>bf16</dd>" in dryrun_page(run)
