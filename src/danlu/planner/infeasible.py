"""Why a request has no layout, in the words of the rules of `danlu check`; and how many chips would be enough."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, product
from math import ceil, prod

from danlu.planner.knob_conflicts import knob_conflicts, problem_text
from danlu.planner.pricing import PlanPricer
from danlu.planner.request import PlanRequest
from danlu.planner.search_space import ScheduleKnobs, SearchSpace
from danlu.spec.plan import DENSE_AXES
from danlu.spec.problem import Problem

_AXES = (*DENSE_AXES, "ep")
_MULTIPLES = (2, 4, 8, 16, 32, 64)
"""Multiples of the requested chips that are tried."""


def explain_infeasible(request: PlanRequest) -> str:
    """Which rule leaves a request without a layout, and what would change that."""
    found = next(_problems(request), "") or "; ".join(knob_conflicts(request)[:2])
    if found:
        return found
    sequences = request.recipe.batch.sequences
    near = [f"{chips:,}" for chips in nearest_feasible_chips(request)]
    remedy = f"--chips {' or '.join(near)} has layouts" if near else "loosen --fix and --exclude, or change --chips"
    return (
        f"no valid degrees give {request.chips:,} ranks with a data-parallel size that divides the batch of "
        f"{sequences:,} sequences: {remedy}"
    )


def _problems(request: PlanRequest) -> Iterator[str]:
    """Problems of the fixed degrees: of each by itself, then of all of them together."""
    space, held = SearchSpace(request), _held(request)
    for axis, values in held.items():
        wrong = [words for value in values if (words := _degree_problem(request, space, axis, value))]
        if len(wrong) == len(values):
            yield "; ".join(wrong)
    combinations = [dict(zip(held, values, strict=True)) for values in product(*held.values())]
    wrong = [words for degrees in combinations if (words := _combination_problem(request, space, degrees))]
    if held and len(wrong) == len(combinations):
        yield "; ".join(wrong[:3])


def _held(request: PlanRequest) -> dict[str, list[int]]:
    fixed = request.constraints.allowed
    return {axis: sorted(map(int, fixed[axis])) for axis in _AXES if axis in fixed}


def _degree_problem(request: PlanRequest, space: SearchSpace, axis: str, value: int) -> str:
    """The problem of one degree, whatever the others are."""
    degrees = {"tp": 1, "cp": 1, "ep": 1, "shard": 1}
    if axis in ("tp", "cp") and (problem := _shape_problem(space, **(degrees | {axis: value}))):
        return problem_text(problem)
    experts = request.model.moe.experts if request.model.moe else 1
    if axis == "ep" and (problem := space.shape_problem(**(degrees | {"ep": value, "shard": value}))):
        return problem_text(problem)
    if axis == "pp" and (problem := space.stage_problem(value, ScheduleKnobs("1f1b", 1, "none"), False)):
        return problem_text(problem)
    if axis != "ep" and request.chips % value:
        return f"{axis} = {value} does not divide the {request.chips:,} chips: change --chips, or {axis}"
    return "" if axis != "ep" or experts % value == 0 else f"ep = {value} does not divide the {experts} experts"


def _shape_problem(space: SearchSpace, tp: int, cp: int, ep: int = 1, shard: int = 1) -> Problem | None:
    """The problem of degrees whichever way `cp` attends: the first way's, if all have one."""
    problems = [space.shape_problem(tp, cp, ep, shard, ring) for ring in space.context_kinds(cp) or (False,)]
    return problems[0] if all(problems) else None


def _combination_problem(request: PlanRequest, space: SearchSpace, degrees: dict[str, int]) -> str:
    """The problem of degrees that are fixed together."""
    chips, sequences = request.chips, request.recipe.batch.sequences
    named = " × ".join(f"{axis} {value}" for axis, value in degrees.items() if axis != "ep")
    taken = prod(value for axis, value in degrees.items() if axis != "ep")
    if chips % taken:
        return f"{named} = {taken} does not divide the {chips:,} chips: change --chips, or one of them"
    tp, cp, ep = (degrees.get(axis, 1) for axis in ("tp", "cp", "ep"))
    if problem := _shape_problem(space, tp, cp):
        return problem_text(problem)
    if {"pp", "cp", "tp"} <= degrees.keys() and sequences % (chips // (degrees["pp"] * cp * tp)):
        data = chips // (degrees["pp"] * cp * tp)
        return (
            f"{named} leave {data:,} data-parallel ranks of {chips:,} chips, which do not divide the {sequences:,} "
            f"sequences of a batch (`batch.sequences`): change --chips, or one of them"
        )
    return f"ep = {ep} does not divide `shard` × `cp` × `tp` with {named}" if ep > 1 and named else ""


def nearest_feasible_chips(request: PlanRequest) -> list[int]:
    """The next numbers of chips below and above that have a layout, in full nodes; those of the two that exist."""

    def has_layout(chips: int) -> bool:
        return next(SearchSpace(replace(request, chips=chips)).candidates(), None) is not None

    per_node = request.cluster.chips_per_node
    full_nodes = request.chips // per_node
    below = (nodes * per_node for nodes in range(full_nodes, 0, -1) if nodes * per_node < request.chips)
    above = (nodes * per_node for nodes in range(full_nodes + 1, request.cluster.chips // per_node + 1))
    return [*islice(filter(has_layout, below), 1), *islice(filter(has_layout, above), 1)]


def chips_needed(request: PlanRequest) -> int | None:
    """The first of 2, 4, 8 … times the chips on which a layout fits; None if there is none."""
    multiples = (request.chips * times for times in _MULTIPLES)
    return next((chips for chips in multiples if _fits(_with_chips(request, chips))), None)


def _with_chips(request: PlanRequest, chips: int) -> PlanRequest:
    """The request on this many chips; the cluster's outermost level is widened if it has too few."""
    cluster = request.cluster
    if chips > cluster.chips:
        outer = cluster.levels[-1]
        wider = outer.model_copy(update={"fanout": ceil(outer.fanout * chips / cluster.chips)})
        cluster = cluster.model_copy(update={"levels": (*cluster.levels[:-1], wider)})
    return replace(request, cluster=cluster, chips=chips)


def _fits(request: PlanRequest) -> bool:
    """Whether any layout fits."""
    pricer, some = PlanPricer(request), SearchSpace(request).least_memory_candidates()
    return any(pricer.memory(candidate).device_bytes <= request.usable_memory for candidate in some)
