"""Every layout trains the same model: losses, gradient norms and parameters of one process, in fp32.

Only what is selected is trained: `pytest tests/multiprocess/test_parity.py -k "1f1b and replicas"` takes seconds.
What `--reports docs/reports` writes after all of them is what the documentation quotes.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from deviations import FIGURES, FIRST, gather, selected, summary
from layouts import FP8_LAYOUTS, FP8_MOE_LAYOUTS, FP16_LAYOUTS, LAYOUTS, QUICK, STEPS, Layout
from ranks import run_ranks
from rich.console import Console
from rich.table import Table
from tiers import tiered

from danlu.spec.plan import PipelineSchedule

pytestmark = pytest.mark.timeout(3700)  # the first test waits for all layouts, on a busy machine too
BAR = 1e-5
EVERY = (*LAYOUTS, *FP16_LAYOUTS, *FP8_LAYOUTS, *FP8_MOE_LAYOUTS)
RANK = Path(__file__).parent / "parity_rank.py"


@pytest.fixture(scope="module")
def results(
    folder: Path,
    request: pytest.FixtureRequest,
    pytestconfig: pytest.Config,
    report: Callable[[dict[str, Any]], None],
) -> dict[str, dict[str, float]]:
    names = selected(request)
    chosen = [layout for layout in EVERY if layout.name in names]
    run_ranks(RANK, max(each.plan.degrees.world for each in chosen), str(folder), json.dumps(names), seconds=3600)
    told = [json.loads(file.read_text()) for file in folder.glob("parity-*.json")]
    found = {
        layout.name: gather((each for each in told if each["name"] == layout.name), layout.plan.degrees.world)
        for layout in chosen
    }
    reporter = pytestconfig.pluginmanager.getplugin("terminalreporter")
    with pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        reporter.ensure_newline()
        _print(found)
    if len(chosen) >= len(LAYOUTS):
        full = {layout.name: found[layout.name] for layout in LAYOUTS}
        fp8 = {
            layout.name: {"ranks": layout.plan.degrees.world}
            | {figure: found[layout.name][figure] for figure in (*FIRST, *FIGURES)}
            for layout in (*FP8_LAYOUTS, *FP8_MOE_LAYOUTS)
            if layout.name in found
        }
        report(summary(full, {layout.name: layout.plan.degrees.world for layout in LAYOUTS}, BAR) | {"fp8": fp8})
    return found


def _print(found: dict[str, dict[str, float]]) -> None:
    table = Table(title=f"Worst deviation from one process over {STEPS} steps in fp32")
    for heading in ("layout", "ranks", "loss", "norm", "parameters", "first loss", "first norm", "seconds"):
        table.add_column(heading, justify="left" if heading == "layout" else "right")
    for layout in EVERY:
        if (worst := found.get(layout.name)) is None:
            continue
        figures = [f"{worst[key]:.1e}" for key in (*FIGURES, *FIRST)]
        table.add_row(layout.name, str(layout.plan.degrees.world), *figures, f"{worst['seconds']:.1f}")
    Console(width=100).print(table)


@pytest.mark.parametrize("layout", tiered(LAYOUTS, QUICK))
def test_layout_equals_one_process(layout: Layout, results: dict[str, dict[str, float]]) -> None:
    worst = results[layout.name]
    assert all(worst[figure] <= BAR for figure in FIGURES), worst


@pytest.mark.parametrize("layout", tiered(FP16_LAYOUTS, ()))
def test_layout_in_fp16_equals_one_process_within_its_rounding(
    layout: Layout, results: dict[str, dict[str, float]]
) -> None:
    worst = results[layout.name]
    assert worst["loss"] <= 1e-3 and worst["norm"] <= 1e-2 and worst["parameters"] <= 5e-3, worst


@pytest.mark.parametrize("layout", tiered(FP8_LAYOUTS, ("fp8 tp",)))
def test_layout_in_fp8_equals_one_process(layout: Layout, results: dict[str, dict[str, float]]) -> None:
    """Same blocks and scales, so the first step is that of one process but for fp32 noise.

    Then the noise moves single elements to the next number of e4m3, a sixteenth away. One process whose learning rate
    is a millionth higher is apart by 3e-5 in the loss and 2e-2 in the norm, most of it in one step; layouts were by
    7e-5, 5e-2 and, in parameters, 4e-3 when the bars were set.
    """
    worst = results[layout.name]
    assert worst["first loss"] <= 1e-6 and worst["first norm"] <= 5e-4, worst
    assert worst["loss"] <= 2e-4 and worst["norm"] <= 1e-1 and worst["parameters"] <= 1e-2, worst


@pytest.mark.parametrize("layout", tiered(FP8_MOE_LAYOUTS, ()))
def test_experts_in_fp8_differ_by_their_rounding_alone(layout: Layout, results: dict[str, dict[str, float]]) -> None:
    """Which tokens share a block of an expert's weight gradient depends on who sends them; forward nothing does."""
    worst = results[layout.name]
    assert worst["first loss"] <= 1e-6 and worst["first norm"] <= 1e-2, worst
    assert worst["loss"] <= 2e-3 and worst["norm"] <= 5e-2 and worst["parameters"] <= 2e-2, worst


@pytest.mark.parametrize("name", ["every layout", "quick layouts"])
def test_every_axis_and_schedule_is_covered(name: str) -> None:
    tier = [layout for layout in LAYOUTS if name == "every layout" or layout.name in QUICK]
    degrees = [layout.plan.degrees for layout in tier]
    for axis in ("pp", "replicate", "shard", "cp", "tp", "ep"):
        assert any(getattr(each, axis) > 1 for each in degrees), axis
    schedules = {layout.plan.pipeline.schedule for layout in tier if layout.plan.degrees.pp > 1}
    assert schedules == set(get_args(PipelineSchedule))


@pytest.mark.parametrize("name", ["accumulate 4", "moe accumulate 4"])
def test_accumulation_equals_the_full_batch(name: str, results: dict[str, dict[str, float]]) -> None:
    """Within fp32 noise: a few units in the last place."""
    assert results[name]["loss"] <= 1e-6
    assert results[name]["norm"] <= 1e-6
    assert results[name]["parameters"] <= 1e-6


@pytest.mark.parametrize("kept", ["fsdp × tp"])
@pytest.mark.parametrize("regathered", ["fsdp × tp, regathered"])
def test_gathering_inputs_again_changes_no_bit(
    kept: str, regathered: str, results: dict[str, dict[str, float]]
) -> None:
    """The same sums in the same order: both are exactly as far from one process."""
    assert [results[regathered][figure] for figure in FIGURES] == [results[kept][figure] for figure in FIGURES]
