"""Variations of a request: another machine, longer sequences, the least memory."""

from dataclasses import replace
from typing import Any, TypeVar

from pydantic import ValidationError

from danlu.planner.infeasible import explain_infeasible
from danlu.planner.pricing import PlanPricer, PricedPlan
from danlu.planner.request import PlanRequest, PlanRequestError
from danlu.planner.search import SearchFunction
from danlu.planner.search_space import SearchSpace
from danlu.spec.cluster import Cluster
from danlu.spec.description import SpecModel
from danlu.spec.problem import expected_from, suggest_name
from danlu.spec.quantity import IN_FILE
from danlu.spec.recipe import BatchConfig
from danlu.spec.text import one_line

_AS_FILE = {IN_FILE: True}
S = TypeVar("S", bound=SpecModel)


def apply_what_if(request: PlanRequest, change: str) -> PlanRequest:
    """The request with a changed machine or batch: `fabric.bandwidth=2x`, `chip.memory=141 GB`, `batch.length=2x`.

    The first name is a network level, `chip` or `batch`; a value is a factor with an `x`, or as in a file.
    """
    setting, _, value = change.partition("=")
    where, _, name = setting.strip().partition(".")
    value = value.strip()
    if not value or not name:
        raise PlanRequestError(f'--what-if: "{change}" must read like fabric.bandwidth=2x or chip.memory=141 GB')
    cluster = request.cluster
    levels = [level.name for level in cluster.levels]
    if where == "batch":
        batch = _validated(BatchConfig, _with_field(request.recipe.batch, name, value, change), change)
        return replace(request, recipe=request.recipe.model_copy(update={"batch": batch}))
    values = cluster.model_dump(mode="python")
    _check_has_effect(request, where, name, change)
    if where == "chip":
        values["chip"] = _with_field(cluster.chip, name, value, change)
    elif where in levels:
        values["levels"] = [
            _with_field(level, name, value, change) if level.name == where else level for level in cluster.levels
        ]
    else:
        raise PlanRequestError(
            f'--what-if: "{where}" cannot be changed: {suggest_name(where, ["chip", "batch", *levels])}'
        )
    machine = _validated(Cluster, values, change)
    return replace(request, cluster=machine, chips=min(request.chips, machine.chips))


def _check_has_effect(request: PlanRequest, where: str, name: str, change: str) -> None:
    """On a probed machine the measured times count, not what they would follow from."""
    cluster = request.cluster
    level = next((level for level in cluster.levels if level.name == where), None)
    measured = ""
    if level and level.collectives and name in ("bandwidth", "latency", "oversubscription"):
        measured = f"the collectives of level {where} were measured: remove its [[levels.collectives]]"
    if where == "chip" and request.dtype in cluster.chip.operators and name in ("peak", "memory_bandwidth"):
        measured = f"its operators were measured in {request.dtype}: remove [chip.operators.{request.dtype}]"
    if measured:
        raise PlanRequestError(f"--what-if: {one_line(change)} has no effect: {measured} from the cluster file first")


def _validated(kind: type[S], values: dict[str, Any], change: str, context: dict[str, bool] | None = None) -> S:
    """A description of these values, or an error about the change that made them invalid."""
    try:
        return kind.model_validate(values, context=context)
    except ValidationError as error:
        expected = f"must be {expected_from(error)}, or a factor such as 2x"
        raise PlanRequestError(f"--what-if: {one_line(change)}: {expected}") from None


def _with_field(now_all: SpecModel, name: str, value: str, change: str) -> dict[str, Any]:
    """The fields of a description with one changed, as in a file: a quantity needs its unit."""
    values = now_all.model_dump(mode="python")
    if name not in values:
        raise PlanRequestError(f'--what-if: "{change}": no setting {name}: {suggest_name(name, list(values))}')
    now = values[name]
    if value.endswith("x"):
        return values | {name: _scaled(now, value, change)}
    read = int(value) if value.isdecimal() and len(value) < 30 else value
    _validated(type(now_all), now_all.model_dump(mode="json", context=_AS_FILE) | {name: read}, change, _AS_FILE)
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
    pricer = PlanPricer(request)
    some = SearchSpace(request).least_memory_candidates()
    best = min(((pricer.memory(candidate).device_bytes, candidate) for candidate in some), default=None)
    priced = pricer.price_best_placement(best[1]) if best else None
    if priced is None:
        raise PlanRequestError(explain_infeasible(request))
    return priced


def sweep_sequence_length(request: PlanRequest, search: SearchFunction) -> list[tuple[int, PricedPlan | None]]:
    """Double the sequence length at constant tokens per batch until no layout fits: each with its fastest layout.

    Learned positions end it, too.
    """
    found: list[tuple[int, PricedPlan | None]] = []
    batch, model = request.recipe.batch, request.model
    length, sequences = batch.length, batch.sequences
    while sequences >= 1 and not (found and model.position == "learned" and length > model.sequence):
        other = batch.model_copy(update={"length": length, "sequences": sequences})
        result = search(replace(request, recipe=request.recipe.model_copy(update={"batch": other})), 1, tie_width=0.0)
        found.append((length, result.best[0] if result.best else None))
        if not result.best or sequences % 2:
            break
        length, sequences = length * 2, sequences // 2
    return found
