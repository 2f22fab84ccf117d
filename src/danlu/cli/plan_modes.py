"""The modes of `danlu plan`, one function per option."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Group
from rich.text import Text

from danlu.cli.browser import open_in_browser
from danlu.cli.json_output import print_json
from danlu.planner import PlanRequest, PlanRequestError, PricedPlan, SearchResult, parse_constraints, price_plan
from danlu.planner.explain import PART_LABELS, Explainer, level_costs
from danlu.planner.goodput import Goodput, goodput
from danlu.planner.infeasible import chips_needed, explain_infeasible
from danlu.planner.search import SearchFunction
from danlu.planner.ties import TIE_WIDTH, tie_limit
from danlu.planner.what_if import apply_what_if, least_memory_layout, sweep_sequence_length
from danlu.report import plan_tables as tables
from danlu.report.plan_confidence import band_text, fit_chance_text, step_text, ways_to_tell_apart, width_text
from danlu.report.terminal import Console
from danlu.spec import toml
from danlu.spec.load import read_plan
from danlu.spec.operator_table import RoutedOperator
from danlu.spec.problem import SpecError
from danlu.spec.rank_placement import PlacementError
from danlu.spec.rules import DECODER_LAYOUT_RULES, LAYOUT_RULES, PLAN_RULES
from danlu.spec.rules.operators import IN_BLOCKS, WHY_NOT


@dataclass(frozen=True)
class PlanContext:
    """What all modes share."""

    request: PlanRequest
    mtbf: float | None
    search_function: SearchFunction
    as_json: bool
    operators: Mapping[RoutedOperator, str] = field(default_factory=dict)
    """Implementations that were measured to be the fastest, for the plan that is written."""

    def search(self, request: PlanRequest | None = None, shown: int = 1, tie_width: float = TIE_WIDTH) -> SearchResult:
        """Search; raises `PlanRequestError` with the reason if nothing fits."""
        result = self.search_function(request or self.request, shown, tie_width=tie_width)
        if not result.best:
            raise PlanRequestError(explain_no_fit(result))
        return result

    def goodput(self, request: PlanRequest | None = None) -> Goodput | None:
        """Expected goodput."""
        return goodput(request or self.request, self.mtbf)

    def plan_text(self, chosen: PricedPlan, expected: Goodput | None) -> str:
        """The plan as its file has it; says which measured implementations it would not call."""
        plan = tables.plan_with_prediction(chosen, expected)
        unread: list[RoutedOperator] = [name for name in IN_BLOCKS if plan.compile and name in self.operators]
        if unread:
            typer.echo(
                f"--operators: the plan leaves out {', '.join(unread)}: with `compile` true a compiler makes its own "
                "kernels of them, and their measured times say nothing about it",
                err=True,
            )
        for name, why_not in WHY_NOT.items():
            if name in self.operators and (found := why_not(self.request.recipe, plan)):
                typer.echo(f"--operators: the plan leaves out {name}: {found[0]}", err=True)
                unread.append(name)
        operators = {name: fastest for name, fastest in self.operators.items() if name not in unread}
        return toml.dumps(plan.model_copy(update={"operators": operators}))

    def show(self, view: Any, value: dict[str, Any]) -> None:
        """Print tables, or JSON."""
        if self.as_json:
            print_json(value)
            return
        # A pipe has no width of its own: give it every column.
        console = Console(highlight=False) if sys.stdout.isatty() else Console(width=200, highlight=False)
        console.print(view)


def explain_no_fit(result: SearchResult) -> str:
    """Why a search found nothing."""
    request = result.request
    if result.least_memory is None:
        return explain_infeasible(request)
    over = result.least_memory.peak_bytes - request.usable_memory
    return (
        f"nothing fits {request.chips:,} chips: even the layout with the least memory "
        f"({tables.degrees_text(result.least_memory)}) needs "
        f"{tables.format_gb(result.least_memory.peak_bytes)} per chip, "
        f"{tables.format_gb(over)} more than the {tables.format_gb(request.usable_memory)} available: "
        f"{_more_chips(request)}, {_less_reserve(result.least_memory)}a shorter sequence, or a chip with more memory"
    )


def _less_reserve(leanest: PricedPlan) -> str:
    """The reserve with which a layout fits, and what that risks; empty if the chip is too small for it."""
    free = 1 - leanest.peak_bytes / leanest.request.cluster.chip.memory
    if free < 0:
        return ""
    return f"--reserve {int(100 * free) / 100:g} (a chance of {fit_chance_text(leanest.fit_chance)} to fit), "


def _more_chips(request: PlanRequest) -> str:
    """How many chips would be enough, and whether the cluster has them."""
    needed = chips_needed(request)
    if needed is None:
        return "another layout (loosen --fix and --exclude)" if request.constraints.allowed else "a smaller model"
    if needed <= request.cluster.chips:
        return f"--chips {needed}"
    return f'{needed:,} such chips ("{request.cluster.name}" has {request.cluster.chips:,})'


def show_best(context: PlanContext, out: Path | None, page: Path | None, open_page: bool) -> None:
    """The simplest of the fastest layouts, its runners-up, and why."""
    result = context.search(shown=5)
    chosen, expected = result.answer, context.goodput()
    found = level_costs(chosen)
    rejections = Explainer(context.request).rejections(chosen, result.best[0].seconds)
    context.show(
        tables.result_view(result, found, rejections, expected), tables.result_json(result, found, rejections, expected)
    )
    if out is not None:
        write_text(out, context.plan_text(chosen, expected))
    if page is not None:
        from danlu.report.plan_page import plan_page

        write_text(page, plan_page(result, found, rejections, expected, _scaling(context, result.best[0])))
        if open_page:
            open_in_browser(page)


def _scaling(context: PlanContext, fastest: PricedPlan) -> list[tuple[int, PricedPlan | None]]:
    """The fastest layouts of an eighth, a quarter and half of the chips, and of all."""
    found: list[tuple[int, PricedPlan | None]] = []
    for part in (8, 4, 2):
        chips = context.request.chips // part
        if chips >= 1 and context.request.chips % part == 0:
            result = context.search_function(replace(context.request, chips=chips), 1, tie_width=0.0)
            found.append((chips, result.best[0] if result.best else None))
    return [*found, (context.request.chips, fastest)]


def show_why_not(context: PlanContext, wanted: str) -> None:
    """Compare the best layout under a constraint with the best of all."""
    more = parse_constraints(wanted, option="--why-not")
    constrained = context.request.constraints.joined(more, "--why-not")
    other = context.search_function(replace(context.request, constraints=constrained), 1, tie_width=0.0)
    if not other.best and other.least_memory is None:
        raise PlanRequestError(f"--why-not {wanted}: {explain_infeasible(other.request)}")
    result = context.search()
    chosen = result.answer
    if not other.best:
        text = explain_no_fit(other)
        context.show(Text(text), {"best": tables.plan_json(chosen, context.goodput()), "refused": text})
        return
    _side_by_side(context, [("best", chosen), (wanted, other.best[0])], result.best[0].seconds)


def show_what_if(context: PlanContext, changes: list[str]) -> None:
    """Compare the fastest layouts on this machine and on a changed one."""
    other = context.request
    for change in changes:
        other = apply_what_if(other, change)
    now, then = context.search(tie_width=0.0), context.search(other, tie_width=0.0)
    _side_by_side(context, [("now", now.best[0]), (", ".join(changes), then.best[0])])


def show_comparison(context: PlanContext, path: Path) -> None:
    """Compare the user's plan with the best."""
    given = read_plan(path)
    recipe = context.request.parsed_recipe
    problems = [problem for rule in PLAN_RULES for problem in rule(given)]
    rules = (*DECODER_LAYOUT_RULES, *LAYOUT_RULES)
    problems += [problem for rule in rules for problem in rule(recipe, given)]
    if problems:
        raise SpecError(problems)
    request = replace(context.request, chips=given.value.degrees.world)
    try:
        priced = price_plan(request, given.value)
    except PlacementError as error:
        raise PlanRequestError(str(error)) from None
    result = context.search(request)
    if not priced.fits:
        over = priced.peak_bytes - request.usable_memory
        remedy = Explainer(request).suggest_fix(priced.candidate)
        typer.echo(
            f"{path} does not fit: {tables.format_gb(over)} over the limit on the fullest chip; {remedy}", err=True
        )
    rows = [("best", result.answer), (path.name, priced)]
    _side_by_side(replace(context, request=request), rows, result.best[0].seconds)


