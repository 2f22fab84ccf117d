"""The dry run tells the truth: what it finds is what torch's profiler sees of real ranks in the real loop."""

import json
from pathlib import Path
from typing import Any

import pytest
from dryrun_rank import layouts
from layouts import Layout, recipe
from ranks import run_ranks
from tiers import tiered

pytestmark = pytest.mark.timeout(1300)  # the first test waits for all layouts, on a busy machine too
RANK = Path(__file__).parent / "dryrun_rank.py"
WORLD = 2
LAYOUTS = layouts(WORLD)
ROUTED = [each for each in LAYOUTS if recipe(each.model, "none", each.changes).decoder.moe is not None]
QUICK = ("tp, regathered", "zbv", "moe ep over tp")
SCALARS = 64
"""Bytes of single numbers that something else in the process holds."""
SCRATCH = 16384
"""Bytes that an operator takes while it runs: the weight of a norm in fp32, and its gradient by thread."""
ROUTED_SLACK = 0.03
"""A collective between experts that is under way holds its buffers; in the dry run it is done at once."""


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What came of the layouts that the tests of this call look at; all of them if none is named."""
    chosen = [
        item.callspec.params["layout"].name
        for item in request.session.items
        if hasattr(item, "callspec") and item.path == request.path
    ]
    run_ranks(RANK, WORLD, str(folder), "|".join(chosen), seconds=1200)
    found: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(folder.glob("dry-*.json")):
        result = json.loads(file.read_text())
        found.setdefault(result["name"], []).append(result)
    return found


@pytest.mark.parametrize("layout", tiered(LAYOUTS, QUICK))
def test_collectives_are_those_that_gloo_was_given(layout: Layout, results: dict[str, list[dict[str, Any]]]) -> None:
    """Experts are loaded evenly on both sides, so sizes are the same too."""
    assert len(results[layout.name]) == WORLD
    for result in results[layout.name]:
        dry, real = result["calls"]
        assert real, "a layout of several ranks talks"
        assert dry == real


@pytest.mark.parametrize("layout", tiered(LAYOUTS, QUICK))
def test_peak_bytes_are_those_of_the_allocator(layout: Layout, results: dict[str, list[dict[str, Any]]]) -> None:
    """Up to scalars that others hold, and the buffers of a collective that gloo's thread has yet to drop."""
    for result in results[layout.name]:
        dry, real = result["dry_peak"], min(result["peaks"])
        slack = ROUTED_SLACK * real if layout in ROUTED else SCALARS
        assert -slack <= real - dry <= result["largest_call"] + slack


def test_most_peaks_are_equal_to_the_byte(results: dict[str, list[dict[str, Any]]]) -> None:
    """Of one rank of each at least: in others gloo's thread may hold a buffer at the peak of every step."""
    dense = [result for layout in LAYOUTS if layout not in ROUTED for result in results.get(layout.name, ())]
    more: dict[str, int] = {}
    for result in dense:
        difference = abs(min(result["peaks"]) - result["dry_peak"])
        more[result["name"]] = min(difference, more.get(result["name"], difference))
    assert sum(each <= SCALARS + SCRATCH for each in more.values()) >= 0.8 * len(more), more


@pytest.mark.parametrize("layout", tiered(LAYOUTS, QUICK))
def test_products_are_the_real_ones(layout: Layout, results: dict[str, list[dict[str, Any]]]) -> None:
    for result in results[layout.name]:
        dry, real = result["products"]
        assert dry
        if layout.plan.recompute == "none":  # the profiler also counts products that recompute asks for and skips
            assert dry == real


def test_enough_layouts_are_compared() -> None:
    assert len(LAYOUTS) >= 12
