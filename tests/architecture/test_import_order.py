"""Rooms import downwards only, and what runs on a login node does so without torch."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from source_tree import PACKAGE, ROOT, rooms

WITHOUT_TORCH = [f"danlu.{room}" for room in ("spec", "cost", "planner", "report", "scheduler", "runs", "cli")]
COMMANDS_WITHOUT_TORCH = [
    ["--help"],
    ["--version"],
    ["check", "--help"],
    ["ckpt", "--help"],
    ["import", "dcp", "--help"],
]

# Every module of the room is imported, not only what its door happens to pull in.
IMPORT_ALL = """
import importlib, pkgutil, sys
room = importlib.import_module(sys.argv[1])
for found in pkgutil.walk_packages(room.__path__, room.__name__ + "."):
    importlib.import_module(found.name)
sys.exit("torch was imported" if "torch" in sys.modules else 0)
"""

RUN_COMMAND = """
import sys
from danlu.cli import main
sys.argv[0] = "danlu"
try:
    main()
except SystemExit as ending:
    if ending.code:
        raise
sys.exit("torch was imported" if "torch" in sys.modules else 0)
"""


def layers(pyproject: Path) -> list[set[str]]:
    """The contract's lines, uppermost first, each a set of rooms that may not import one another."""
    contracts = tomllib.loads(pyproject.read_text())["tool"]["importlinter"]["contracts"]
    ordered = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [{name.strip().removeprefix("danlu.") for name in line.split("|")} for line in ordered]


def unlisted(package: Path, pyproject: Path) -> set[str]:
    """Rooms and top-level modules that the contract does not know."""
    modules = {path.stem for path in package.glob("*.py")} - {"__init__", "__main__"}
    return ({*rooms(package)} | modules) - set().union(*layers(pyproject))


def fresh(code: str, *arguments: str, package_parent: Path = PACKAGE.parent) -> subprocess.CompletedProcess[str]:
    """Run code in a process that has imported nothing yet."""
    environment = os.environ | {"PYTHONPATH": str(package_parent)}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def lint_imports(tree: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter on the tree that holds `src/danlu` and `pyproject.toml`."""
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True, no_logo=True))"
    environment = os.environ | {"PYTHONPATH": str(tree / "src")}
    return subprocess.run([sys.executable, "-c", code], cwd=tree, env=environment, capture_output=True, text=True)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package and its contract, to be broken."""
    shutil.copytree(PACKAGE, tmp_path / "src" / "danlu", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_rooms_import_downwards_only() -> None:
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


def test_an_import_upwards_is_caught(copy: Path) -> None:
    with (copy / "src/danlu/spec/model.py").open("a") as file:
        file.write("\nimport danlu.cli\n")
    result = lint_imports(copy)
    assert result.returncode != 0
    assert "danlu.spec.model -> danlu.cli" in result.stdout, result.stdout + result.stderr


def test_the_contract_knows_every_room() -> None:
    assert unlisted(PACKAGE, ROOT / "pyproject.toml") == set()


def test_a_room_outside_the_contract_is_caught(copy: Path) -> None:
    new = copy / "src/danlu/attic"
    new.mkdir()
    (new / "box.py").write_text("")
    assert unlisted(copy / "src/danlu", copy / "pyproject.toml") == {"attic"}


@pytest.mark.parametrize("room", WITHOUT_TORCH)
def test_a_room_for_the_login_node_leaves_torch_alone(room: str) -> None:
    result = fresh(IMPORT_ALL, room)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("arguments", COMMANDS_WITHOUT_TORCH, ids=" ".join)
def test_help_leaves_torch_alone(arguments: list[str]) -> None:
    result = fresh(RUN_COMMAND, *arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "danlu" in result.stdout


MAKE_CHECKPOINT = """
import sys
import numpy as np
from danlu.storage.checkpoint.single_writer import source_tensor, write_checkpoint
from danlu.storage.store.base import open_store
write_checkpoint(open_store(sys.argv[1]), 4, [source_tensor("w", "F32", np.zeros(3, np.float32))], {})
sys.exit("torch was imported" if "torch" in sys.modules else 0)
"""


def test_checkpoints_are_written_and_looked_at_without_torch(tmp_path: Path) -> None:
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    result = fresh(MAKE_CHECKPOINT, one)
    assert result.returncode == 0, result.stderr
    for arguments in (["ls", one], ["verify", one], ["show", one], ["copy", one, two], ["diff", one, two, "--values"]):
        result = fresh(RUN_COMMAND, "ckpt", *arguments)
        assert result.returncode == 0, result.stdout + result.stderr


def test_an_import_of_torch_is_caught(copy: Path) -> None:
    with (copy / "src/danlu/spec/model.py").open("a") as file:
        file.write("\nimport torch\n")
    for code, argument in ((IMPORT_ALL, "danlu.spec"), (RUN_COMMAND, "--help")):
        result = fresh(code, argument, package_parent=copy / "src")
        assert result.returncode != 0
        assert "torch was imported" in result.stderr
