"""The dry run tells the truth: what it finds is what real ranks do."""

import json
from collections import Counter
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

ROUTING_SLACK = 0.25
"""The dry run routes evenly, a fresh router does not."""


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, list[dict[str, Any]]]:
    run_ranks(RANK, WORLD, str(folder), seconds=300)
    found: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(folder.glob("dry-*.json")):
        result = json.loads(file.read_text())
        found.setdefault(result["name"], []).append(result)
    return found


def _counts(trace: dict[str, Any], experts: bool) -> Counter[tuple[Any, ...]]:
    """How often every collective is called; where tokens are routed, all-to-alls have the sizes of the routing."""
    counts: Counter[tuple[Any, ...]] = Counter()
    for call in trace["collectives"]:
        size = None if experts and call["operation"] == "all_to_all" else call["size"]
        counts[call["operation"], call["dtype"], size, call["axes"], call["ranks"]] += call["count"]
    return counts


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_collectives_are_the_real_ones(layout: Layout, results: dict[str, list[dict[str, Any]]]) -> None:
    assert len(results[layout.name]) == WORLD
    for result in results[layout.name]:
        assert result["real"]["collectives"], "a layout of several ranks talks"
        experts = layout.model == "tiny-moe"
        assert _counts(result["dry"], experts) == _counts(result["real"], experts)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_peak_bytes_are_the_real_ones(layout: Layout, results: dict[str, list[dict[str, Any]]]) -> None:
    for result in results[layout.name]:
        dry, real = (sum(result[side]["peak"]["held"]) for side in ("dry", "real"))
        print(layout.name, dry, real, f"{dry / real - 1:.4%}", result["dry"]["peak"], result["real"]["peak"])
        if layout.model == "tiny-moe":
            assert dry == pytest.approx(real, rel=ROUTING_SLACK)
        elif layout.plan.degrees.pp == 1:
            assert dry == real
        else:
            assert dry == pytest.approx(real, rel=PIPELINE_SLACK)


def test_enough_layouts_are_compared() -> None:
    assert len(LAYOUTS) >= 12
