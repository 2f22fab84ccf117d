"""Small questions for the planner, whose every layout can be priced."""

from dataclasses import replace

from danlu.planner import PlanRequest, parse_constraints
from danlu.spec.cluster import Cluster
from danlu.spec.load import load_cluster
from danlu.spec.model import Model, Moe
from danlu.spec.recipe import BatchConfig, DataConfig, PrecisionConfig, Recipe

DENSE = Model(vocabulary=32000, layers=8, width=2048, heads=16, kv_heads=8, mlp_width=8192, sequence=4096)
EXPERTS = DENSE.model_copy(update={"moe": Moe(experts=8, top_k=2, width=4096), "kv_heads": 4})


def machine(nodes: int = 4, per_node: int = 4, memory: float = 80e9, slow: float = 50e9) -> Cluster:
    """Nodes behind one level, of an accelerator that is calibrated."""
    values = load_cluster("dgx-a100").model_dump()
    values |= {"name": "small"}
    values["chip"]["memory"] = round(memory)
    values["levels"] = [
        {"name": "node", "fanout": per_node, "bandwidth": 300e9, "latency": 3e-6},
        {"name": "rack", "fanout": nodes, "bandwidth": slow, "latency": 6e-6, "oversubscription": 2.0},
    ]
    return Cluster.model_validate(values)


def recipe(model: Model, sequences: int = 16, length: int = 2048) -> Recipe:
    """A recipe that only says what the planner reads."""
    return Recipe(
        name="small",
        steps=100,
        model=model,
        data=DataConfig(shards="none"),
        batch=BatchConfig(sequences=sequences, length=length),
        precision=PrecisionConfig(compute="bf16"),
    )


def question(
    model: Model = DENSE,
    cluster: Cluster | None = None,
    chips: int | None = None,
    fix: str = "",
    without: str = "",
    **more: float,
) -> PlanRequest:
    """Ask for the best layout of a small model."""
    place = cluster or machine()
    sequences, length = int(more.pop("sequences", 16)), int(more.pop("length", 2048))
    return PlanRequest(
        recipe=recipe(model, sequences, length),
        cluster=place,
        chips=chips or place.chips,
        constraints=parse_constraints(fix, without),
        **more,
    )


def with_recipe(asked: PlanRequest, **changes: object) -> PlanRequest:
    """The same question about another recipe."""
    return replace(asked, recipe=asked.recipe.model_copy(update=changes))
