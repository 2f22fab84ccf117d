"""Layouts are enumerated as `danlu check` accepts them: against a product of all knobs, checked one by one."""

from collections.abc import Iterator
from itertools import product
from math import prod
from typing import Any

import pytest
from made_questions import recipe

from danlu.planner import PlanRequest, parse_constraints
from danlu.planner.search_space import SearchSpace
from danlu.spec.check import find_problems, parsed_without_file
from danlu.spec.load import load_cluster
from danlu.spec.model import Model, Moe
from danlu.spec.plan import Degrees, PipelineConfig, Plan, split_layers_evenly

SMALL = Model(vocabulary=240, layers=8, width=64, heads=8, kv_heads=4, mlp_width=96, sequence=96)
SIXES = Model(vocabulary=240, layers=6, width=96, heads=12, kv_heads=6, mlp_width=96, sequence=96)
EXPERTS = SMALL.model_copy(update={"layers": 3, "moe": Moe(experts=4, top_k=2, width=32)})
TIED = SMALL.model_copy(update={"tied": True})
QUESTIONS = {
    "dense, 4 chips": (SMALL, 4, 4, ""),
    "experts, 4 chips": (EXPERTS, 4, 4, "recompute=full"),
    "sixes, 6 chips": (SIXES, 6, 6, "recompute=selective"),
    "deep, 4 chips": (SMALL.model_copy(update={"layers": 12}), 4, 4, "recompute=full"),
    "tied, 4 chips": (TIED, 4, 4, "recompute=none"),
    "compiled, 4 chips": (SMALL, 4, 4, "compile=true,recompute=none"),
    "no recompute, 8 chips, one microbatch a sequence": (SMALL, 8, 8, "recompute=none,microbatch=1"),
}
QUICK = ("experts, 4 chips", "tied, 4 chips")
CASES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in QUESTIONS]
RECOMPUTES = ("none", "selective", "full")
SCHEDULES = ("1f1b", "interleaved", "zero-bubble", "zbv")
VIRTUAL = (1, 2, 3, 4, 6, 8)
DISPATCHES = (("alltoall", 1), ("alltoall", 2), ("alltoall", 4), ("deduplicated", 1))
"""The values that `docs/how-to/plan.md` promises to search."""

Key = tuple[Any, ...]


def key(plan: Plan) -> Key:
    pipeline = plan.pipeline if plan.degrees.pp > 1 else PipelineConfig()
    return (
        tuple(plan.degrees.model_dump().items()),
        plan.microbatches,
        pipeline.schedule,
        pipeline.stages_per_rank,
        tuple(pipeline.layers),
        plan.recompute,
        plan.resolved_reshard_after_forward,
        plan.compile,
        plan.token_dispatcher,
        plan.dispatch_chunks,
        plan.context_parallel,
        plan.regather_inputs,
    )


def pipelines(layers: int, pp: int) -> Iterator[PipelineConfig]:
    """All pipelines of so many ranks, sensible or not: layers even, or fewer on the last stage or on both ends."""
    if pp == 1:
        yield PipelineConfig()
        return
    for schedule, virtual in product(SCHEDULES, VIRTUAL):
        stages = pp * virtual
        cuts = {()}
        for first, last in ((0, 1), (1, 1), (0, 2), (1, 2)):
            counts = list(split_layers_evenly(layers + first + last, stages))
            counts[0], counts[-1] = counts[0] - first, counts[-1] - last
            if tuple(counts) != split_layers_evenly(layers, stages) and min(counts) > 0:
                cuts.add(tuple(counts))
        for cut in cuts:
            yield PipelineConfig(schedule=schedule, stages_per_rank=virtual, layers=cut)  # type: ignore[arg-type]


def accepted(question: PlanRequest) -> set[Key]:
    """Every plan of the product of all knobs in which `danlu check` finds no fault."""
    allow, sequences, world = question.constraints.allows, question.recipe.batch.sequences, question.chips
    experts = question.model.moe.experts if question.model.moe else 1
    numbers = range(1, world + 1)
    found = set()
    for pp, replicate, shard, cp, tp in product(numbers, repeat=5):
        if prod((pp, replicate, shard, cp, tp)) != world:
            continue
        for ep, pieces, pipeline in product(
            range(1, max(experts, world) + 1), range(1, sequences + 1), pipelines(question.model.layers, pp)
        ):
            if not allow("microbatch", sequences // (replicate * shard * pieces)):
                continue
            degrees = Degrees(pp=pp, replicate=replicate, shard=shard, cp=cp, tp=tp, ep=ep)
            kinds = ("ulysses", "ring") if cp > 1 else ("ulysses",)
            ways = DISPATCHES if ep > 1 else (("alltoall", 1),)
            switches = (True, False), (True, False)
            for recompute, reshards, regather, kind, way in product(RECOMPUTES, *switches, kinds, ways):
                if allow("recompute", recompute):
                    plan = Plan(
                        degrees=degrees,
                        microbatches=pieces,
                        pipeline=pipeline,
                        recompute=recompute,  # type: ignore[arg-type]
                        reshard_after_forward=reshards,
                        regather_inputs=regather,
                        context_parallel=kind,  # type: ignore[arg-type]
                        token_dispatcher=way[0],  # type: ignore[arg-type]
                        dispatch_chunks=way[1],
                        compile=question.constraints.allows_compile(True),
                    )
                    if not find_problems(question.parsed_recipe, parsed_without_file(plan)):
                        found.add(key(plan))
    return found


@pytest.mark.parametrize("name", CASES)
def test_the_space_is_what_check_accepts(name: str) -> None:
    asked = _question(name)
    space = SearchSpace(asked)
    listed = [key(candidate.plan()) for candidate in space.candidates()]
    assert len(listed) == len(set(listed)), "no layout twice"
    assert sum(space.count(shape) for shape in space.shapes()) == len(listed)
    wanted = accepted(asked)
    assert len(wanted) >= 40
    assert set(listed) - wanted == set()
    assert wanted - set(listed) == set()


def test_degrees_and_schedules_of_every_kind_are_among_them() -> None:
    """The questions are worth asking: each kind of layout is accepted in one of them."""
    plans = {key(candidate.plan()) for candidate in SearchSpace(_question("dense, 4 chips")).candidates()}
    assert {layout[2] for layout in plans} == set(SCHEDULES)
    assert {dict(layout[0])["tp"] for layout in plans} == {1, 2, 4}
    assert {dict(layout[0])["tp"] for layout in plans if layout[-1]} == {2, 4}, "inputs gathered again"
    assert {dict(layout[0])["cp"] for layout in plans if layout[-2] == "ring"} == {2, 4}


def _question(name: str) -> PlanRequest:
    model, chips, sequences, fixed = QUESTIONS[name]
    cluster = load_cluster("h100-pod")
    return PlanRequest(
        recipe=recipe(model, sequences, length=96), cluster=cluster, chips=chips, constraints=parse_constraints(fixed)
    )