def show_longest_sequence(context: PlanContext) -> None:
    """The longest sequences that fit."""
    found = sweep_sequence_length(context.request, context.search_function)
    expected = context.goodput()
    rows = [(f"{length:,} tokens", priced) for length, priced in found if priced]
    last, priced = found[-1]
    model = context.request.model
    closing = f"The batch is one sequence of {last:,} tokens."
    if priced is None:
        closing = f"{last:,} tokens: nothing fits."
    elif model.position == "learned" and 2 * last > model.sequence:
        closing = f"The model's learned positions end at {model.sequence:,} tokens."
    table = tables.side_by_side(rows, expected)
    context.show(
        tables.with_header(rows[0][1], table, Text(closing)) if rows else Group(table, Text(closing)),
        {str(length): tables.plan_json(priced, expected) if priced else None for length, priced in found},
    )


def show_least_memory(context: PlanContext) -> None:
    """Compare the layout with the least memory with the fastest."""
    found, result = least_memory_layout(context.request), context.search_function(context.request, 1)
    _side_by_side(context, [("leanest", found), *(("best", priced) for priced in result.tied[:1])])


def _side_by_side(context: PlanContext, rows: list[tuple[str, PricedPlan]], fastest: float | None = None) -> None:
    """Compare two layouts by the parts of a step; a tie is measured from the `fastest`, if it is given."""
    expected = context.goodput(rows[-1][1].request)
    lines = _differences(*rows[0], *rows[1]) if len(rows) > 1 else []
    value: dict[str, Any] = {name: tables.plan_json(priced, expected) for name, priced in rows}
    if fastest is not None:
        value["tie"] = rows[1][1].seconds <= tie_limit(fastest)
        lines[1:1] = [_tie_words(context.request)] if value["tie"] else []
    lines += [f"  {name}: {band_text(priced)}" for name, priced in rows]
    view = tables.with_header(rows[0][1], tables.side_by_side(rows, expected), Text(), Text("\n".join(lines)))
    context.show(view, value)


