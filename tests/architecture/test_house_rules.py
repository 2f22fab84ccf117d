"""The rules hold over the whole tree, and each of them catches a text that breaks it."""

from collections.abc import Callable, Iterable
from pathlib import Path

import house_rules
import pytest
from house_rules import LONGEST_FILE, LONGEST_README, Breach
from source_tree import PACKAGE, ROOT, rooms, source_files, tracked_files

# Put together at run time, so that this file does not break the rule it tests.
LOCAL_FOLDERS = ["/" + name + "/" for name in ("root", "work", "home")]
INDEX_HOST = "https://" + "pypi.example.org/simple"


def breaches(files: Iterable[Path], rule: Callable[[str], list[Breach]]) -> list[str]:
    """What breaks a rule, as `file:line: what`."""
    found = []
    for path in files:
        try:
            found += [f"{path.relative_to(ROOT)}:{line}: {what}" for line, what in rule(path.read_text("utf-8"))]
        except SyntaxError as error:
            found.append(f"{path.relative_to(ROOT)}:{error.lineno}: {error.msg}")
    return found


def outside(room: str) -> list[Path]:
    return [path for path in source_files() if path.relative_to(PACKAGE).parts[0] != room]


def tracked_python() -> list[Path]:
    return [ROOT / path for path in tracked_files(new=True) if path.suffix == ".py"]


def tracked_text() -> list[Path]:
    binary = {".pack", ".parity", ".bin", ".crc", ".ends", ".counts"}  # kept checkpoints and token shards
    paths = [ROOT / path for path in tracked_files(new=True) if Path(path).suffix not in binary]
    return [path for path in paths if b"\0" not in path.read_bytes()[:8192]]


def test_there_is_a_tree_to_check() -> None:
    assert PACKAGE / "spec" / "plan.py" in source_files()
    assert PACKAGE / "spec" / "plan.py" in tracked_python()
    assert ROOT / "pyproject.toml" in tracked_text()
    assert {"spec", "cli"} <= set(rooms())


def test_only_chips_names_a_vendor() -> None:
    assert breaches(outside("chips"), house_rules.vendor_words) == []


@pytest.mark.parametrize(
    "text",
    [
        'device = "cuda"',
        'device = "cuda:0"',
        'f"{rank} on nccl"',
        'run(backend="cpu:gloo,cuda:nccl")',
        'x = "NCCL_DEBUG"',
    ],
)
def test_a_vendor_name_is_caught(text: str) -> None:
    assert house_rules.vendor_words(text)


@pytest.mark.parametrize("text", ['"""Drives cuda."""', 'x = 1\n"""Of a cuda chip."""', 'x = "barracuda"', "cuda = 1"])
def test_prose_may_speak_of_a_vendor(text: str) -> None:
    assert house_rules.vendor_words(text) == []


def test_only_torch_compat_uses_what_torch_keeps_private() -> None:
    files = [path for path in source_files() if path.parent != PACKAGE / "torch_compat"]
    assert breaches(files, house_rules.private_torch) == []


@pytest.mark.parametrize(
    "text",
    [
        "from torch._subclasses.fake_tensor import FakeTensor",
        "from torch.distributed.pipelining.stage import _RecvInfo",
        "import torch._dynamo",
        "x = torch._foreach_norm(y)",
        "if torch._C._current_graph_task_id() == -1: pass",
    ],
)
def test_a_private_name_of_torch_is_caught(text: str) -> None:
    assert house_rules.private_torch(text)


@pytest.mark.parametrize("text", ["torch.ops._c10d_functional.all_reduce", "torch.__version__", "self._torch.x"])
def test_operators_and_our_own_names_are_not_private_torch(text: str) -> None:
    assert not house_rules.private_torch(text)


def test_only_cli_reads_the_environment() -> None:
    assert breaches(outside("cli"), house_rules.environment_access) == []


@pytest.mark.parametrize(
    "text",
    [
        'import os\nx = os.environ["A"]',
        'import os\nos.environ["A"] = "1"',
        'import os as system\nsystem.getenv("A")',
        "from os import environ",
        'import os\nos.putenv("A", "1")',
    ],
)
def test_use_of_the_environment_is_caught(text: str) -> None:
    assert house_rules.environment_access(text)


