"""Rooms import downwards only, and what runs on a login node does so without torch."""

import ast
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from source_tree import PACKAGE, ROOT, rooms

WITHOUT_TORCH = [f"danlu.{room}" for room in ("spec", "ops", "cost", "planner", "report", "scheduler", "runs", "cli")]
COMMANDS_WITHOUT_TORCH = [
    ["--help"],
    ["--version"],
    ["check", "--help"],
    ["ckpt", "--help"],
    ["import", "dcp", "--help"],
]

# Every module of the room is imported, not only what its door happens to pull in; but operators that run need torch.
IMPORT_ALL = """
import importlib, pkgutil, sys
room = importlib.import_module(sys.argv[1])
for found in pkgutil.walk_packages(room.__path__, room.__name__ + "."):
    if not found.name.startswith("danlu.ops.operators."):
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
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=360)


def lint_imports(tree: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter on the tree that holds `src/danlu` and `pyproject.toml`."""
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True, no_logo=True))"
    environment = os.environ | {"PYTHONPATH": str(tree / "src")}
    return subprocess.run([sys.executable, "-c", code], cwd=tree, env=environment, capture_output=True, text=True)


def imports(node: ast.AST, inside_function: bool = False) -> Iterator[tuple[str, bool]]:
    """Names that a file imports, those for type checking included, and whether inside a function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, inside_function) for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module:
            yield from ((f"{child.module}.{alias.name}", inside_function) for alias in child.names)
        is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from imports(child, inside_function or is_function)


def import_circle(package: Path, inside_functions: bool = False) -> list[str]:
    """Files that import one another in a circle, if there is one.

    That a file is imported through its folder's `__init__.py` is not counted: it is how Python finds it.
    """
    files = {
        ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in package.rglob("*.py")
    }
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        for name, lazy in imports(ast.parse(path.read_text("utf-8"))):
            imported = name if name in files else name.rpartition(".")[0]
            if imported in files and imported != module and (inside_functions or not lazy):
                graph.setdefault(module, set()).add(imported)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


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


@pytest.mark.parametrize("inside_functions", [False, True], ids=["at the top", "inside functions too"])
def test_no_files_import_each_other_in_a_circle(inside_functions: bool) -> None:
    assert import_circle(PACKAGE, inside_functions) == []


@pytest.mark.parametrize(
    "text",
    ["from danlu.cost import context", "if TYPE_CHECKING:\n    from danlu.cost.context import CostContext"],
    ids=["at run time", "for type checking"],
)
def test_a_circle_is_caught(copy: Path, text: str) -> None:
    with (copy / "src/danlu/cost/operator_time.py").open("a") as file:
        file.write(f"\n{text}\n")
    assert {"danlu.cost.context", "danlu.cost.operator_time"} <= {*import_circle(copy / "src/danlu")}


def test_a_circle_through_a_function_is_told_apart(copy: Path) -> None:
    with (copy / "src/danlu/cost/operator_time.py").open("a") as file:
        file.write("\n\ndef late() -> None:\n    from danlu.cost.context import CostContext\n")
    assert import_circle(copy / "src/danlu") == []
    assert "danlu.cost.context" in import_circle(copy / "src/danlu", inside_functions=True)


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
    (copy / "src/torch.py").touch()  # stands for the real one, which takes seconds
    for code, argument in ((IMPORT_ALL, "danlu.spec"), (RUN_COMMAND, "--help")):
        result = fresh(code, argument, package_parent=copy / "src")
        assert result.returncode != 0
        assert "torch was imported" in result.stderr
