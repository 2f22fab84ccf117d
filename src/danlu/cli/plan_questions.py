"""The questions that the flags of `danlu plan` ask, one function each."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console, Group
from rich.text import Text

from danlu.cli.browser import open_in_browser
from danlu.planner import Answer, Choice, Question, QuestionError, limits, price
from danlu.planner.asking import changed, chips_for, days_of, leanest, longest
from danlu.planner.explain import PARTS, Judge, holds
from danlu.planner.goodput import Goodput, goodput
from danlu.report import plan_tables as tables
from danlu.report.wording import count
from danlu.spec import toml
from danlu.spec.load import Sourced, read_plan
from danlu.spec.placing import UnplaceableError
from danlu.spec.problem import SpecError
from danlu.spec.rules import DESCRIBED_LAYOUT_RULES, LAYOUT_RULES, PLAN_RULES

_SCALE = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


@dataclass(frozen=True)
class Asked:
    """What all questions share."""

    question: Question
    mtbf: float | None
    searching: Callable[[Question, int], Answer]
    as_json: bool

    def search(self, question: Question | None = None, shown: int = 1) -> Answer:
        """Search, or say why nothing is found."""
        answer = self.searching(question or self.question, shown)
        if not answer.best:
            raise QuestionError(nothing_fits(answer))
        return answer

    def kept(self, question: Question | None = None) -> Goodput | None:
        """What failures leave."""
        return goodput(question or self.question, self.mtbf)

    def show(self, view: Any, value: dict[str, Any]) -> None:
        """Print for a person or for a machine."""
        if self.as_json:
            typer.echo(json.dumps(value, indent=2, ensure_ascii=False))
            return
        # A pipe has no width of its own: give it every column.
        console = Console(highlight=False) if sys.stdout.isatty() else Console(width=200, highlight=False)
        console.print(view)


def nothing_fits(answer: Answer) -> str:
    """Why a search came back with nothing."""
    question = answer.question
    if answer.leanest is None:
        return (
            f"no layout of {question.chips:,} ranks obeys the rules of the runtime for a batch of "
            f"{question.recipe.batch.sequences:,} sequences: loosen --fix and --without, or change --chips"
        )
    over = answer.leanest.bytes - question.memory
    return (
        f"nothing fits {question.chips:,} chips: the leanest layout ({tables.degrees_text(answer.leanest)}) takes "
        f"{tables.gigabytes(answer.leanest.bytes)} of a chip, {tables.gigabytes(over)} more than the "
        f"{tables.gigabytes(question.memory)} there are: more --chips, a shorter sequence, or a chip with more memory"
    )


def best(asked: Asked, out: Path | None, page: Path | None, open_page: bool) -> None:
    """The best layout, its runners-up, and why."""
    answer = asked.search(shown=5)
    chosen, kept = answer.best[0], asked.kept()
    found, refused = holds(chosen), Judge(asked.question).refusals(chosen)
    asked.show(tables.answer_view(answer, found, refused, kept), tables.answer_json(answer, found, refused, kept))
    if out is not None:
        write_text(out, toml.dumps(tables.planned(chosen, kept)))
    if page is not None:
        from danlu.report.plan_page import plan_page

        write_text(page, plan_page(answer, found, refused, kept, _scaling(asked, chosen)))
        if open_page:
            open_in_browser(page)


def _scaling(asked: Asked, chosen: Choice) -> list[tuple[int, Choice | None]]:
    """The best layouts of an eighth, a quarter and half of the chips, and of all."""
    found: list[tuple[int, Choice | None]] = []
    for part in (8, 4, 2):
        chips = asked.question.chips // part
        if chips >= 1 and asked.question.chips % part == 0:
            answer = asked.searching(replace(asked.question, chips=chips), 1)
            found.append((chips, answer.best[0] if answer.best else None))
    return [*found, (asked.question.chips, chosen)]


def why_not(asked: Asked, wanted: str) -> None:
    """The best layout under a condition, beside the best of all."""
    answer = asked.search()
    chosen = answer.best[0]
    other = asked.searching(replace(asked.question, limits=_both(asked.question, wanted)), 1)
    if not other.best:
        text = nothing_fits(other)
        asked.show(Text(text), {"best": tables.choice_json(chosen, asked.kept()), "refused": text})
        return
    rival = other.best[0]
    _side_by_side(asked, [("best", chosen), (wanted, rival)])


def what_if(asked: Asked, changes: list[str]) -> None:
    """The best layout on this machine and on one that is changed."""
    other = asked.question
    for change in changes:
        other = changed(other, change)
    now, then = asked.search(), asked.search(other)
    _side_by_side(asked, [("now", now.best[0]), (", ".join(changes), then.best[0])])


def compare(asked: Asked, path: Path) -> None:
    """A plan of the user's own beside the best."""
    own = read_plan(path)
    recipe = asked.question.source
    problems = [problem for rule in PLAN_RULES for problem in rule(own)]
    rules = (*DESCRIBED_LAYOUT_RULES, *LAYOUT_RULES)
    problems += [problem for rule in rules for problem in rule(recipe, own)]
    if problems:
        raise SpecError(problems)
    question = replace(asked.question, chips=own.value.degrees.world)
    priced = _priced(question, own)
    answer = asked.search(question)
    if not priced.fits:
        over = priced.bytes - question.memory
        remedy = Judge(question).remedy(priced.candidate)
        typer.echo(f"{path} does not fit: {tables.gigabytes(over)} too many on the fullest chip; {remedy}", err=True)
    _side_by_side(replace(asked, question=question), [("best", answer.best[0]), (path.name, priced)])


