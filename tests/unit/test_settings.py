"""`danlu train --set key=value`: checked like the file, and the error names the option."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from danlu.cli.app import app
from danlu.spec import SpecError
from danlu.spec.load import read_recipe

RECIPE = Path("recipes/quickstart.toml")


def _problems(*settings: str) -> str:
    with pytest.raises(SpecError) as error:
        read_recipe(RECIPE, settings)
    return str(error.value)


def test_values_take_the_place_of_the_file_s() -> None:
    was = read_recipe(RECIPE).value
    now = read_recipe(
        RECIPE,
        ["steps=7", "optimizer.learning_rate = 1e-4", "precision.compute=bf16", 'name="other"', "checkpoint.every=3"],
    ).value
    assert (now.steps, now.optimizer.learning_rate, now.precision.compute) == (7, 1e-4, "bf16")
    assert (now.name, now.checkpoint.every) == ("other", 3)
    assert now.model == was.model
    assert now.data == was.data
    assert read_recipe(RECIPE).value == was


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["stepz=7"], "--set:1: stepz: is not a setting\n    → did you mean `steps`?"),
        (["steps=7", "optimizer.lr=1"], "--set:2: optimizer.lr: is not a setting\n    → did you mean `learning_rate`?"),
        (["steps=many"], '--set:1: steps: is "many"'),
        (["steps=-1"], "--set:1: steps: is -1"),
        (["precision.compute=fp7"], '--set:1: precision.compute: is "fp7", but must be one of'),
        (["steps"], '--set:1: steps: "steps" must be a key and a value'),
        (["=3"], "--set:1: key:"),
        (["a..b=3"], "--set:1: a..b:"),
        (["steps="], "--set:1: steps:"),
        (["steps=1", "steps=2"], "--set:2: steps: is set twice"),
        (["steps.more=1"], "--set:1: steps.more: is inside `steps`"),
        (["model.base=no-such-model"], "model.base"),
        (["steps=" + "[" * 5000], "--set:1: steps:"),
    ],
)
def test_what_is_wrong_names_the_option(settings: list[str], said: str) -> None:
    assert said in _problems(*settings)


def test_elements_of_lists_are_named_by_number(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    text = RECIPE.read_text()
    recipe.write_text(text + '\n[[precision.layers]]\nmatch = "blocks.0"\ncompute = "fp32"\n')
    now = read_recipe(recipe, ["precision.compute=bf16", "precision.layers.0.match=blocks.1"]).value
    assert now.precision.label == "bf16 (fp32 in blocks.1)"
    with pytest.raises(SpecError, match="is index 1 of a list of 1"):
        read_recipe(recipe, ["precision.layers.1.match=blocks.1"])


def test_train_refuses_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = RECIPE.absolute()
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["train", str(recipe), "--set", "stepz=3"])
    assert result.exit_code != 0
    assert "--set:1: stepz: is not a setting" in (result.stderr or str(result.exception))
    assert not list(tmp_path.iterdir())
    result = CliRunner().invoke(app, ["train", "--resume", "run", "--set", "steps=3"])
    assert result.exit_code == 2
    assert "--set has no effect with --resume" in result.stderr


def test_the_run_s_recipe_shows_what_was_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from danlu.runs.prepare import prepare_run

    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.read_text())
    (tmp_path / "text.txt").write_text("a text that is long enough for one sample of a short sequence " * 40)
    monkeypatch.chdir(tmp_path)
    settings = [
        'data.source=["text.txt"]',
        "data.shards=shards",
        "steps=3",
        "batch.length=64",
        "schedule.warmup=1",
    ]
    run, lock = prepare_run(recipe, None, None, None, 1, settings)
    lock.release()
    kept = read_recipe(run.recipe).value
    assert (kept.steps, kept.batch.length, kept.schedule.warmup) == (3, 64, 1)
    assert "steps = 3" in run.recipe.read_text()
