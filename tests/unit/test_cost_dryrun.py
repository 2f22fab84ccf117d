"""The formulas for this program's own memory, held against its dry run."""

import pytest

from danlu.cost import predict
from danlu.framework.dryrun import dry_run
from danlu.spec.load import load_cluster, load_model
from danlu.spec.plan import Degrees, Plan
from danlu.spec.recipe import Batch, Data, Precision, Recipe

MODEL = load_model("llama3-8b").model_copy(update={"layers": 4})
POD = load_cluster("h100-pod")


@pytest.mark.parametrize(
    ("plan", "sequences"),
    [
        (Plan(degrees=Degrees(shard=8)), 8),
        (Plan(degrees=Degrees(shard=8), recompute="full"), 16),
        (Plan(degrees=Degrees(shard=8), recompute="selective"), 8),
        (Plan(degrees=Degrees(shard=4, tp=8)), 8),
        (Plan(degrees=Degrees(replicate=2, shard=4, cp=2)), 8),
    ],
    ids=["sharded", "recomputed", "selective", "tensor", "hybrid-context"],
)
def test_memory_is_within_a_tenth_of_the_dry_run(plan: Plan, sequences: int) -> None:
    recipe = Recipe(
        name="dry",
        steps=1,
        model=MODEL,
        data=Data(shards="none"),
        batch=Batch(sequences=sequences, length=4096),
        precision=Precision(compute="bf16"),
    )
    found = predict(MODEL, plan, recipe.batch, POD).memory
    assert found.allocated == pytest.approx(dry_run(recipe, plan, POD, 0).peak.total, rel=0.1)
