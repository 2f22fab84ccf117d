"""The commands of `docs/how-to/fine-tune.md` run, and the model that they train gives the answers on the page."""

import re
import shutil
from pathlib import Path

import pytest
from readme_commands import blocks, script
from source_tree import ROOT
from test_readme import run_script

PAGE = ROOT / "docs" / "how-to" / "fine-tune.md"
LIMIT_SECONDS = 900


@pytest.mark.timeout(LIMIT_SECONDS + 60)
def test_a_model_is_imported_tuned_exported_and_asked(tmp_path: Path) -> None:
    text = PAGE.read_text("utf-8")
    copy = tmp_path / "danlu"
    shutil.copytree(ROOT / "examples" / "chat", copy / "examples" / "chat")
    status, output = run_script(script([each for each in blocks(text) if each.not_run is None]), copy, LIMIT_SECONDS)
    assert status == 0, f"ended with {status if status is not None else 'no time left'}:\n{output[-8000:]}"
    answers = re.findall(r"^.*\? It is .*$|^Name .*$", text, re.MULTILINE)
    assert len(answers) == 2 and all(answer in output for answer in answers), output[-2000:]
    assert "of which the loss counted" in output


def test_the_recipe_that_the_page_shows_is_the_one_it_runs() -> None:
    shown = re.search(r"^```toml\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert shown is not None
    recipe = (ROOT / "examples" / "chat" / "fine-tune.toml").read_text()
    assert [_setting(line) for line in shown[1].splitlines()] == [_setting(line) for line in recipe.splitlines()[1:]]


def _setting(line: str) -> str:
    return line.partition(" #")[0].rstrip()
