"""`danlu plan`: which layout, how fast, how many bytes, and why not the others, before anything starts."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from typer.core import TyperCommand

from danlu.spec.description import Seconds
from danlu.spec.load import load_cluster, load_recipe

if TYPE_CHECKING:
    from danlu.planner import Answer, Question


VERIFIED = 2
"""Layouts that `--verify` runs dry unless told how many: the best, and the one to take where the best is refused."""


class PlanCommand(TyperCommand):
    """`danlu plan`, whose `--verify` may stand without a number."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments, with the number of layouts filled in where there is none."""
        return super().parse_args(ctx, _with_number(args))


def _with_number(args: list[str]) -> list[str]:
    """The same arguments with a number behind every `--verify`, which typer cannot have optional."""
    filled: list[str] = []
    for place, word in enumerate(args):
        filled.append(word)
        if word == "--verify" and not _is_number(args[place + 1 : place + 2]):
            filled.append(str(VERIFIED))
    return filled


def _is_number(words: list[str]) -> bool:
    return bool(words) and words[0].lstrip("-").isdecimal()


def plan(
    recipe: Annotated[Path, typer.Argument(help="What to train.", metavar="RECIPE.toml")],
    cluster: Annotated[str, typer.Option(help="A cluster of the catalogue, or its file.")],
    chips: Annotated[int | None, typer.Option(help="Chips to use; all of the cluster if left out.")] = None,
    fix: Annotated[str, typer.Option(help="Knobs to hold: tp=8,pp=4|8,recompute=none.")] = "",
    without: Annotated[str, typer.Option(help="Axes, schedules or recomputes to leave out: pp,zbv.")] = "",
    why_not: Annotated[str, typer.Option(help="Ask why a layout was not chosen: tp=4,recompute=full.")] = "",
    what_if: Annotated[
        list[str] | None, typer.Option(help="Change the machine: fabric.bandwidth=2x, chip.memory=141 GB.")
    ] = None,
    compare: Annotated[Path | None, typer.Option(help="A plan of your own to price beside the best.")] = None,
    days: Annotated[float | None, typer.Option(help="Find the fewest chips that are done in so many days.")] = None,
    tokens: Annotated[str, typer.Option(help="Tokens for --days: 15T; the recipe's if left out.")] = "",
    longest: Annotated[bool, typer.Option("--longest", help="Double the sequence until nothing fits.")] = False,
    leanest: Annotated[bool, typer.Option("--leanest", help="Find the layout with the fewest bytes.")] = False,
    verify: Annotated[
        int,
        typer.Option(
            help=f"Dry-run so many of the best layouts ({VERIFIED} if no number is given) and hold the formulas "
            "against them; refuses what does not fit. Needs torch. A layout takes seconds to minutes, and up to an "
            "hour with a thousand microbatches.",
            metavar="[NUMBER]",
            min=0,
            max=10,
        ),
    ] = 0,
    imbalance: Annotated[float, typer.Option(help="Tokens of the fullest expert rank over the mean.", min=1.0)] = 1.0,
    mtbf: Annotated[str, typer.Option(help="Mean time between failures of a node: 30 d.")] = "",
    reserve: Annotated[float, typer.Option(help="Share of a chip's memory to keep free.", min=0.0, max=0.9)] = 0.03,
    out: Annotated[Path | None, typer.Option(help="Write the plan.", metavar="PLAN.toml")] = None,
    page: Annotated[Path | None, typer.Option(help="Write a page with pictures.", metavar="PAGE.html")] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Find the fastest layout that fits, and say where its time goes and what speaks against the others.

    Searches degrees of every axis, schedules, microbatches, recompute, sharding and the place of every axis on the
    network; the answer is proven the best of them under the cost model. Times are predictions: `danlu validate` shows
    how far off they are.
    """
    from danlu.cli import plan_questions as ask
    from danlu.planner import Question, QuestionError, limits

    try:
        read, machine = load_recipe(recipe), load_cluster(cluster)
        question = Question(
            recipe=read,
            cluster=machine,
            chips=machine.chips if chips is None else chips,
            limits=limits(fix, without),
            reserve=reserve,
            imbalance=imbalance,
        )
        asked = ask.Asked(question=question, mtbf=_seconds(mtbf), searching=_searching, as_json=as_json)
        if why_not:
            ask.why_not(asked, why_not)
        elif what_if:
            ask.what_if(asked, what_if)
        elif compare is not None:
            ask.compare(asked, compare)
        elif days is not None:
            ask.deadline(asked, days, tokens)
        elif longest:
            ask.longest_sequence(asked)
        elif leanest:
            ask.leanest_layout(asked)
        elif verify:
            from danlu.cli.plan_verify import verify_best

            verify_best(asked, verify, out)
        else:
            ask.best(asked, out, page or (Path("plan.html") if open_page else None), open_page)
    except QuestionError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None


def _seconds(text: str) -> float | None:
    from danlu.planner import QuestionError

    if not text:
        return None
    try:
        return TypeAdapter(Seconds).validate_python(text)
    except ValidationError as error:
        raise QuestionError(f"--mtbf: {error.errors()[0]['msg']}") from None


def _searching(question: "Question", shown: int) -> "Answer":
    """Search with a bar on the standard error output; it fills as the proof closes."""
    from danlu.planner import search

    errors = Console(stderr=True)
    bar = Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=errors, transient=True)
    with bar:
        task = bar.add_task(f"{question.chips:,} chips", total=1.0)

        def told(share: float, opened: int) -> None:
            words = "listing layouts" if share == 0 else "proving the best"
            bar.update(task, completed=min(1.0, share), description=f"{question.chips:,} chips, {words}: {opened:,}")

        return search(question, shown, told)