def test_nothing_pickles() -> None:
    assert breaches(source_files(), house_rules.pickling) == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "import dill as d",
        "import marshal",
        'import importlib\nimportlib.import_module("cloudpickle")',
        "import torch\ntorch.load(path)",
        "import torch as t\nt.save(x, path)",
        "from torch import load",
        "import torch.distributed as dist\ndist.all_gather_object(out, x)",
        "from torch.distributed.checkpoint import FileSystemReader",
        "from torch.distributed.checkpoint.filesystem import FileSystemWriter",
        "import numpy as np\nnp.load(path, allow_pickle=True)",
        "import numpy as np\nnp.load(path, allow_pickle=trusted)",
    ],
)
def test_pickling_is_caught(text: str) -> None:
    assert house_rules.pickling(text)


@pytest.mark.parametrize("text", ["import json\njson.load(f)", "import numpy as np\nnp.load(p, allow_pickle=False)"])
def test_reading_plain_data_is_allowed(text: str) -> None:
    assert house_rules.pickling(text) == []


def test_no_error_is_swallowed() -> None:
    assert breaches(tracked_python(), house_rules.swallowed_errors) == []


@pytest.mark.parametrize(
    "text",
    [
        "try:\n    x()\nexcept Exception:\n    pass",
        "try:\n    x()\nexcept:\n    pass",
        "for _ in y:\n    try:\n        x()\n    except (OSError, BaseException):\n        continue",
        "import contextlib\nwith contextlib.suppress(Exception):\n    x()",
    ],
)
def test_a_swallowed_error_is_caught(text: str) -> None:
    assert house_rules.swallowed_errors(text)


def test_a_narrow_or_answered_error_is_allowed() -> None:
    assert house_rules.swallowed_errors("try:\n    x()\nexcept FileNotFoundError:\n    pass") == []
    assert house_rules.swallowed_errors("try:\n    x()\nexcept Exception as error:\n    tell(error)") == []


def test_no_python_file_is_too_long() -> None:
    assert breaches(tracked_python(), house_rules.too_long) == []


def test_a_long_file_is_caught() -> None:
    assert house_rules.too_long("x = 1\n" * LONGEST_FILE) == []
    assert house_rules.too_long("x = 1\n" * (LONGEST_FILE + 1))


def test_every_module_is_named_after_what_it_holds() -> None:
    files = [path for path in tracked_files(new=True) if path.suffix == ".py"]
    assert [f"{path}: {what}" for path in files for _, what in house_rules.junk_drawer(path)] == []


@pytest.mark.parametrize("name", ["src/danlu/comm/utils.py", "src/danlu/common/mesh.py", "tests/helpers.py"])
def test_a_junk_drawer_is_caught(name: str) -> None:
    assert house_rules.junk_drawer(Path(name))


def test_no_file_carries_traces_of_a_machine() -> None:
    assert breaches(tracked_text(), house_rules.leaks) == []


@pytest.mark.parametrize(
    "text",
    [
        *(f"see {folder}notes.md" for folder in LOCAL_FOLDERS),
        f'x = "{LOCAL_FOLDERS[0]}"',
        "file://" + LOCAL_FOLDERS[1],
        INDEX_HOST,
        "pip install --index" + "-url x y",
    ],
)
def test_a_trace_is_caught(text: str) -> None:
    assert house_rules.leaks(text)


@pytest.mark.parametrize("text", ["src/work/x", "https://pytorch.org/docs", "~/work/x", "$HOME/root/x"])
def test_an_ordinary_path_is_no_trace(text: str) -> None:
    assert house_rules.leaks(text) == []


@pytest.mark.parametrize("room", rooms())
def test_a_room_explains_itself_on_one_screen(room: str) -> None:
    readme = PACKAGE / room / "README.md"
    assert readme.is_file(), f"{room} has no README.md"
    lines = readme.read_text("utf-8").count("\n")
    assert 5 <= lines <= LONGEST_README, f"{room}/README.md has {lines} lines; one screen is {LONGEST_README}"
