"""Every layout trains the same model: losses, gradient norms and parameters of one process, in fp32."""

import json
from pathlib import Path
from typing import get_args

import pytest
from layouts import LAYOUTS, STEPS, Layout
from ranks import run_ranks
from rich.console import Console
from rich.table import Table

from danlu.spec.plan import Schedule

LOSS, NORM, PARAMETERS = 1e-5, 1e-4, 1e-5
RANK = Path(__file__).parent / "parity_rank.py"
WORLDS = sorted({layout.plan.degrees.world for layout in LAYOUTS})


@pytest.fixture(scope="module")
def results(folder: Path, pytestconfig: pytest.Config) -> dict[str, dict[str, float]]:
    for world in WORLDS:  # one process first: it writes what the others are held against
        run_ranks(RANK, world, str(folder), seconds=600)
    found: dict[str, dict[str, float]] = {}
    for file in sorted(folder.glob("[0-9]*-*-*.json")):
        result = json.loads(file.read_text())
        worst = found.setdefault(result["name"], {})
        for key in ("loss", "norm", "parameters", "seconds"):
            worst[key] = max(worst.get(key, 0.0), result[key])
    reporter = pytestconfig.pluginmanager.getplugin("terminalreporter")
    with pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        reporter.ensure_newline()
        _print(found)
    return found


def _print(found: dict[str, dict[str, float]]) -> None:
    table = Table(title=f"Worst deviation from one process over {STEPS} steps in fp32")
    for heading in ("layout", "ranks", "loss", "norm", "parameters", "seconds"):
        table.add_column(heading, justify="left" if heading == "layout" else "right")
    for layout in LAYOUTS:
        worst = found[layout.name]
        figures = [f"{worst[key]:.1e}" for key in ("loss", "norm", "parameters")]
        table.add_row(layout.name, str(layout.plan.degrees.world), *figures, f"{worst['seconds']:.1f}")
    Console(width=100).print(table)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_layout_equals_one_process(layout: Layout, results: dict[str, dict[str, float]]) -> None:
    worst = results[layout.name]
    assert worst["loss"] <= LOSS
    assert worst["norm"] <= NORM
    assert worst["parameters"] <= PARAMETERS


def test_every_axis_and_schedule_is_covered() -> None:
    degrees = [layout.plan.degrees for layout in LAYOUTS]
    assert len(LAYOUTS) >= 30
    for axis in ("pp", "replicate", "shard", "cp", "tp", "ep"):
        assert any(getattr(each, axis) > 1 for each in degrees), axis
    schedules = {layout.plan.pipeline.schedule for layout in LAYOUTS if layout.plan.degrees.pp > 1}
    assert schedules == set(get_args(Schedule))


@pytest.mark.parametrize("name", ["accumulate 4", "moe accumulate 4"])
def test_accumulation_equals_the_full_batch(name: str, results: dict[str, dict[str, float]]) -> None:
    """Within fp32 noise: a few units in the last place."""
    assert results[name]["loss"] <= 1e-6
    assert results[name]["norm"] <= 1e-6
    assert results[name]["parameters"] <= 1e-6
