"""Unmodified modules of users, under every axis they offer, train like themselves in a bare PyTorch loop.

Only what is selected is trained.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from brought_layouts import LAYOUTS, Brought
from deviations import FIGURES, gather, selected, summary
from ranks import run_ranks
from tiers import tiered

RANK = Path(__file__).parent / "brought_rank.py"
BAR = 1e-5
QUICK = (
    *("one rank", "shard 2", "replicate 2, accumulate 2", "pp 2 interleaved", "dropout, pp 2", "shard 2, tp 2, tied"),
    *(
        "qwen3 tp 2, its own plan",
        "gemma shard 2, tp 2, its own plan",
        "llama pp 2, kernels, recompute",
        "mixtral ep 2",
    ),
)


Results = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results(folder: Path, request: pytest.FixtureRequest, report: Callable[[dict[str, Any]], None]) -> Results:
    """What every rank of the selected layouts found."""
    names = selected(request)
    chosen = [layout for layout in LAYOUTS if layout.name in names]
    run_ranks(RANK, max(each.plan.degrees.world for each in chosen), str(folder), json.dumps(names), seconds=900)
    told = [json.loads(file.read_text()) for file in folder.glob("brought-*.json")]
    found = {layout.name: [each for each in told if each["name"] == layout.name] for layout in chosen}
    if len(chosen) == len(LAYOUTS):
        ranks = {layout.name: layout.plan.degrees.world for layout in LAYOUTS if not layout.warns}
        report(summary({name: gather(found[name], world) for name, world in ranks.items()}, ranks, BAR))
    return found


def _ids(layout: Brought) -> str:
    return layout.name


@pytest.mark.parametrize("layout", tiered((layout for layout in LAYOUTS if not layout.warns), QUICK))
def test_module_trains_like_its_undistributed_self(layout: Brought, results: Results) -> None:
    found = gather(results[layout.name], layout.plan.degrees.world)
    assert all(found[figure] <= BAR for figure in FIGURES), found


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout.warns], ids=_ids)
def test_a_layout_that_cannot_says_so(layout: Brought, results: Results) -> None:
    found = gather(results[layout.name], layout.plan.degrees.world)
    assert max(found[figure] for figure in FIGURES) > BAR, "the warning would be wrong"
    warned = [line for each in results[layout.name] for line in each["warned"]]
    assert len(warned) == 1 and layout.warns in warned[0], "one rank says it, once"
