"""`danlu chaos`: let faults happen to a run, as they will anyway, and see what it makes of them."""

import random
import time
from typing import TYPE_CHECKING, Annotated

import typer

from danlu.cli.ckpt_ref import fail
from danlu.cli.json_output import print_json
from danlu.cli.run_options import RunsDirOption
from danlu.report.terminal import Console
from danlu.spec.fault_mix import FAULT_MIXES, INJECTED_FAULTS, InjectedFault
from danlu.spec.run_folder import DEFAULT_RUNS_DIR

if TYPE_CHECKING:
    from danlu.report.event_tail import EventTail
    from danlu.spec import RecoveryEvent, RunFolder

_POLL_SECONDS = 0.05
_PATIENCE = 120.0
"""Seconds that a run has to recover."""
_ENDS_RUN: tuple[InjectedFault, ...] = ("preempt",)
_NO_RECOVERY: tuple[InjectedFault, ...] = ("corrupt", "straggle")
"""Faults that take no rank away: what is done about them is in the run's own events."""


def chaos(
    run: Annotated[str, typer.Argument(help="Name of a running run, or the path of its folder.", metavar="RUN")],
    folder: RunsDirOption = DEFAULT_RUNS_DIR,
    mix: Annotated[
        str | None, typer.Option(help=f"How often each fault occurs: {', '.join(FAULT_MIXES)}; llama3 if omitted.")
    ] = None,
    fault: Annotated[
        list[str] | None,
        typer.Option(help=f"Only this fault, instead of a mix; may be repeated: {', '.join(INJECTED_FAULTS)}."),
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Faults to inject.")] = 10,
    rate: Annotated[float, typer.Option(min=0.001, help="Faults per minute, at random times.")] = 6.0,
    rank: Annotated[int | None, typer.Option(min=0, help="Always this rank; any if omitted.")] = None,
    seed: Annotated[int | None, typer.Option(help="Draw the same faults again.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON per fault.")] = False,
) -> None:
    """Inject faults into a run on this host, and report how each was survived. Ends when the run does.

    Rehearse with a run that you can spare: what is injected really happens. A fault that ends a run on purpose
    (preempt) is left out of a mix, and is only injected when it is named.
    """
    from danlu.report.event_tail import EventTail
    from danlu.report.run_tables import find_run
    from danlu.resilience.injection import InjectionError, inject

    weights = _weights(mix, fault)
    found, drawn, console = find_run(run, folder), random.Random(seed), Console()
    events = EventTail(found.events)
    if not _ranks(found):
        fail(f"{found.name} has no rank on this host: start it with `danlu train`, then rehearse")
    survived, failed = 0, False
    for number in range(1, count + 1):
        time.sleep(drawn.expovariate(rate / 60))
        if not (ranks := _ranks(found)):
            typer.echo(f"the run has ended after {number - 1} faults", err=True)
            break
        kind = drawn.choices(list(weights), list(weights.values()))[0]
        victim = rank if rank is not None else drawn.choice(ranks)
        began = time.time()
        try:
            inject(found.path, kind, victim)
        except InjectionError as error:
            fail(str(error))
        recovery = None if kind in (*_ENDS_RUN, *_NO_RECOVERY) else _wait(events, began)
        survived += recovery is not None or kind in _NO_RECOVERY
        _report(console, number, count, kind, victim, began, recovery, as_json)
        if recovery is None and kind not in _NO_RECOVERY:
            failed = kind not in _ENDS_RUN
            break
    if not as_json:
        console.print_line(f"{survived} faults survived; `danlu show {found.name}` has the run's own account")
    if failed:
        raise typer.Exit(1)


def _weights(mix: str | None, named: list[str] | None) -> dict[InjectedFault, float]:
    if mix is not None and named:
        fail("--mix draws faults and --fault names them: give one of the two")
    mix = mix or "llama3"
    known: dict[str, InjectedFault] = {each: each for each in INJECTED_FAULTS}
    for name in named or ():
        if name not in known:
            fail(f"--fault must be one of {', '.join(known)}, but is {name}")
    if mix not in FAULT_MIXES:
        fail(f"--mix must be one of {', '.join(FAULT_MIXES)}, but is {mix}")
    if named:
        return {known[name]: 1.0 for name in named}
    return {kind: weight for kind, weight in FAULT_MIXES[mix].items() if kind not in _ENDS_RUN}


def _ranks(run: "RunFolder") -> list[int]:
    """The ranks of a run that live on this host."""
    from danlu.resilience.host_watch import view_ranks

    return [rank for rank, view in view_ranks(run.path).items() if view.process.alive]


def _wait(events: "EventTail", since: float) -> "RecoveryEvent | None":
    """The recovery that follows; None if the run ended instead."""
    from danlu.spec import EndEvent, RecoveryEvent

    while time.time() - since < _PATIENCE:
        for event in events.poll():
            if isinstance(event, RecoveryEvent) and event.time > since:
                return event
            if isinstance(event, EndEvent) and event.time > since:
                return None
        time.sleep(_POLL_SECONDS)
    return None


def _report(
    console: Console,
    number: int,
    count: int,
    kind: InjectedFault,
    rank: int,
    began: float,
    recovery: "RecoveryEvent | None",
    as_json: bool,
) -> None:
    if as_json:
        seconds = None if recovery is None else recovery.time - began
        step = None if recovery is None else recovery.step
        print_json({"fault": kind, "rank": rank, "seconds": seconds, "step": step}, indent=None)
        return
    outcome = "injected"
    if recovery is not None:
        outcome = f"went on from step {recovery.step:,} ({recovery.source}) after {recovery.time - began:.2f} s"
    elif kind in _ENDS_RUN:
        outcome = "the run saves and stops"
    elif kind not in _NO_RECOVERY:
        outcome = "the run did not go on: `danlu why` says more"
    console.print_line(f"{number:>4}/{count}  {kind:<10} rank {rank:<6} {outcome}")
