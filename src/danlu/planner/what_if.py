"""Variations of a request: another machine, longer sequences, the least memory."""

from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from danlu.planner.infeasible import explain_infeasible
from danlu.planner.pricing import PlanPricer
from danlu.planner.request import PlanRequest, PlanRequestError
from danlu.planner.search import PricedPlan, SearchFunction, price_best_placement
from danlu.planner.search_space import Candidate, SearchSpace
from danlu.spec.cluster import Cluster
from danlu.spec.description import SpecModel
from danlu.spec.problem import expected_from, suggest_name
from danlu.spec.quantity import IN_FILE
from danlu.spec.recipe import BatchConfig
from danlu.spec.text import one_line

_AS_FILE = {IN_FILE: True}


def apply_what_if(request: PlanRequest, change: str) -> PlanRequest:
    """The request with a changed machine or batch: `fabric.bandwidth=2x`, `chip.memory=141 GB`, `batch.length=2x`.

    The first name is a network level, `chip` or `batch`; a value is a factor with an `x`, or as in a file.
    """
    setting, _, value = change.partition("=")
    where, _, name = setting.strip().partition(".")
    if not value or not name:
        raise PlanRequestError(f'--what-if: "{change}" must read like fabric.bandwidth=2x or chip.memory=141 GB')
    cluster = request.cluster
    levels = [level.name for level in cluster.levels]
    if where == "batch":
        try:
            batch = BatchConfig.model_validate(_with_field(request.recipe.batch, name, value.strip(), change))
        except ValidationError as error:
            raise _invalid(change, expected_from(error)) from None
        return replace(request, recipe=request.recipe.model_copy(update={"batch": batch}))
    values = cluster.model_dump(mode="python")
    if where == "chip":
        values["chip"] = _with_field(cluster.chip, name, value.strip(), change)
    elif where in levels:
        index = levels.index(where)
        values["levels"] = [
            _with_field(level, name, value.strip(), change) if position == index else level
            for position, level in enumerate(cluster.levels)
        ]
    else:
        raise PlanRequestError(
            f'--what-if: "{where}" cannot be changed: {suggest_name(where, ["chip", "batch", *levels])}'
        )
    try:
        machine = Cluster.model_validate(values)
    except ValidationError as error:
        raise _invalid(change, expected_from(error)) from None
    return replace(request, cluster=machine, chips=min(request.chips, machine.chips))


def _invalid(change: str, expected: str) -> PlanRequestError:
    return PlanRequestError(f"--what-if: {one_line(change)}: must be {expected}, or a factor such as 2x")


def _with_field(now_all: SpecModel, name: str, value: str, change: str) -> dict[str, Any]:
    """The fields of a description with one changed, as in a file: a quantity needs its unit."""
    values = now_all.model_dump(mode="python")
    if name not in values:
        raise PlanRequestError(f'--what-if: "{change}": no setting {name}: {suggest_name(name, list(values))}')
    now = values[name]
    if value.endswith("x"):
        return values | {name: _scaled(now, value, change)}
    read = int(value) if value.isdecimal() and len(value) < 30 else value
    try:
        type(now_all).model_validate(now_all.model_dump(mode="json", context=_AS_FILE) | {name: read}, context=_AS_FILE)
    except ValidationError as error:
        raise _invalid(change, expected_from(error)) from None
    return values | {name: read}


def _scaled(now: Any, value: str, change: str) -> Any:
    try:
        factor = float(value[:-1])
        if not 0 < factor < 1e9:
            raise ValueError
        if isinstance(now, dict):
            return {key: one * factor for key, one in now.items()}
        return round(now * factor) if isinstance(now, int) else now * factor
    except (ValueError, TypeError):  # not a number, or a setting that cannot be scaled
        raise PlanRequestError(
            f'--what-if: "{one_line(change)}": {one_line(value)} is not a factor such as 2x'
        ) from None


def least_memory_layout(request: PlanRequest) -> PricedPlan:
    """The layout with the least memory, however slow; raises `PlanRequestError` if there is none."""
    space, pricer = SearchSpace(request), PlanPricer(request)
    best: tuple[float, Candidate] | None = None
    for shape in space.shapes():
        if shape.microbatches not in (space.microbatches(shape)[0], space.microbatches(shape)[-1]):
            continue  # one microbatch holds no gradients yet; of several, the smallest take the least memory
        for schedule in space.schedules_of(shape):
            if data_splits := space.data_splits(shape, schedule):
                most = max(data.shard for data in data_splits)
                some = [Candidate(shape, schedule, data) for data in data_splits if data.shard == most]
                least_here = min((pricer.memory(candidate).device_bytes, candidate) for candidate in some)
                best = min(best or least_here, least_here)
    if best is None:
        raise PlanRequestError(explain_infeasible(request))
    return price_best_placement(request, best[1])


def sweep_sequence_length(request: PlanRequest, search: SearchFunction) -> list[tuple[int, PricedPlan | None]]:
    """Double the sequence length at constant tokens per batch until no layout fits: lengths with their best layouts."""
    found: list[tuple[int, PricedPlan | None]] = []
    batch = request.recipe.batch
    length, sequences = batch.length, batch.sequences
    while sequences >= 1:
        other = batch.model_copy(update={"length": length, "sequences": sequences})
        result = search(replace(request, recipe=request.recipe.model_copy(update={"batch": other})), 1)
        found.append((length, result.best[0] if result.best else None))
        if not result.best or sequences % 2:
            break
        length, sequences = length * 2, sequences // 2
    return found
