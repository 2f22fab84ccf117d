"""What may be resumed or started from, before any process is."""

import os
from pathlib import Path

import pytest
from made_runs import append, step
from made_saved_runs import LLAMA, saved_run

from danlu.cli.resume import _ranks_per_node_before
from danlu.runs.prepare import check_weights, prepare_resume
from danlu.scheduler.rank_map import RankMap, write_ranks
from danlu.spec import EndEvent, RunFolder, SpecError, load_recipe, toml
from danlu.spec.load import read_recipe


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """Twenty steps are asked for, and those of step 10 are saved."""
    made = saved_run(tmp_path, steps=(10,))
    made.plan.write_text("")
    append(made, [step(number) for number in range(1, 21)])
    return made


def resume(run: RunFolder) -> None:
    prepare_resume(str(run.path), None, None, None)[1].release()


def ended(outcome: str) -> EndEvent:
    return EndEvent.model_validate({"time": 2000.0, "step": 20, "outcome": outcome})


def test_steps_that_were_done_and_not_saved_are_done_again(run: RunFolder) -> None:
    resume(run)  # it died in the last save
    append(run, [ended("failed")])  # or the save failed
    resume(run)
    append(run, [ended("finished")])
    with pytest.raises(SpecError, match="all of them are done"):
        resume(run)


def test_a_run_that_died_after_its_last_save_has_nothing_left_to_do(tmp_path: Path) -> None:
    run = saved_run(tmp_path, steps=(10, 20))
    run.plan.write_text("")
    append(run, [step(number) for number in range(1, 21)])
    with pytest.raises(SpecError, match="all of them are done"):
        resume(run)


def weights_problem(run: RunFolder, tmp_path: Path, **changes: object) -> str:
    recipe = load_recipe(run.recipe)
    other = recipe.model_copy(update={"weights": str(run.path), "model": LLAMA.model_copy(update=changes)})
    path = tmp_path / "tune.toml"
    path.write_text(toml.dumps(other))
    try:
        check_weights(read_recipe(path))
    except SpecError as error:
        return str(error)
    return ""


def test_weights_of_a_run_are_those_of_the_same_model(run: RunFolder, tmp_path: Path) -> None:
    assert weights_problem(run, tmp_path) == ""
    assert weights_problem(run, tmp_path, sequence=48) == "", "a shorter sequence is the same model"
    assert "rope_theta" in weights_problem(run, tmp_path, rope_theta=77.0), "the shapes agree"


def test_weights_of_a_run_are_found_where_it_saves(run: RunFolder, tmp_path: Path) -> None:
    elsewhere = tmp_path / "store"
    elsewhere.mkdir()
    os.rename(run.checkpoints, elsewhere / run.name)  # noqa: PTH104
    recipe = load_recipe(run.recipe)
    saves = recipe.checkpoint.model_copy(update={"store": str(elsewhere)})
    run.recipe.write_text(toml.dumps(recipe.model_copy(update={"checkpoint": saves})))
    assert weights_problem(run, tmp_path) == ""


def test_a_run_has_as_many_ranks_on_a_node_as_before(run: RunFolder) -> None:
    assert _ranks_per_node_before(run) is None
    nodes = RankMap(job=3, restart=0, nodes=("a", "b"), tasks_per_node=8, store="a:1", remark="")
    write_ranks(run.path, nodes)
    assert _ranks_per_node_before(run) == 8