def _tie_words(request: PlanRequest) -> str:
    apart = ", or ".join(ways_to_tell_apart(request, 2))
    return f"  within {width_text(TIE_WIDTH)} of the fastest: a tie, too close for the model to call: {apart}."


def _differences(first: str, one: PricedPlan, second: str, other: PricedPlan) -> list[str]:
    more = other.seconds - one.seconds
    if one.plan == other.plan:
        return [f"{second}: {first} is this layout already."]
    speed = f"{abs(more) / one.seconds:.1%} {'slower' if more > 0 else 'faster'} than {first}"
    lines = [f"{second}: {speed} ({step_text(one.seconds)} → {step_text(other.seconds)})."]
    changes = {
        name: other.prediction.parts.get(name, 0.0) - one.prediction.parts.get(name, 0.0) for name in PART_LABELS
    }
    for name in sorted(changes, key=lambda part: -abs(changes[part]))[:4]:
        if abs(changes[name]) > 0.002 * one.seconds:
            lines.append(f"  {PART_LABELS[name]}: {changes[name]:+.3f} s")
    lines.append(f"  memory of the fullest chip: {(other.peak_bytes - one.peak_bytes) / 1e9:+.1f} GB")
    for name, priced in ((first, one), (second, other)):
        lines.append(f"  {name}: {tables.placement_text(priced)}")
    return lines


def write_text(path: Path, text: str) -> None:
    """Write a file; raises `PlanRequestError` with the reason if that fails."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlanRequestError(f"{path} cannot be written: {error.strerror}") from None
    typer.echo(f"wrote {path}", err=True)
