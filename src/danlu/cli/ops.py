"""`danlu ops`: which implementation of an operator runs, and which is fastest on this chip."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from danlu.cli.json_output import print_json
from danlu.cli.run_options import RecipeArgument
from danlu.report.operator_tables import ImplementationRow, calls_table, implementations_table
from danlu.report.progress_bar import count_bar
from danlu.report.terminal import Console
from danlu.spec.load import load_operator_table, load_plan
from danlu.spec.operator_table import OperatorTable, RoutedOperator
from danlu.spec.plan import Plan
from danlu.spec.toml import dumps

if TYPE_CHECKING:
    from danlu.chips import ChipDescriptor
    from danlu.dryrun.operator_tuning import OperatorCall

_DEFAULT_SECONDS = 20.0


class _ShowUnlessNamed(TyperGroup):
    """`danlu ops RECIPE.toml` is `danlu ops show RECIPE.toml`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Name the command where only its arguments are given."""
        is_file = bool(args) and (args[0].endswith(".toml") or Path(args[0]).exists())
        return super().parse_args(ctx, ["show", *args] if is_file else args)


app = typer.Typer(
    cls=_ShowUnlessNamed, help="Operators: what computes them, and what is fastest here.", no_args_is_help=True
)
_PlanOption = Annotated[Path | None, typer.Option(help="How it runs; one rank if omitted.")]
_ChipOption = Annotated[str | None, typer.Option(help="Chip of this machine; default: the accelerator, or the CPU.")]
_JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("show")
def show_command(
    recipe: RecipeArgument,
    plan: _PlanOption = None,
    table: Annotated[
        Path | None, typer.Option(help="Measured times: a file that `danlu ops tune` wrote.", metavar="OPS.toml")
    ] = None,
    chip: _ChipOption = None,
    as_json: _JsonOption = False,
) -> None:
    """Show which implementation of every operator of a recipe runs here, why, and what it gains."""
    measured = None if table is None else load_operator_table(table)
    found, calls = _dry_run(recipe, plan, chip)
    if measured is not None and measured.chip != found.name:
        typer.echo(f"--table: {table} must be of chip {found.name}, which this is, but is of {measured.chip}", err=True)
        raise typer.Exit(2)
    rows = _rows(calls, found, load_plan(plan) if plan else Plan(), measured)
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    console = _wide_console()
    console.print(implementations_table(rows))
    if measured is None:
        console.print("not measured: `danlu ops tune` measures them, and --table shows the result", highlight=False)


@app.command("tune")
def tune_command(
    recipe: RecipeArgument,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the measured times here.", metavar="OPS.toml")
    ] = None,
    plan: _PlanOption = None,
    seconds: Annotated[float, typer.Option(min=1, max=3600, help="How long to measure.")] = _DEFAULT_SECONDS,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of a rank on a CPU; default: the cores over the plan's ranks.")
    ] = None,
    chip: _ChipOption = None,
    as_json: _JsonOption = False,
) -> None:
    """Measure all implementations of a recipe's operators on this chip, in its shapes, and say which is fastest.

    The file that `--output` names serves every rank of a cluster of these chips: `danlu plan --operators` predicts
    with it, and writes the fastest implementations into the plan.
    """
    import torch

    from danlu.chips import host
    from danlu.dryrun.operator_tuning import NothingToTuneError, tune_operators
    from danlu.language.register import use_kernels

    if output is not None and not output.parent.is_dir():
        raise typer.BadParameter(f"--output: the folder {output.parent} does not exist: create it first")
    asked = load_plan(plan) if plan else Plan()
    found, run = _dry_run_with_trace(recipe, plan, chip)
    device = found.runtime.set_device(0)
    use_kernels(device)
    if threads is not None and device.type != "cpu":
        raise typer.BadParameter(f"--threads has no effect on chip {found.name}: it is for ranks on a CPU; omit it")
    if device.type == "cpu":
        torch.set_num_threads(threads or max(1, host.physical_cores() // asked.degrees.world))
    with count_bar() as progress:
        task = progress.add_task("measuring", total=None)

        def on_call(name: str, done: int, total: int) -> None:
            progress.update(task, description=name, completed=done, total=total)

        try:
            measured = tune_operators(run, found, seconds, on_call)
        except NothingToTuneError as error:
            raise typer.BadParameter(f"{recipe}: {error}") from None
    if output is not None:
        output.write_text(dumps(measured), encoding="utf-8")
    if as_json:
        typer.echo(measured.model_dump_json(indent=2))
        return
    console = _wide_console()
    console.print(calls_table(measured))
    from danlu.dryrun.operator_tuning import operator_calls

    console.print(implementations_table(_rows(operator_calls(run), found, asked, measured)))
    _say_what_to_do(console, measured, asked, output)


def _say_what_to_do(console: Console, measured: OperatorTable, plan: Plan, output: Path | None) -> None:
    runs = {name: _running(name, measured, plan) for name in measured.fastest}
    better = {name: best for name, best in measured.fastest.items() if best != runs[name]}
    if better:
        lines = ", ".join(f'{name} = "{best}"' for name, best in better.items())
        console.print(f"faster here: operators = {{{lines}}} in the plan", highlight=False)
    else:
        console.print("what runs is the fastest of all that were measured", highlight=False)
    console.print(f"written to {output}" if output else "nothing written: name a file with -o ops.toml")


def _running(name: RoutedOperator, measured: OperatorTable, plan: Plan) -> str:
    """The implementation that runs, of those that were measured."""
    from danlu.ops.operators.routing import OPERATORS

    names = measured.implementations(name)
    return plan.operators.get(name) or next(
        each.name for each in reversed(OPERATORS[name].implementations) if each.name in names
    )


def _dry_run(recipe: Path, plan: Path | None, chip: str | None) -> tuple["ChipDescriptor", list["OperatorCall"]]:
    from danlu.dryrun.operator_tuning import operator_calls

    found, run = _dry_run_with_trace(recipe, plan, chip)
    return found, operator_calls(run)


def _dry_run_with_trace(recipe: Path, plan: Path | None, chip: str | None) -> tuple["ChipDescriptor", Any]:
    """The chip, and one step of the recipe without the machine: which operators it calls, on which shapes."""
    from danlu.chips import find_chip
    from danlu.dryrun import api

    found = find_chip(chip)
    with Console(stderr=True).status("dry run"):
        return found, api.dryrun(recipe, plan=plan)


def _rows(
    calls: Sequence["OperatorCall"], chip: "ChipDescriptor", plan: Plan, measured: OperatorTable | None
) -> list[ImplementationRow]:
    """Every implementation of every operator that is called, the one that runs first."""
    from danlu.language.register import use_kernels
    from danlu.ops.operators.routing import OPERATORS, RoutingError, route_operators

    device = chip.runtime.set_device(0)
    use_kernels(device)
    try:
        route_operators(plan.operators, device)
    except RoutingError as error:
        raise typer.BadParameter(str(error)) from None
    rows = []
    for name in dict.fromkeys(call.operator for call in calls):
        taken = measured.implementations(name) if measured else {}
        names = OPERATORS[name].implementations
        able = [each.name for each in names if each.why_not_on(device.type) is None]
        runs = plan.operators.get(name) or able[-1]
        for each in sorted(names, key=lambda one: one.name != runs):
            seconds, torch_seconds = taken.get(each.name), taken.get("torch")
            rows.append(
                ImplementationRow(
                    operator=name,
                    implementation=each.name,
                    about=each.about,
                    runs=each.name == runs,
                    why=_why(each.name, runs, name in plan.operators, each.why_not_on(device.type), each.about),
                    seconds=seconds,
                    gain=torch_seconds / seconds if seconds and torch_seconds else None,
                )
            )
    return rows


def _why(name: str, runs: str, planned: bool, reason: str | None, about: str) -> str:
    if reason is not None:
        return f"cannot run here: {reason}"
    if name == runs:
        return "the plan asks for it" if planned else f"made for this chip: {about}"
    return about


def _wide_console() -> Console:
    # A pipe has no width: without this rich would cut the columns at 80.
    return Console() if Console().is_terminal else Console(width=160)
