"""The reference of every key is what the schema says now, and says something about each."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from danlu.spec import Cluster, Plan, Recipe
from danlu.spec.custom_model import CustomModel
from danlu.spec.model import Model

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


@pytest.fixture(scope="module")
def make() -> ModuleType:
    found = importlib.util.spec_from_file_location("make_reference", REFERENCE / "make.py")
    assert found and found.loader
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_the_pages_are_what_the_schema_says(make: ModuleType) -> None:
    for name, text in make.pages().items():
        committed = (REFERENCE / f"{name}.md").read_text(encoding="utf-8")
        assert committed == text, f"docs/reference/{name}.md is old: python docs/reference/make.py"


def test_every_key_has_a_row_and_a_meaning(make: ModuleType) -> None:
    pages = make.pages()
    rows = [line for text in pages.values() for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) > 110
    assert not [row for row in rows if not row.rstrip(" |").rpartition("|")[2].strip()]
    for name, kinds in {
        "recipe": [Recipe],
        "model": [Model, CustomModel],
        "cluster": [Cluster],
        "plan": [Plan],
    }.items():
        for kind in kinds:
            assert not [key for key in kind.model_fields if f"| `{key}` |" not in pages[name]], name
    assert "| `weight_decay` | number | `0.1` |" in pages["recipe"]
    assert "1 kB/s to 1 EB/s" in pages["cluster"]
