"""A profile of real ranks against the dry run, which counts without a clock; and the command, on 4 ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
from layouts import LAYOUTS, Layout
from ranks import run_ranks
from tiers import tiered
from trace_rules import check_trace
from typer.testing import CliRunner

import danlu
from danlu.cli.app import app
from danlu.planner.explain import PART_LABELS

pytestmark = pytest.mark.timeout(1300)
RANK = Path(__file__).parent / "profile_rank.py"
WORLD = 2
QUICK = ("fsdp, recompute full", "zbv")
NAMES = (*QUICK, "replicas", "tp", "tp, regathered", "cp", "1f1b", "interleaved", "gpt tied, tp", "moe ep over tp")
PROFILED = [layout for layout in LAYOUTS if layout.name in NAMES]
OF_LAYOUT = {
    "fsdp, recompute full": {"gather", "recompute"},
    "zbv": {"transfer", "bubble"},
    "replicas": {"gradients"},
    "tp": {"tensor"},
    "tp, regathered": {"tensor"},
    "cp": {"context"},
    "1f1b": {"transfer", "bubble"},
    "interleaved": {"transfer", "bubble"},
    "gpt tied, tp": {"tensor"},
    "moe ep over tp": {"tensor", "expert"},
}
"""Parts that a layout must have, and no layout that does not list them may."""
LARGEST_GAP = 0.02


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What came of the layouts that the tests of this call look at, rank by rank."""
    items = [item for item in request.session.items if hasattr(item, "callspec") and item.path == request.path]
    chosen = {item.callspec.params["layout"].name for item in items}
    run_ranks(RANK, WORLD, str(folder), "|".join(sorted(chosen)), seconds=1200)
    found: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(folder.glob("profile-*-*.json")):
        result = json.loads(file.read_text())
        found.setdefault(result["name"], []).append(result)
    return found


@pytest.mark.parametrize("layout", tiered(PROFILED, QUICK))
def test_parts_add_up_to_the_step_of_the_loop(layout: Layout, results: dict[str, list[dict[str, Any]]]) -> None:
    assert len(results[layout.name]) == WORLD
    special = set().union(*OF_LAYOUT.values())
    for result in results[layout.name]:
        for seconds, parts in result["steps"]:
            assert set(parts) <= set(PART_LABELS)
            assert all(value >= -1e-6 for value in parts.values())
            assert abs(sum(parts.values()) / seconds - 1) <= LARGEST_GAP
            present = {part for part, value in parts.items() if value > 0}
            # FSDP casts parameters and gradients on a mesh of one rank too.
            assert (
                OF_LAYOUT[layout.name] <= present <= OF_LAYOUT[layout.name] | (set(PART_LABELS) - special) | {"gather"}
            )
            assert {"linear", "attention", "elementwise", "optimizer"} <= present
    assert any("head" in parts for result in results[layout.name] for _, parts in result["steps"])


@pytest.mark.parametrize("layout", tiered(PROFILED, QUICK))
def test_collectives_are_those_of_the_dry_run(layout: Layout, results: dict[str, list[dict[str, Any]]]) -> None:
    """Operation, axes, bytes and count."""
    for result in results[layout.name]:
        measured, dry = result["collectives"]
        assert measured == dry


@pytest.mark.parametrize("layout", tiered(PROFILED, QUICK))
def test_products_are_in_the_phase_and_module_of_the_dry_run(
    layout: Layout, results: dict[str, list[dict[str, Any]]]
) -> None:
    for result in results[layout.name]:
        measured, dry = result["products"]
        if layout.plan.recompute == "full":  # asked for, and not computed: recompute has what it needs and stops
            measured.remove(["mm", "recompute", "blocks.*.mlp.down", 8])
        assert measured == dry


@pytest.mark.full
def test_the_command_on_4_ranks_leaves_the_run_as_it_was(folder: Path, tmp_path: Path) -> None:
    recipe, plan, trace = tmp_path / "recipe.toml", tmp_path / "plan.toml", tmp_path / "trace.json"
    recipe.write_text(
        f'name = "small"\nsteps = 2\nmodel = {{ base = "tiny-llama", vocabulary = 264 }}\n'
        f'data = {{ shards = "{folder / "shards"}" }}\nbatch = {{ sequences = 8, length = 64 }}\n'
    )
    plan.write_text("[degrees]\nshard = 2\ntp = 2\n")
    run = danlu.train(recipe, plan=plan, folder=tmp_path / "runs", quiet=True).run
    before = _contents(run.path)
    arguments = ["profile", "small", "--runs-dir", str(tmp_path / "runs"), "--ranks", "0,1,2,3", "--steps", "3"]
    done = CliRunner().invoke(app, [*arguments, "-o", str(trace), "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert _contents(run.path) == before
    result = json.loads(done.output)
    assert result["largest_gap"] <= LARGEST_GAP
    assert [rank["rank"] for rank in result["ranks"]] == [0, 1, 2, 3]
    # After the checkpoint of step 2: three steps to warm up, three without the profiler, one that is recorded.
    assert [[step["step"] for step in rank["steps"]] for rank in result["ranks"]] == 4 * [[9, 10, 11]]
    assert check_trace(json.loads(trace.read_text())) == [0, 1, 2, 3]
    assert trace.stat().st_size < 20e6


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
