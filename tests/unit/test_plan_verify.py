"""`danlu plan --verify`: formula beside program, and what the program does not bear out."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from made_questions import EXPERTS, machine, question
from typer.testing import CliRunner

from danlu.cli.app import app
from danlu.dryrun.dry_run import dry_run_ranks
from danlu.planner import price_plan, search
from danlu.planner.verify import LayoutVerification, first_accepted, pp_ranks_to_run, verify_layout
from danlu.report.plan_verify_tables import verification_json, verification_view
from danlu.spec.trace import DryRun

RECIPE = """
name = "small"
steps = 1
[model]
base = "tiny-llama"
[data]
shards = "none"
[batch]
sequences = 8
length = 64
[optimizer]
learning_rate = 1e-3
[precision]
compute = "bf16"
"""


@pytest.fixture(scope="module")
def found() -> tuple[LayoutVerification, DryRun]:
    choice = search(question(chips=4, fix="pp=2,tp=2,schedule=1f1b"), shown=1).best[0]
    assert pp_ranks_to_run(choice) == (0, 1)
    run = dry_run_ranks(choice.request.recipe, choice.plan, choice.request.cluster, [0, 2])
    return verify_layout(choice, run), run


def test_figures_stand_side_by_side(found: tuple[LayoutVerification, DryRun]) -> None:
    one, run = found
    figures = {line.figure: line for line in (*one.pp_rank_peaks, *one.figures)}
    for name in ("peak, pp rank 0", "peak, pp rank 1", "states", "activations", "FLOPs of the step"):
        assert figures[name].ratio == pytest.approx(1.0, abs=0.15), name
    assert any(name.startswith("sent along tp") for name in figures)
    assert any(name.startswith("sent along pp") for name in figures)
    assert one.pp_rank in (0, 1)
    assert figures["FLOPs of the step"].dry_run == {t.place["pp"]: t.flops for t in run.traces}[one.pp_rank]
    assert not one.is_refused
    assert one.verdict.startswith("accepted")


def test_what_is_sent_once_is_compared_over_all_its_levels() -> None:
    """Also where `ep` is all ranks, which share no group then."""
    fix = "shard=8,ep=8,dispatcher=deduplicated,recompute=none"
    asked = question(EXPERTS, chips=8, cluster=machine(nodes=2), sequences=8, fix=fix)
    choice = search(asked, shown=1).best[0]
    assert dict(choice.placement.group_shapes)["ep"] == (4, 2)
    run = dry_run_ranks(asked.recipe, choice.plan, asked.cluster, [0])
    sent = {line.figure: line for line in verify_layout(choice, run).figures if line.figure.startswith("sent")}
    assert [name.split(" (")[0] for name in sorted(sent)] == ["sent along ep", "sent along shard"]
    for line in sent.values():
        assert line.ratio == pytest.approx(1.0, abs=0.01), line


def test_what_the_program_does_not_bear_out_is_refused(found: tuple[LayoutVerification, DryRun]) -> None:
    one, run = found
    choice = one.priced_plan
    chip = choice.request.cluster.chip.model_copy(update={"memory": round(choice.peak_bytes * 1.001)})
    cluster = choice.request.cluster.model_copy(update={"chip": chip})
    tight = replace(choice, request=replace(choice.request, cluster=cluster, reserve=0.0))
    assert tight.fits
    swollen = [
        trace.model_copy(
            update={"peak": trace.peak.model_copy(update={"held": tuple(2 * size for size in trace.peak.held)})}
        )
        for trace in run.traces
    ]
    refused = verify_layout(tight, run.model_copy(update={"traces": tuple(swollen)}))
    assert refused.is_refused
    assert refused.verdict.startswith("rejected: the dry run needs")
    assert "states by -50%" in refused.verdict
    assert first_accepted([refused, one]) is one
    assert first_accepted([refused]) is None
    told = verification_json([refused, one], one, None)
    assert told["proposed"] == 1
    assert [each["refused"] for each in told["verified"]] == [True, False]
    assert verification_view([refused], None) is not None


def test_the_command_proposes_and_writes(tmp_path: Path) -> None:
    recipe, plan = tmp_path / "recipe.toml", tmp_path / "plan.toml"
    recipe.write_text(RECIPE)
    asked = ["plan", str(recipe), "--cluster", "h100-pod", "--chips", "4", "--fix", "shard=2,tp=2", "--verify", "1"]
    shown = CliRunner().invoke(app, [*asked, "--output", str(plan)])
    assert shown.exit_code == 0, shown.output
    for words in ("predicted/dry run", "sent along tp (node)", "Proposed: 1"):
        assert words in shown.stdout
    assert "tp = 2" in plan.read_text()
    told = json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)
    assert told["proposed"] == 0
    assert {"figure", "formula", "program", "ratio", "unit", "wrong"} == set(told["verified"][0]["figures"][0])


def test_without_a_number_the_two_best_are_run(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)
    asked = ["--cluster", "h100-pod", "--chips", "2", "--fix", "pp=1,cp=1", "--json"]
    for words in (["plan", str(recipe), *asked, "--verify"], ["plan", "--verify", str(recipe), *asked]):
        shown = CliRunner().invoke(app, words)
        assert shown.exit_code == 0, shown.output
        assert len(json.loads(shown.stdout)["verified"]) == 2
    refused = CliRunner().invoke(app, ["plan", str(recipe), *asked, "--verify", "-1"])
    assert refused.exit_code == 2
    assert "--verify" in refused.stderr


@pytest.mark.filterwarnings("ignore:.compile. is true")
def test_compiled_blocks_are_compared_as_the_dry_run_runs_them(found: tuple[LayoutVerification, DryRun]) -> None:
    """Eagerly; the memory of the device is no more, operators keep no more than a compiler's kernels."""
    one, run = found
    candidate = one.priced_plan.candidate
    schedule = candidate.schedule._replace(compile=True, regather_inputs=False)
    compiled = price_plan(one.priced_plan.request, candidate._replace(schedule=schedule).plan())
    same = verify_layout(compiled, run)
    assert [line.ratio for line in same.figures] == [line.ratio for line in one.figures]
    assert same.device_bytes <= one.device_bytes
    assert same.device_bytes == pytest.approx(compiled.peak_bytes, rel=0.1)
