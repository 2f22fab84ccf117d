"""`danlu check` and custom code: announced before it runs, skipped on request, reported when it fails; its paths."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from danlu.cli.app import app
from danlu.spec import load_recipe
from danlu.spec.custom_model import CustomModel
from danlu.spec.recipe_paths import resolve_recipe_paths

RECIPE = """\
name = "own"
steps = 1
[model]
factory = "FACTORY"
vocabulary = 8
arguments = {ARGUMENTS}
[data]
shards = "shards"
[batch]
sequences = 2
length = 4
"""

MODULE = """\
from pathlib import Path
from torch import nn
Path(__file__).with_name("was-imported").touch()
def good(**arguments):
    return nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))
def bad(**arguments):
    raise RuntimeError("no \\x1b[31mfolder")
def leaves(**arguments):
    raise SystemExit(0)
def reads(folder):
    assert Path(folder, "tokens").is_file(), folder
    return good()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    inside = tmp_path / "recipes"
    inside.mkdir()
    (inside / f"code_{tmp_path.name.replace('-', '_')}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return inside


def _write(folder: Path, function: str, arguments: str = "", factory: str = "") -> str:
    module = next(folder.glob("*.py")).stem
    text = RECIPE.replace("FACTORY", factory or f"{module}:{function}").replace("ARGUMENTS", arguments)
    (folder / "recipe.toml").write_text(text)
    return str(folder / "recipe.toml")


def _check(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["check", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def test_it_says_what_it_imports(folder: Path) -> None:
    recipe = _write(folder, "good")
    code, out, err = _check(recipe)
    assert code == 0 and "no problems" in out
    assert err.startswith("imports and runs code_") and str(next(folder.glob("*.py"))) in err and "--no-import" in err
    assert (folder / "was-imported").exists()


def test_nothing_is_imported_on_request(folder: Path) -> None:
    code, out, _ = _check(_write(folder, "bad"), "--no-import")
    assert code == 0 and "not checked: the model itself" in out
    assert not (folder / "was-imported").exists()
    code, out, _ = _check(_write(folder, "bad"), "--no-import", "--json")
    assert code == 0 and "was not imported" in out


def test_the_standard_library_makes_no_model(folder: Path) -> None:
    (folder / "os.txt").touch()
    recipe = _write(folder, "", f'command = "touch {folder}/harm"', factory="os:system")
    code, _, err = _check(recipe)
    assert code == 2 and "recipe.toml:4: model.factory" in err and "in the standard library" in err
    assert not (folder / "harm").exists()


@pytest.mark.parametrize(
    ("function", "expected"), [("bad", "raised RuntimeError: no \\u001b[31mfolder"), ("leaves", "raised SystemExit: 0")]
)
def test_a_factory_that_fails(function: str, expected: str, folder: Path) -> None:
    code, _, err = _check(_write(folder, function))
    assert code == 2 and expected in err and "recipe.toml:4: model.factory" in err
    assert "\x1b" not in err and "Traceback" not in err


def test_a_module_that_is_no_python(folder: Path) -> None:
    next(folder.glob("*.py")).write_text("def (:\n")
    code, _, err = _check(_write(folder, "good"))
    assert code == 2 and "cannot be imported: SyntaxError" in err


def test_paths_among_arguments_are_relative_to_the_recipe(folder: Path) -> None:
    (folder / "data").mkdir()
    (folder / "data" / "tokens").touch()
    recipe = _write(folder, "reads", 'folder = "./data"')
    assert _check(recipe)[0] == 0
    resolved = resolve_recipe_paths(load_recipe(Path(recipe)), Path(recipe).parent).model
    assert isinstance(resolved, CustomModel)
    assert resolved.arguments == {"folder": str(folder / "data")}


def test_a_path_that_meant_the_working_directory(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "tokens").touch()
    code, _, err = _check(_write(folder, "reads", 'folder = "./data"'))
    assert code == 2 and "relative to the recipe" in err and str(tmp_path / "data") in err
    code, _, err = _check(_write(folder, "reads", 'folder = "data"'))
    assert code == 0 and "warning: " in err and '"./data" is relative to the recipe' in err
