"""Two tiers of tests: `pytest -m "not full"` is CI's quick one, and without it every layout is trained."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def tiered(layouts: Iterable[Any], quick: Collection[str]) -> list[Any]:
    """Parameters for tests of layouts; those whose names are not `quick` are marked `full`."""
    layouts = list(layouts)
    unknown = set(quick) - {layout.name for layout in layouts}
    assert not unknown, f"no layout has these names: {sorted(unknown)}"
    return [
        pytest.param(layout, id=layout.name, marks=() if layout.name in quick else pytest.mark.full)
        for layout in layouts
    ]
