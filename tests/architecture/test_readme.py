"""What the README tells its reader to type works, in a fresh copy of the repository."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import InvalidRequirement, Requirement
from readme_commands import Block, blocks, pip_targets, script, told
from source_tree import ROOT, tracked_files

LIMIT_SECONDS = 1100
BIN = Path(sys.executable).parent


def readme_blocks() -> list[Block]:
    return blocks((ROOT / "README.md").read_text("utf-8"))


def target_problem(target: str) -> str | None:
    """Why pip could not install the target from this repository, if so."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    path, _, extras = target.removesuffix("]").partition("[")
    if path.startswith((".", "/")):
        unknown = {extra.strip() for extra in extras.split(",") if extra} - set(project["optional-dependencies"])
        if unknown:
            return f"extras {sorted(unknown)} are not in pyproject.toml"
        return None if (ROOT / path / "pyproject.toml").is_file() else f"{path} holds no project"
    try:
        wanted = Requirement(target)
    except InvalidRequirement as error:
        return str(error)
    ours = {r.name: r for r in map(Requirement, project["dependencies"])}
    if wanted.name not in ours:
        return f"{wanted.name} is not a dependency of this project"
    pinned = [pin.version for pin in wanted.specifier if pin.operator == "=="]
    excluded = [version for version in pinned if not ours[wanted.name].specifier.contains(version)]
    return f"{wanted} is not within {ours[wanted.name]}" if excluded else None


def run_script(text: str, folder: Path, limit: float) -> tuple[int | None, str]:
    """Run a shell script with this environment's commands first; its status (None when out of time) and output."""
    log = folder.parent / "readme.log"
    home = folder.parent / "home"
    home.mkdir(exist_ok=True)
    environment = os.environ | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "HOME": str(home)}
    with log.open("w") as output:
        shell = subprocess.Popen(
            ["bash", "-c", text],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = shell.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
            status = None
    return status, log.read_text("utf-8", errors="replace")


@pytest.fixture
def fresh_copy(tmp_path: Path) -> Path:
    """What a clone would hold."""
    folder = tmp_path / "danlu"
    for path in tracked_files():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, folder / path)
    return folder


def test_the_command_is_this_environments() -> None:
    found = shutil.which("danlu", path=str(BIN))
    assert found, f"no `danlu` beside {sys.executable}: pip install -e ."


@pytest.mark.timeout(LIMIT_SECONDS + 60)
def test_the_readmes_commands_run(fresh_copy: Path) -> None:
    to_run = [block for block in readme_blocks() if block.not_run is None]
    text = script(to_run)
    assert "\ndanlu " in text, "the README runs no danlu command"
    status, output = run_script(text, fresh_copy, LIMIT_SECONDS)
    assert status == 0, f"ended with {status if status is not None else 'no time left'}:\n{output[-8000:]}"
    expected = told((ROOT / "README.md").read_text("utf-8"))
    assert len(expected) >= 3
    assert [line for line in expected if not re.search(line, output)] == [], "the README shows what no command printed"


def test_what_is_not_run_says_why() -> None:
    assert [f"README.md:{block.line}" for block in readme_blocks() if block.not_run == ""] == []


def test_what_the_readme_installs_can_be_installed() -> None:
    targets = [t for block in readme_blocks() for command in block.commands for t in pip_targets(command)]
    assert any(target.startswith(".") for target in targets), "the README does not install the project"
    assert {target: problem for target in targets if (problem := target_problem(target))} == {}


SAMPLE = """
```bash
pip install -e '.[hf]'  # the project
cd inside
danlu check \\
    recipe.toml
```

<!-- not run: needs a cluster -->
```console
$ danlu launch
job 7
```

<!-- not run: -->
```bash
danlu x
```

```console
$ pwd
/somewhere
```

```toml
steps = 3
```
"""


def test_commands_are_found() -> None:
    found = blocks(SAMPLE)
    assert [block.not_run for block in found] == [None, "needs a cluster", "", None]
    assert [block.line for block in found] == [3, 11, 17, 21]
    assert found[0].commands[2] == "danlu check \\\n    recipe.toml"
    assert found[1].commands == ("danlu launch",)
    assert pip_targets(found[0].commands[0]) == [".[hf]"]
    runnable = script([found[0], found[3]])
    assert "pip install" not in runnable and "somewhere" not in runnable and "cd inside" in runnable


def test_outputs_are_found() -> None:
    found = told(SAMPLE + "\n```text\nloss      2.0670, below\nthe best of 1,234 layouts, 56 priced in full\n```\n")
    assert found == ["/somewhere", r"loss +2\.0", re.escape("the best of 1,234 layouts, 56 priced in full")]


def test_a_failing_command_is_caught(tmp_path: Path) -> None:
    folder = tmp_path / "danlu"
    folder.mkdir()
    good = Block(line=1, commands=("mkdir here", "cd here"), not_run=None)
    bad = Block(line=7, commands=("test $(basename $PWD) = here", "false", "echo never"), not_run=None)
    status, output = run_script(script([good, bad]), folder, 20)
    assert status == 1
    assert "README.md:7" in output and "never" not in output


def test_a_command_that_hangs_is_ended(tmp_path: Path) -> None:
    folder = tmp_path / "danlu"
    folder.mkdir()
    status, _ = run_script("sleep 60 & sleep 60", folder, 0.5)
    assert status is None


@pytest.mark.parametrize("target", ["./nowhere", ".[nothing]", "leftpad", "torch==1.0", "=="])
def test_a_target_that_cannot_be_installed_is_caught(target: str) -> None:
    assert target_problem(target)


@pytest.mark.parametrize("target", [".", ".[hf]", ".[dev,docs]", "torch==2.13.0", "torch"])
def test_a_target_that_can_be_installed_is_allowed(target: str) -> None:
    assert target_problem(target) is None


def test_the_chinese_page_has_the_same_commands() -> None:
    """What runs here runs there: code blocks are the same, word for word and in the same order."""
    english, chinese = ((ROOT / name).read_text("utf-8") for name in ("README.md", "README.zh.md"))
    code = re.compile(r"(?:^<!-- not run: [^\n]*-->\n)?^```\w+\n.*?^```$", re.MULTILINE | re.DOTALL)
    assert code.findall(chinese) == code.findall(english)
    assert len(code.findall(english)) > 5
