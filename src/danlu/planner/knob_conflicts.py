"""Why no layout has the fixed knobs although there are valid degrees, in the words of the rules of `danlu check`.

The fixed values are written into plans whether the rules allow them or not, and the rules say what is wrong with each.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, product

from danlu.planner.request import RECOMPUTE_MODES, SEARCHED_SCHEDULES, TOKEN_DISPATCHERS, PlanRequest
from danlu.planner.search_space import SearchSpace, ShapeKnobs, context_kind, plan_without_file
from danlu.spec.plan import DENSE_AXES, LOOPED_SCHEDULES, Degrees, PipelineConfig, Plan
from danlu.spec.problem import Problem
from danlu.spec.rules import DECODER_LAYOUT_RULES, LAYOUT_RULES
from danlu.spec.rules.context import CONTEXT_RULES
from danlu.spec.rules.expert_dispatch import EXPERT_DISPATCH_RULES
from danlu.spec.rules.pipeline import STAGE_RULES
from danlu.spec.rules.regather import REGATHER_RULES

MOST_DEGREES = 200
"""Combinations of degrees that are tried: what is wrong with so many is wrong with the rest."""


def knob_conflicts(request: PlanRequest) -> list[str]:
    """What is wrong with the fixed knobs, one problem a key; empty if no degrees are valid, whatever the knobs."""
    degrees = {*DENSE_AXES, "ep"}
    allowed: dict[str, frozenset[str]] = {
        knob: values for knob, values in request.constraints.allowed.items() if knob in degrees
    }
    loose = replace(request, constraints=replace(request.constraints, allowed=allowed, excluded={}))
    shapes = dict.fromkeys(shape._replace(microbatches=1) for shape in SearchSpace(loose).shapes())
    found: Counter[str] = Counter()
    for shape in islice(shapes, MOST_DEGREES):
        found.update(_conflicts(request, shape))
    by_key = {words.split(" ", 1)[0]: words for words, _ in reversed(found.most_common())}
    return list(reversed(by_key.values()))


def problem_text(problem: Problem) -> str:
    """A problem of a rule in one line: key, value, what was expected, and what to do."""
    text = f"`{problem.key}` {problem.message}"
    return f"{text}: {problem.suggestion}" if problem.suggestion else text


def _conflicts(request: PlanRequest, shape: ShapeKnobs) -> Iterator[str]:
    """What is wrong with the fixed knobs in a layout of these degrees."""
    fixed = request.constraints.allowed
    names = _remaining(request, "schedule", SEARCHED_SCHEDULES)
    modes = _remaining(request, "recompute", RECOMPUTE_MODES)
    if not modes:
        yield "--exclude names every recompute mode: remove one of them"
        return
    dispatchers = _remaining(request, "dispatcher", TOKEN_DISPATCHERS)
    if not dispatchers:
        yield "--exclude names every dispatcher of tokens: remove one of them"
        return
    if not names and shape.pp > 1:
        yield f"--exclude names every schedule, but pp = {shape.pp} needs one: remove one of them, or fix pp=1"
        return
    kinds = fixed.get("context", frozenset())
    context = context_kind(kinds == {"ring"} if len(kinds) == 1 else shape.ring)
    looped = fixed.get("virtual", {"1"}) != {"1"}
    names = [name for name in names if looped == (name in LOOPED_SCHEDULES)] if "schedule" not in fixed else names
    for schedule, recompute, reshard, regather, compiled in product(
        names[: None if "schedule" in fixed else 1] or ["1f1b"],
        modes[: None if "recompute" in fixed else 1],
        *(sorted(fixed.get(switch, {"false"})) for switch in ("reshard", "regather", "compile")),
    ):
        usual = "2" if schedule in LOOPED_SCHEDULES else "1"
        for stages, number, dispatcher, chunks in product(
            _numbers(request, "virtual", usual),
            _microbatches(request, shape),
            dispatchers[:1],
            _numbers(request, "chunks", "1"),
        ):
            if isinstance(number, str):
                yield number
                continue
            plan = Plan(
                degrees=Degrees(pp=shape.pp, shard=shape.dp, cp=shape.cp, tp=shape.tp, ep=shape.ep),
                context_parallel=context,
                pipeline=PipelineConfig(schedule=schedule, stages_per_rank=stages),  # type: ignore[arg-type]
                recompute=recompute,  # type: ignore[arg-type]
                reshard_after_forward=reshard == "true",
                regather_inputs=regather == "true",
                compile=compiled == "true",
                microbatches=number,
                token_dispatcher=dispatcher,  # type: ignore[arg-type]
                dispatch_chunks=chunks,
            )
            yield from (problem_text(problem) for problem in islice(_problems(request, plan), 1))


def _remaining(request: PlanRequest, knob: str, values: tuple[str, ...]) -> list[str]:
    return [value for value in values if request.constraints.allows(knob, value)]


def _numbers(request: PlanRequest, knob: str, usual: str) -> list[int]:
    return sorted(map(int, request.constraints.allowed.get(knob, {usual})))


def _microbatches(request: PlanRequest, shape: ShapeKnobs) -> Iterator[int | str]:
    """The fixed numbers of microbatches, those that fixed sizes give, or a text where a size gives none."""
    held, fixed = request.recipe.batch.sequences // shape.dp, request.constraints.allowed
    if "microbatch" not in fixed:
        yield from _numbers(request, "microbatches", str(held))
        return
    for size, number in product(_numbers(request, "microbatch", "1"), _numbers(request, "microbatches", "0")):
        count, rest = divmod(held, size)
        if rest:
            yield (
                f"microbatch = {size} does not divide the {held:,} sequences of a rank (`batch.sequences` / "
                f"`replicate` / `shard`): another microbatch, or `batch.sequences` a multiple of {size * shape.dp:,}"
            )
        elif number and number != count:
            yield (
                f"microbatch = {size} makes {count:,} microbatches of the {held:,} sequences of a rank, but "
                f"microbatches = {number:,}: fix one of the two"
            )
        else:
            yield count


def _problems(request: PlanRequest, plan: Plan) -> Iterator[Problem]:
    given = plan_without_file(plan)
    rules = (*STAGE_RULES, *REGATHER_RULES, *CONTEXT_RULES, *EXPERT_DISPATCH_RULES)
    yield from (problem for rule in rules for problem in rule(given))
    for rule in (*DECODER_LAYOUT_RULES, *LAYOUT_RULES):
        yield from rule(request.parsed_recipe, given)
