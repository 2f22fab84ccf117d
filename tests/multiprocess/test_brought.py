"""Unmodified modules of users, under every axis they offer, train like themselves in a bare PyTorch loop."""

import json
from pathlib import Path

import pytest
from brought_layouts import LAYOUTS, Brought
from ranks import run_ranks

RANK = Path(__file__).parent / "brought_rank.py"
BAR = 1e-5


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, dict[str, float]]:
    for world in sorted({layout.plan.degrees.world for layout in LAYOUTS}):
        run_ranks(RANK, world, str(folder), seconds=300)
    worst: dict[str, dict[str, float]] = {}
    for file in folder.glob("brought-*.json"):
        result = json.loads(file.read_text())
        found = worst.setdefault(result["name"], {})
        for key in ("loss", "norm", "parameters"):
            found[key] = max(found.get(key, 0.0), result[key])
    return worst


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_module_trains_like_its_undistributed_self(layout: Brought, results: dict[str, dict[str, float]]) -> None:
    assert all(deviation <= BAR for deviation in results[layout.name].values()), results[layout.name]
