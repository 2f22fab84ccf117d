"""The dry run tells the truth: what it finds is what real ranks do."""

import json
from pathlib import Path
from typing import Any

import pytest
from dryrun_rank import layouts
from layouts import Layout
from ranks import run_ranks

RANK = Path(__file__).parent / "dryrun_rank.py"
WORLD = 2
LAYOUTS = layouts(WORLD)
PIPELINE_SLACK = 0.06
"""Sends under way hold their buffers on a real network; in the dry run they are done at once."""


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, list[dict[str, Any]]]:
    run_ranks(RANK, WORLD, str(folder), seconds=300)
    found: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(folder.glob("dry-*.json")):
        result = json.loads(file.read_text())
        found.setdefault(result["name"], []).append(result)
    return found


def _sorted(trace: dict[str, Any]) -> list[tuple[Any, ...]]:
    return sorted(tuple(sorted(call.items())) for call in trace["collectives"])


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_collectives_are_the_real_ones(layout: Layout, results: dict[str, list[dict[str, Any]]]) -> None:
    assert len(results[layout.name]) == WORLD
    for result in results[layout.name]:
        assert result["real"]["collectives"], "a layout of several ranks talks"
        assert _sorted(result["dry"]) == _sorted(result["real"])


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_peak_bytes_are_the_real_ones(layout: Layout, results: dict[str, list[dict[str, Any]]]) -> None:
    for result in results[layout.name]:
        dry, real = result["dry"]["peak"], result["real"]["peak"]
        if layout.plan.degrees.pp == 1:
            assert dry == real
        else:
            assert dry == pytest.approx(real, rel=PIPELINE_SLACK)


def test_enough_layouts_are_compared() -> None:
    assert len(LAYOUTS) >= 12
