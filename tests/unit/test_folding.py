"""Layers that are counted instead of run: the same step to the byte as running them all."""

from collections import Counter
from typing import Any

import pytest

from danlu.dryrun.dry_run import dry_run_rank
from danlu.dryrun.layer_extrapolation import LayerMismatchError, extrapolate_step, find_extrapolation
from danlu.dryrun.step_record import StepRecord
from danlu.spec.load import load_model
from danlu.spec.plan import Degrees, PipelineConfig, Plan
from danlu.spec.recipe import (
    BatchConfig,
    DataConfig,
    LayerPrecision,
    OptimizerConfig,
    OptimizerGroup,
    PrecisionConfig,
    Recipe,
)
from danlu.spec.trace import Trace


def recipe(model: str, layers: int, dense: int = 0, **settings: Any) -> Recipe:
    shape = load_model(model).model_copy(update={"layers": layers})
    if shape.moe is not None:
        shape = shape.model_copy(update={"moe": shape.moe.model_copy(update={"dense_layers": dense})})
    return Recipe(
        name=model,
        steps=1,
        model=shape,
        data=DataConfig(shards="none"),
        batch=BatchConfig(sequences=16, length=32),
        **settings,
    )


def plan(schedule: Any = "1f1b", per_rank: int = 1, **settings: Any) -> Plan:
    degrees = Degrees(**{axis: settings.pop(axis) for axis in list(settings) if axis in Degrees.model_fields})
    return Plan(degrees=degrees, pipeline=PipelineConfig(schedule=schedule, stages_per_rank=per_rank), **settings)


BF16 = PrecisionConfig(compute="bf16")
MUON = OptimizerConfig(kind="muon")
BY_LAYER = OptimizerConfig(groups=(OptimizerGroup(match="blocks.[5-7].*", weight_decay=0.0),))
FIRST_IN_BF16 = LayerPrecision(match="blocks.1", compute="bf16")
CASES = {
    "fsdp": (recipe("tiny-llama", 8), plan(shard=4, microbatches=2), 0, 4),
    "fsdp × tp, recompute full": (recipe("tiny-llama", 9, precision=BF16), plan(shard=2, tp=2, recompute="full"), 1, 5),
    "hsdp, recompute selective": (recipe("tiny-gpt", 9), plan(replicate=2, shard=2, recompute="selective"), 3, 5),
    "cp": (recipe("tiny-llama", 8), plan(cp=2), 1, 4),
    "1f1b": (recipe("tiny-llama", 16, precision=BF16), plan(pp=2, shard=2, microbatches=2, recompute="full"), 3, 4),
    "interleaved, uneven": (recipe("tiny-llama", 29), plan("interleaved", 2, pp=2, microbatches=2), 1, 7),
    "zero-bubble, uneven": (recipe("tiny-llama", 29), plan("zero-bubble", 2, pp=2, microbatches=2), 1, 7),
    "experts": (recipe("tiny-moe", 10, dense=1), plan(shard=2, ep=2, recompute="full"), 0, 5),
    "experts × tp, selective": (recipe("tiny-moe", 9), plan(shard=2, tp=2, ep=4, recompute="selective"), 2, 5),
    "muon, hsdp × tp": (recipe("tiny-llama", 9, optimizer=MUON), plan(replicate=2, shard=2, tp=2), 1, 5),
    "muon, experts × 1f1b": (
        recipe("tiny-moe", 20, dense=1, optimizer=MUON),
        plan(pp=2, shard=2, ep=2, microbatches=2),
        0,
        5,
    ),
    "groups by layer": (recipe("tiny-llama", 9, optimizer=BY_LAYER), plan(shard=2), 1, 5),
    "experts × 1f1b": (recipe("tiny-moe", 20, dense=1), plan(pp=2, shard=2, ep=2, microbatches=2), 0, 5),
}
QUICK = {"1f1b", "experts × tp, selective"}


def operators(trace: Trace) -> Counter[Any]:
    """Calls of every operator; of a long list of tensors the order does not matter."""
    alike = (each.model_copy(update={"inputs": tuple(sorted(each.inputs)), "count": 1}) for each in trace.operators)
    return Counter(dict(zip(alike, (each.count for each in trace.operators), strict=True)))


def collectives(trace: Trace) -> Counter[Any]:
    return Counter({each.model_copy(update={"count": 1}): each.count for each in trace.collectives})


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in CASES]
)
def test_a_folded_step_is_the_whole_step(case: str) -> None:
    made, its_plan, rank, layers = CASES[case]
    folded, whole = (dry_run_rank(made, its_plan, None, rank, all_layers=each) for each in (False, True))
    assert (folded.folded, whole.folded) == (layers, 0)
    assert collectives(folded) == collectives(whole)
    assert operators(folded) == operators(whole)
    assert folded.flops == pytest.approx(whole.flops, rel=1e-12)
    assert folded.peak == whole.peak
    assert folded.memory == whole.memory


@pytest.mark.parametrize(
    ("made", "its_plan"),
    [
        (recipe("tiny-llama", 7), plan(shard=2)),
        (recipe("tiny-llama", 28), plan("interleaved", 7, pp=2, microbatches=4)),
        (
            recipe(
                "tiny-llama", 16, precision=PrecisionConfig(layers=(LayerPrecision(match="blocks.1", compute="bf16"),))
            ),
            plan(),
        ),
    ],
    ids=["few layers", "few on every stage", "layers chosen by number"],
)
def test_what_saves_nothing_or_goes_by_numbers_is_run(made: Recipe, its_plan: Plan) -> None:
    assert find_extrapolation(made, its_plan, pp_rank=0) is None


def test_layers_that_differ_are_not_taken_for_alike() -> None:
    from danlu.dryrun import dry_run

    made, its_plan = recipe("tiny-llama", 12), plan()
    found = find_extrapolation(made, its_plan, pp_rank=0)
    assert found is not None
    records: list[StepRecord] = []
    with dry_run._fake_mesh(made, its_plan, None, 0) as mesh:
        for shortened, _ in (found.short, found.long):
            records.append(dry_run._record_step(shortened, mesh, None))
        wider = found.long[0].model_copy(update={"batch": BatchConfig(sequences=32, length=32)})
        other = dry_run._record_step(wider, mesh, None)
    extrapolate_step(*records, found)
    with pytest.raises(LayerMismatchError):
        extrapolate_step(records[0], other, found)
