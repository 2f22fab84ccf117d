"""Paths of a recipe hold wherever the workers, or later commands, are started."""

from pathlib import Path

import pytest

from danlu.spec.model import Model
from danlu.spec.recipe import BatchConfig, CheckpointConfig, DataConfig, Recipe
from danlu.spec.recipe_paths import resolve_recipe_paths


def recipe(saves: CheckpointConfig) -> Recipe:
    model = Model(layers=1, width=8, heads=1, mlp_width=8, vocabulary=8)
    return Recipe(
        name="x",
        steps=1,
        model=model,
        data=DataConfig(shards="s"),
        batch=BatchConfig(sequences=1, length=1),
        checkpoint=saves,
    )


@pytest.mark.parametrize(
    ("given", "expected"), [("kept", "{folder}/kept"), ("/shared", "/shared"), ("s3://b/p", "s3://b/p"), ("", "")]
)
def test_where_checkpoints_go(given: str, expected: str, tmp_path: Path) -> None:
    saves = resolve_recipe_paths(recipe(CheckpointConfig(store=given)), tmp_path).checkpoint
    assert saves.store == expected.format(folder=tmp_path)


def test_a_folder_on_the_hosts_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for given, expected in (("near", tmp_path / "near"), ("~/near", tmp_path / "home" / "near")):
        assert resolve_recipe_paths(recipe(CheckpointConfig(near=given)), tmp_path).checkpoint.near == str(expected)
