"""`danlu.dryrun` for programs: files or descriptions, the same result as the command's, and torch only when it runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import danlu
import danlu.dryrun.api as api
from danlu.cli.app import app
from danlu.spec import Degrees, Plan, SpecError, load_recipe

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.toml"


def test_the_function_returns_what_the_command_prints(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text("[degrees]\nshard = 4\n")
    printed = CliRunner().invoke(app, ["dryrun", str(RECIPE), "--plan", str(plan), "--ranks", "last", "--json"])
    assert printed.exit_code == 0, printed.output
    seen: list[tuple[int, int, int]] = []
    found = danlu.dryrun(
        load_recipe(RECIPE),
        plan=Plan(degrees=Degrees(shard=4)),
        ranks=["last", 3],
        on_rank=lambda *each: seen.append(each),
    )
    same, other = json.loads(found.model_dump_json()), json.loads(printed.stdout)
    for trace in (*same["traces"], *other["traces"]):
        del trace["seconds"]
    assert same == other
    assert [trace.rank for trace in found.traces] == [3]
    assert seen == [(3, 1, 1)]


def test_a_rank_that_is_not_there_and_a_layout_that_contradicts_are_refused_before_anything_runs() -> None:
    with pytest.raises(api.RankError, match=r'"middle" must be `first`, `last`, `classes` or a number from 0 to 3'):
        danlu.dryrun(RECIPE, plan=Plan(degrees=Degrees(shard=4)), ranks=["middle"])
    with pytest.raises(api.RankError, match="from 0 to 3"):
        danlu.dryrun(RECIPE, plan=Plan(degrees=Degrees(shard=4)), ranks=[4])
    refused = CliRunner().invoke(app, ["dryrun", str(RECIPE), "--ranks", "middle"])
    assert refused.exit_code == 2 and "--ranks" in refused.output
    with pytest.raises(SpecError, match=r"^recipe:1: batch\.sequences"):
        danlu.dryrun(load_recipe(RECIPE), plan=Plan(degrees=Degrees(shard=7)))


def test_the_name_can_be_called_whatever_was_imported_before() -> None:
    code = (
        "import sys, danlu; first = danlu.dryrun; import danlu.dryrun.api; "
        "assert callable(first) and callable(danlu.dryrun) and callable(danlu.train); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
