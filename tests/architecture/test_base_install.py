"""Without any extra, `pip install -e .` can train: what an extra brings is not there, and nothing asks for it."""

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from source_tree import ROOT

HIDE = """
import sys
from importlib.machinery import PathFinder

HIDDEN = {hidden!r}

class Visible(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Visible
"""
"""A `sitecustomize.py`, which every process of this Python runs at its start."""


def installed_with(requirements: Iterable[str]) -> set[str]:
    """The distributions of these requirements, with all that they require."""
    left, found = [Requirement(text) for text in requirements], set[str]()
    while left:
        name = canonicalize_name(left.pop().name)
        if name in found:
            continue
        try:
            needed = requires(name) or []
        except PackageNotFoundError:  # of another system, or not installed
            continue
        found.add(name)
        left += [
            each for text in needed if (each := Requirement(text)).marker is None or each.marker.evaluate({"extra": ""})
        ]
    return found


def modules_of_extras() -> set[str]:
    """Names that can be imported here and could not without the extras."""
    base = installed_with(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
    return {
        module
        for module, distributions in packages_distributions().items()
        if {canonicalize_name(each) for each in distributions}.isdisjoint(base | {"danlu"})
    }


@pytest.fixture
def base_install(tmp_path: Path) -> dict[str, str]:
    """An environment in whose processes the extras' modules are not there."""
    hidden = modules_of_extras()
    assert {"transformers", "tokenizers", "ray", "textual", "pytest"} <= hidden
    assert hidden.isdisjoint({"torch", "numpy", "pydantic", "typer", "rich", "danlu"})
    (tmp_path / "sitecustomize.py").write_text(HIDE.format(hidden=hidden))
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "src")])}


def test_a_run_needs_no_extra(base_install: dict[str, str], tmp_path: Path) -> None:
    recipe = (
        (ROOT / "recipes" / "quickstart.toml")
        .read_text()
        .replace("steps = 200", "steps = 2")
        .replace("warmup = 20", "warmup = 1")
    )
    recipe = recipe.replace("../shards/python-stdlib", "shards").replace("python-stdlib", str(ROOT / "CHANGELOG.md"))
    (tmp_path / "recipe.toml").write_text(recipe)
    command = [sys.executable, "-m", "danlu", "train", "recipe.toml", "--nproc", "2"]
    ended = subprocess.run(command, cwd=tmp_path, env=base_install, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert (tmp_path / "runs" / "quickstart" / "report.html").is_file()


def test_what_an_extra_brings_is_not_there(base_install: dict[str, str]) -> None:
    ended = subprocess.run([sys.executable, "-c", "import textual"], env=base_install, capture_output=True, text=True)
    assert ended.returncode != 0 and "No module named 'textual'" in ended.stderr
