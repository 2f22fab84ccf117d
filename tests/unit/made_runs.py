"""Events of runs that never were, and the folder of one, for the tests of what people see of them."""

import json
from collections.abc import Iterable
from pathlib import Path

from danlu.spec import Degrees, Event, Model, Moe, Plan, Recipe, RunFolder, StartEvent, StepEvent, toml
from danlu.spec.recipe import BatchConfig, DataConfig


def started(time: float = 1000.0, step: int = 0, steps: int = 5, **changes: object) -> StartEvent:
    values: dict[str, object] = {
        "time": time,
        "world": 8,
        "chip": "test chip",
        "parameters": 1_500_000,
        "step": step,
        "steps": steps,
        "tokens_per_step": 1000,
        "flops_per_token": 9e6,
        "peak": 9e10,
        "peak_source": "data sheet",
        "baseline_loss": 4.5,
    }
    return StartEvent.model_validate(values | changes)


def step(number: int, *, loss: float | None = None, seconds: float = 0.5, **changes: object) -> StepEvent:
    values: dict[str, object] = {
        "time": 1000.0 + number * seconds,
        "step": number,
        "loss": 2 + 4 / number if loss is None else loss,
        "norm": 1.0,
        "learning_rate": 3e-4,
        "tokens": 1000,
        "seconds": seconds,
        "memory": 3_000_000_000,
    }
    return StepEvent.model_validate(values | changes)


def line(event: Event) -> str:
    return json.dumps(event.model_dump()) + "\n"


def append(run: RunFolder, events: Iterable[Event]) -> None:
    run.path.mkdir(parents=True, exist_ok=True)
    with run.events.open("a") as file:
        file.writelines(line(event) for event in events)


def make_run(path: Path) -> RunFolder:
    """A run folder with recipe and plan, and nothing that happened yet."""
    folder = RunFolder(path)
    folder.path.mkdir(parents=True)
    moe = Moe(experts=8, top_k=2, width=32)
    model = Model(name="<tiny> & co", vocabulary=256, layers=6, width=64, heads=4, moe=moe)
    recipe = Recipe(
        name="first", steps=5, model=model, data=DataConfig(shards="s"), batch=BatchConfig(sequences=10, length=100)
    )
    folder.recipe.write_text(toml.dumps(recipe))
    plan = Plan(degrees=Degrees(pp=2, shard=2, tp=2), microbatches=4)
    folder.plan.write_text(toml.dumps(plan))
    return folder
