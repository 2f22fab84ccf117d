"""The schedule that is written out is the one that is run."""

from typing import Any

import pytest

from danlu.cost.pipeline_schedules import pipeline_actions
from danlu.dryrun import dry_run
from danlu.dryrun.module_tracker import ModuleTracker
from danlu.dryrun.schedule_actions import schedule_actions
from danlu.framework.build import ForwardBackward
from danlu.parallel.pipeline import PipelineRunner as LivePipeline
from danlu.spec.load import load_model
from danlu.spec.plan import Degrees, PipelineConfig, Plan
from danlu.spec.recipe import BatchConfig, DataConfig, Recipe


def stage_calls(plan: Plan, place: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the stages of a rank are asked to do in a dry run, in order."""
    calls: list[str] = []
    follow = dry_run._track_passes

    def watched(forward_backward: ForwardBackward, where: ModuleTracker) -> None:
        assert isinstance(forward_backward, LivePipeline)
        for stage in forward_backward.stages:
            _watch(stage, calls)
        follow(forward_backward, where)

    monkeypatch.setattr(dry_run, "_track_passes", watched)
    model = load_model("tiny-llama").model_copy(update={"layers": plan.num_stages})
    recipe = Recipe(
        name="x",
        steps=1,
        model=model,
        data=DataConfig(shards="none"),
        batch=BatchConfig(sequences=plan.microbatches, length=8),
    )
    dry_run.dry_run_rank(recipe, plan, None, place)
    return calls


def _watch(stage: Any, calls: list[str]) -> None:
    forward, backward, weights = stage.forward_one_chunk, stage.backward_one_chunk, stage.backward_weight_one_chunk

    def forward_one_chunk(chunk: int, *args: Any, **kwargs: Any) -> Any:
        calls.append(f"F{stage.stage_index}.{chunk}")
        return forward(chunk, *args, **kwargs)

    def backward_one_chunk(chunk: int, *args: Any, full_backward: bool = True, **kwargs: Any) -> Any:
        calls.append(f"{'B' if full_backward else 'I'}{stage.stage_index}.{chunk}")
        return backward(chunk, *args, full_backward=full_backward, **kwargs)

    def backward_weight_one_chunk(chunk: int, *args: Any, **kwargs: Any) -> Any:
        calls.append(f"W{stage.stage_index}.{chunk}")
        return weights(chunk, *args, **kwargs)

    stage.forward_one_chunk = forward_one_chunk
    stage.backward_one_chunk = backward_one_chunk
    stage.backward_weight_one_chunk = backward_weight_one_chunk


@pytest.mark.parametrize(
    ("schedule", "per_rank"),
    [
        pytest.param("gpipe", 1, marks=pytest.mark.full),
        ("1f1b", 1),
        pytest.param("interleaved", 2, marks=pytest.mark.full),
        ("zero-bubble", 2),
        ("zbv", 2),
    ],
)
def test_actions_are_those_that_stages_take(schedule: Any, per_rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(
        degrees=Degrees(pp=3),
        microbatches=6,
        pipeline=PipelineConfig(schedule=schedule, stages_per_rank=per_rank),
    )
    actions = schedule_actions(plan)
    assert len(actions) == 3
    for place, expected in enumerate(actions):
        with monkeypatch.context() as patched:
            assert stage_calls(plan, place, patched) == list(expected)


def test_without_a_pipeline_there_is_no_schedule() -> None:
    assert schedule_actions(Plan()) == ()


@pytest.mark.parametrize("schedule", ["interleaved", "zero-bubble", "zbv"])
def test_formulas_give_the_order_of_looped_schedules(schedule: Any) -> None:
    for places in (2, 3, 4, 8):
        for per_rank in (2,) if schedule == "zbv" else (2, 3, 4):
            for microbatches in (1, places, 2 * places, 5 * places):
                pipeline = PipelineConfig(schedule=schedule, stages_per_rank=per_rank)
                plan = Plan(degrees=Degrees(pp=places), microbatches=microbatches, pipeline=pipeline)
                found = pipeline_actions(schedule, pp_ranks=places, microbatches=microbatches, stages_per_rank=per_rank)
                assert found == schedule_actions(plan), (places, per_rank, microbatches)