def _priced(question: Question, own: Sourced[Any]) -> Choice:
    try:
        return price(question, own.value)
    except UnplaceableError as error:
        raise QuestionError(str(error)) from None


def deadline(asked: Asked, days: float, tokens: str) -> None:
    """The fewest chips for a wanted time."""
    recipe = asked.question.recipe
    wanted = _tokens(tokens) if tokens else float(recipe.steps * recipe.batch.tokens)
    found = chips_for(asked.question, wanted, days, asked.searching, asked.mtbf)
    lines = [
        f"{chips:,} chips: " + (f"{taken:.1f} days" if taken is not None else "nothing fits")
        for chips, taken in found.tried
    ]
    value: dict[str, Any] = {"tokens": wanted, "days": days, "tried": dict(found.tried), "best": None}
    if found.answer is None:
        lines.append(
            f"{count(wanted)} tokens are not done in {days:g} days on {asked.question.chips:,} chips or fewer."
        )
        asked.show(Text("\n".join(lines)), value)
        raise typer.Exit(1)
    chosen = found.answer.best[0]
    kept = goodput(chosen.question, asked.mtbf)
    taken = days_of(chosen, wanted, asked.mtbf)
    lines.append(
        f"{count(wanted)} tokens in {days:g} days take {chosen.question.chips:,} chips: done in {taken:.1f} days"
        f"{', failures included' if kept else ''}."
    )
    value["best"] = tables.choice_json(chosen, kept)
    asked.show(Group(Text("\n".join(lines)), Text(), tables.side_by_side([("1", chosen)], kept)), value)


def longest_sequence(asked: Asked) -> None:
    """How long sequences may be."""
    found = longest(asked.question, asked.searching)
    kept = asked.kept()
    rows = [(f"{length:,} tokens", choice) for length, choice in found if choice]
    last, choice = found[-1]
    closing = f"{last:,} tokens: nothing fits." if choice is None else f"The batch is one sequence of {last:,} tokens."
    asked.show(
        Group(tables.side_by_side(rows, kept), Text(closing)),
        {str(length): tables.choice_json(choice, kept) if choice else None for length, choice in found},
    )


def leanest_layout(asked: Asked) -> None:
    """The least memory beside the best time."""
    found, answer = leanest(asked.question), asked.searching(asked.question, 1)
    rows = [("leanest", found), *(("best", choice) for choice in answer.best)]
    _side_by_side(asked, rows)


def _side_by_side(asked: Asked, rows: list[tuple[str, Choice]]) -> None:
    """Two layouts, and which parts of a step tell them apart."""
    kept = asked.kept(rows[-1][1].question)
    lines: list[str] = []
    if len(rows) > 1:
        (first, one), (second, other) = rows[0], rows[1]
        lines = _differences(one, other, first, second)
    value = {name: tables.choice_json(choice, kept) for name, choice in rows}
    asked.show(Group(tables.side_by_side(rows, kept), Text(), Text("\n".join(lines))), value)


def _differences(one: Choice, other: Choice, first: str, second: str) -> list[str]:
    more = other.seconds - one.seconds
    speed = f"{abs(more) / one.seconds:.1%} {'slower' if more > 0 else 'faster'} than {first}"
    lines = [f"{second}: {speed} ({tables.step_text(one.seconds)} → {tables.step_text(other.seconds)})."]
    changes = {name: other.prediction.parts.get(name, 0.0) - one.prediction.parts.get(name, 0.0) for name in PARTS}
    for name in sorted(changes, key=lambda part: -abs(changes[part]))[:4]:
        if abs(changes[name]) > 0.002 * one.seconds:
            lines.append(f"  {PARTS[name]}: {changes[name]:+.3f} s")
    lines.append(f"  bytes of the fullest chip: {(other.bytes - one.bytes) / 1e9:+.1f} GB")
    for name, choice in ((first, one), (second, other)):
        lines.append(f"  {name}: {tables.placing_text(choice)}")
    return lines


def _both(question: Question, wanted: str) -> Any:
    more = limits(wanted)
    return replace(question.limits, fixed={**question.limits.fixed, **more.fixed})


def _tokens(text: str) -> float:
    scale = _SCALE.get(text[-1:], 1.0)
    number = text[:-1] if text[-1:] in _SCALE else text
    try:
        return float(number) * scale
    except ValueError:
        raise QuestionError(f'--tokens: "{text}" must be a number such as 15T or 300B') from None


def write_text(path: Path, text: str) -> None:
    """Write a file, or say why it cannot be."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise QuestionError(f"{path} cannot be written: {error.strerror}") from None
    typer.echo(f"wrote {path}", err=True)
