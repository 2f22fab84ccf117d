"""`danlu plan` as a user meets it."""

import json
import tomllib
from pathlib import Path

from typer.testing import CliRunner

from danlu.cli.app import app
from danlu.spec import load_plan

SMALL = ["recipes/llama3-70b.toml", "--cluster", "h100-pod", "--chips", "64", "--fix", "tp=8,cp=1,schedule=1f1b"]

ANY_CHIPS = [*SMALL[:3], *SMALL[5:]]


def _run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["plan", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_writes_a_plan_that_check_accepts_and_a_page(tmp_path: Path) -> None:
    plan, page = tmp_path / "plan.toml", tmp_path / "plan.html"
    code, shown, said = _run(*SMALL, "--output", str(plan), "--html", str(page))
    assert code == 0, said
    told = ("Where the time goes", "Why not", "bottleneck", "Fullest chip", "Chance to fit", "for 8 of 10 runs")
    for words in (
        *told,
        "What Danlu does not do for this layout",
        "fp8 matmuls",
        "chance to fit",
        "ep = 1, or give the model a table [model.moe]",
    ):
        assert words in shown
    values = tomllib.loads(plan.read_text())
    assert values["degrees"]["tp"] == 8
    assert values["prediction"]["seconds"].endswith("s") and load_plan(plan).prediction is not None
    checked = CliRunner().invoke(app, ["check", SMALL[0], "--cluster", "h100-pod", "--plan", str(plan)])
    assert checked.exit_code == 0, checked.output
    drawn = page.read_text()
    for words in (
        "chance to fit",
        "for 8 of 10 runs",
        "ithin 3 %",  # a tie, or none
        "level by level",
        "What Danlu does not do for this layout",
        "Memory of the fullest chip",
        "Step time by number of chips",
        "<svg",
    ):
        assert words in drawn


def test_json_holds_what_the_tables_say() -> None:
    code, shown, _ = _run(*SMALL, "--json")
    assert code == 0
    answer = json.loads(shown)
    best = answer["best"][0]
    assert best["seconds"] <= answer["best"][-1]["seconds"]
    assert abs(sum(best["parts"].values()) - best["seconds"]) < 1e-6 * best["seconds"]
    assert best["plan"]["prediction"]["bytes"] == round(best["bytes"])
    assert {refusal["kind"] for refusal in answer["refused"]} >= {"seconds"}


def test_says_why_nothing_fits_and_why_not() -> None:
    code, _, said = _run("recipes/llama3-70b.toml", "--cluster", "h100-pod", "--chips", "8")
    assert code == 2
    assert "nothing fits 8 chips" in said
    assert "--reserve" not in said  # a model that is too big by far
    code, shown, _ = _run(*SMALL, "--why-not", "recompute=full")
    assert code == 0
    assert "slower than best" in shown
    code, shown, _ = _run(*SMALL, "--why-not", "recompute=none,microbatch=8")
    assert code == 0
    assert "nothing fits" in shown


def test_what_fits_with_less_memory_kept_free_is_told_with_its_chance() -> None:
    asked = ("recipes/llama3-70b.toml", "--cluster", "h100-pod", "--chips", "16", "--fix", "tp=8,cp=2,pp=1")
    code, _, said = _run(*asked)
    assert code == 2 and "nothing fits 16 chips" in said
    chance = said.partition("--reserve 0 (a chance of ")[2].partition(" %")[0]
    code, shown, said = _run(*asked, "--reserve", "0", "--json")
    assert code == 0, said
    answer = json.loads(shown)["best"][0]
    assert f"{100 * answer['fit_chance']:.0f}" == chance and 0 < answer["fit_chance"] < 0.9


def test_compares_an_own_plan_and_refuses_a_broken_one(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text('microbatches = 64\nrecompute = "full"\n[degrees]\npp = 2\nshard = 4\ntp = 8\n')
    code, shown, said = _run(*ANY_CHIPS, "--compare", str(own))
    assert code == 0, said
    assert "own.toml" in shown
    own.write_text("[degrees]\ntp = 16\nshard = 4\n")
    code, _, said = _run(*ANY_CHIPS, "--compare", str(own))
    assert code != 0


def test_mistakes_are_told_without_a_traceback() -> None:
    for wrong, words in (
        (["--fix", "dp=4"], "did you mean"),
        (["--what-if", "fabrik.bandwidth=2x"], "did you mean"),
        (["--mtbf", "soon"], "--mtbf"),
        (["--chips", "99999999"], "or fewer"),
        (["--days", "1", "--tokens", "many"], "--tokens"),
    ):
        code, _, said = _run("recipes/llama3-70b.toml", "--cluster", "h100-pod", *wrong)
        assert code == 2, wrong
        assert words in said
        assert "Traceback" not in said
