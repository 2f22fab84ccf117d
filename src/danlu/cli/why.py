"""`danlu why`: which rank keeps a run from going on, and where it is."""

from typing import Annotated

import typer

from danlu.cli.ckpt_ref import fail
from danlu.cli.json_output import print_json
from danlu.cli.run_options import RunsDirOption
from danlu.report.terminal import Console
from danlu.spec.run_folder import DEFAULT_RUNS_DIR

_LOOK_SECONDS = 2.0
"""How long to wait for a sign of life before somebody is blamed."""
_STACK_LINES = 16
_SHOWN_RECOVERIES = 5
"""The newest faults that the run survived."""


def why(
    run: Annotated[str, typer.Argument(help="Name of the run, or the path of its folder.", metavar="RUN")],
    folder: RunsDirOption = DEFAULT_RUNS_DIR,
    stacks: Annotated[
        bool, typer.Option("--stacks/--no-stacks", help="Take the Python stacks of the ranks to blame.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say why a run does not go on, or why it ended: who is waited for, in which collective, and where that rank is.

    Of a run that goes on it shows where every rank on this host is. The ranks of a run that failed are shown as they
    were; those of other hosts are not.
    """
    from danlu.report.flight_tables import flights_json, flights_table
    from danlu.report.recoveries import format_recovery
    from danlu.report.run_tables import find_run
    from danlu.resilience.describe import describe_diagnosis
    from danlu.resilience.diagnosis import Diagnosis, diagnose
    from danlu.resilience.host_watch import moves_within, view_ranks
    from danlu.resilience.stacks import main_stack, read_stacks
    from danlu.spec import EndEvent, RecoveryEvent

    found = find_run(run, folder)
    views = view_ranks(found.path)
    history = list(found.read_events())
    *_, end = (None, *(event for event in history if isinstance(event, EndEvent)))
    recoveries = [event for event in history if isinstance(event, RecoveryEvent)]
    if not views:
        if end is None:
            fail(f"nothing is known of {found.name}'s ranks on this host: it does not run here, or ended long ago")
        outcome = f"{found.name} {end.outcome} after step {end.step:,}{f': {end.message}' if end.message else ''}"
        if as_json:
            print_json({"outcome": end.outcome, "message": end.message})
        else:
            typer.echo(outcome)
        return
    alive = any(view.process.alive for view in views.values())
    goes_on = alive and moves_within(found.path, _LOOK_SECONDS)
    views = view_ranks(found.path)
    diagnosis = Diagnosis((), None, ()) if goes_on else diagnose(views)
    taken = {
        culprit.rank: text
        for culprit in diagnosis.culprits
        if stacks and (text := read_stacks(found.path, culprit.rank, culprit.pid))
    }
    if as_json:
        survived = [event.model_dump(mode="json") for event in recoveries]
        print_json(flights_json(views, diagnosis, taken) | {"recoveries": survived})
        return
    console = Console()
    console.print(flights_table(views, diagnosis))
    for event in recoveries[-_SHOWN_RECOVERIES:]:
        console.print_line(f"survived at step {event.step:,}: {format_recovery(event)}", "dim")
    if goes_on:
        console.print_line("\nthe run goes on")
    elif alive:
        console.print_line(f"\nnothing moves: {describe_diagnosis(diagnosis)}")
    elif end is not None and end.message:
        console.print_line(f"\n{end.message}")
    for culprit in diagnosis.culprits if stacks else ():
        if not (text := taken.get(culprit.rank, "")):
            console.print_line(
                f"\nrank {culprit.rank} cannot write its stack: it is stopped, dead, or not this user's", "dim"
            )
            continue
        console.print_line(f"\nwhere rank {culprit.rank} is, innermost first (all threads: --json)", "bold")
        for line in (main_stack(text) or text.splitlines())[:_STACK_LINES]:
            console.print_line(f"  {line}")
