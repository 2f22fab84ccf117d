"""`danlu plan`: finds the fastest layout that fits, and explains it, before anything starts."""

from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter, ValidationError

from danlu.cli.option_rules import OptionCheckingCommand
from danlu.spec.cluster import Cluster, Dtype
from danlu.spec.load import load_cluster, load_operator_table, load_recipe
from danlu.spec.operator_table import OperatorTable, with_operator_times
from danlu.spec.problem import expected_from, format_value
from danlu.spec.quantity import IN_FILE, Mtbf

DEFAULT_VERIFY = 2
"""Layouts that `--verify` dry-runs by default: the best, and the next in case the best is rejected."""


class PlanCommand(OptionCheckingCommand):
    """`danlu plan`, whose `--verify` takes an optional number."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, with the default number of layouts filled in."""
        return super().parse_args(ctx, _with_number(args))


def _with_number(args: list[str]) -> list[str]:
    """The same arguments with a number after every `--verify`, because typer has no optional values."""
    filled: list[str] = []
    for index, word in enumerate(args):
        filled.append(word)
        if word == "--verify" and not "".join(args[index + 1 : index + 2]).lstrip("-").isdecimal():
            filled.append(str(DEFAULT_VERIFY))
    return filled


def plan(
    recipe: Annotated[Path, typer.Argument(help="What to train.", metavar="RECIPE.toml")],
    cluster: Annotated[str, typer.Option(help="A cluster of the catalog, or its file.")],
    chips: Annotated[int | None, typer.Option(help="Chips to use; all of the cluster if omitted.", min=1)] = None,
    fix: Annotated[str, typer.Option(help="Fix knobs to values: tp=8,pp=4|8,recompute=none.")] = "",
    exclude: Annotated[
        str, typer.Option(help="Axes, kinds of cp, schedules or recompute modes to exclude: pp,ring.")
    ] = "",
    why_not: Annotated[str, typer.Option(help="Explain why a layout was not chosen: tp=4,recompute=full.")] = "",
    what_if: Annotated[
        list[str] | None, typer.Option(help="Change the machine: fabric.bandwidth=2x, chip.memory=141 GB.")
    ] = None,
    compare: Annotated[Path | None, typer.Option(help="Compare your own plan with the best.")] = None,
    days: Annotated[
        float | None, typer.Option(help="Find the fewest nodes that finish within this many days.", min=0.001, max=1e6)
    ] = None,
    tokens: Annotated[str, typer.Option(help="Tokens for --days: 15T; the recipe's if omitted.")] = "",
    longest: Annotated[bool, typer.Option("--max-length", help="Double the sequence until nothing fits.")] = False,
    leanest: Annotated[bool, typer.Option("--min-memory", help="Find the layout with the least memory.")] = False,
    verify: Annotated[
        int,
        typer.Option(
            help=f"Dry-run this many of the best layouts ({DEFAULT_VERIFY} if no number is given), compare the "
            "predictions with them, and reject what does not fit. Needs torch. A layout takes seconds to minutes, "
            "and up to an hour with a thousand microbatches.",
            metavar="[NUMBER]",
            min=0,
            max=10,
        ),
    ] = 0,
    imbalance: Annotated[float, typer.Option(help="Tokens of the fullest expert rank over the mean.", min=1.0)] = 1.0,
    mtbf: Annotated[str, typer.Option(help="Mean time between failures of a node: 30 d.")] = "",
    reserve: Annotated[
        float | None,
        typer.Option(
            help="Share of a chip's memory to keep free; if omitted, as much as fits 95 % of published runs.",
            min=0.0,
            max=0.9,
        ),
    ] = None,
    operators: Annotated[
        Path | None,
        typer.Option(
            help="Times of operators that `danlu ops tune` measured: predict with the fastest, and choose them in the "
            "plan. For a cluster that `danlu probe` measured.",
            metavar="OPS.toml",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--output", "-o", help="Write the plan.", metavar="PLAN.toml")] = None,
    page: Annotated[
        Path | None, typer.Option("--html", help="Write a page with pictures.", metavar="PAGE.html")
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Find the fastest layout that fits, and show where its time goes and why others lose.

    Searches degrees of every axis, schedules, microbatches, recompute, sharding and the placement of every axis on the
    network; none of them is faster under the cost model. Of layouts that are too close to call, the simplest is
    proposed. Times are predictions, with the error of published runs like yours; docs/planner-truth.md has them all.
    """
    from danlu.cli import plan_modes as modes
    from danlu.cli.plan_progress import search_with_progress
    from danlu.planner import PlanRequest, PlanRequestError, parse_constraints
    from danlu.planner.fit_chance import default_reserve

    try:
        read, machine = load_recipe(recipe), load_cluster(cluster)
        measured = None if operators is None else load_operator_table(operators)
        if measured is not None:
            machine = _with_times(machine, measured, read.precision.compute)
        request = PlanRequest(
            recipe=read,
            cluster=machine,
            chips=machine.chips if chips is None else chips,
            constraints=parse_constraints(fix, exclude),
            reserve=default_reserve() if reserve is None else reserve,
            expert_imbalance=imbalance,
        )
        between_failures = _seconds(mtbf)
        if between_failures is not None and not machine.tiers:
            raise PlanRequestError(
                f"--mtbf has no effect with --cluster {cluster}: it has no [[tiers]] to save to, so no goodput is "
                "predicted; omit --mtbf, or add a tier to the cluster's file"
            )
        context = modes.PlanContext(
            request=request,
            mtbf=between_failures,
            search_function=search_with_progress,
            as_json=as_json,
            operators=measured.fastest if measured else {},
        )
        if why_not:
            modes.show_why_not(context, why_not)
        elif what_if:
            modes.show_what_if(context, what_if)
        elif compare is not None:
            modes.show_comparison(context, compare)
        elif days is not None:
            from danlu.cli.plan_deadline import show_deadline

            show_deadline(context, days, tokens)
        elif longest:
            modes.show_longest_sequence(context)
        elif leanest:
            modes.show_least_memory(context)
        elif verify:
            from danlu.cli.plan_verify import verify_best

            verify_best(context, verify, out)
        else:
            modes.show_best(context, out, page or (Path("plan.html") if open_page else None), open_page)
    except PlanRequestError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None


def _with_times(machine: Cluster, table: OperatorTable, dtype: Dtype) -> Cluster:
    from danlu.planner import PlanRequestError

    if table.chip != machine.chip.kind:
        raise PlanRequestError(
            f"--operators: must be of chip {machine.chip.kind}, as cluster {machine.name} is, but is of {table.chip}: "
            "run `danlu ops tune` on one of its chips"
        )
    if dtype not in machine.chip.operators:
        raise PlanRequestError(
            f"--operators has no effect with cluster {machine.name}: its operators were not measured in {dtype}, so "
            "predictions do not add up single ones; measure the chip with `danlu probe`"
        )
    return with_operator_times(machine, table, dtype)


def _seconds(text: str) -> float | None:
    from danlu.planner import PlanRequestError

    if not text:
        return None
    try:
        return TypeAdapter(Mtbf).validate_python(text, context={IN_FILE: True})
    except ValidationError as error:
        raise PlanRequestError(f"--mtbf: is {format_value(text)}, but must be {expected_from(error)}") from None
