"""What `danlu top` shows of a run: a headline, its ranks, and what happened to it."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from rich.text import Text

from danlu.comm.rank_layout import RankLayout, dense_layout
from danlu.report import formatting
from danlu.report.event_tail import EventTail
from danlu.report.flight_tables import process_text
from danlu.report.progress_display import recent_steps, recent_tokens_per_second
from danlu.report.recoveries import format_recovery
from danlu.report.run_history import RunHistory
from danlu.report.spikes import format_spike
from danlu.resilience.describe import describe_collective
from danlu.resilience.diagnosis import RankView
from danlu.resilience.host_watch import view_ranks
from danlu.resilience.straggler_watch import StragglerWatch
from danlu.spec import (
    EndEvent,
    Event,
    RecoveryEvent,
    ResumeEvent,
    RunFolder,
    SaveEvent,
    SpikeEvent,
    StartEvent,
    WarningEvent,
    load_cluster,
    load_plan,
)


class LiveRun:
    """A run as it goes: `poll` for its events, `rows` for its ranks on this host."""

    def __init__(self, run: RunFolder) -> None:
        self.run, self.history = run, RunHistory()
        self._tail, self._stragglers = EventTail(run.events), StragglerWatch()
        cluster = load_cluster(str(run.cluster)) if run.cluster.exists() else None
        self._layout = dense_layout(load_plan(run.plan), cluster) if run.plan.exists() else None

    def poll(self) -> list[Event]:
        """New events, which are in the history too."""
        fresh = self._tail.poll()
        self.history.add(fresh)
        return fresh

    def rows(self) -> list["RankRow"]:
        """Where every rank of this host is."""
        views = view_ranks(self.run.path, newest=True)
        self._stragglers.look(views)
        return rank_rows(views, self._stragglers.shares(), self._layout, time.monotonic())


@dataclass(frozen=True)
class RankRow:
    """One rank of this host."""

    rank: int
    place: str
    """Its coordinates in the layout."""
    process: str
    step: int
    phase: str
    seconds: float
    """In that phase."""
    collective: str
    """Its newest one, while it is in it."""
    share: float
    """Of the other ranks' time, spent waiting for it."""


def rank_rows(
    views: Mapping[int, RankView], shares: Mapping[int, float], layout: RankLayout | None, now: float
) -> list[RankRow]:
    """Every rank of this host; `now` is of its monotonic clock."""
    rows = []
    for rank, view in sorted(views.items()):
        flight = view.flight
        newest = flight.records[-1] if flight.records else None
        rows.append(
            RankRow(
                rank=rank,
                place=_place(rank, layout),
                process=process_text(view),
                step=flight.step,
                phase=flight.phase,
                seconds=max(0.0, now - flight.phase_since),
                collective=describe_collective(newest) if newest and newest.left is None else "",
                share=shares.get(rank, 0.0),
            )
        )
    return rows


def _place(rank: int, layout: RankLayout | None) -> str:
    if layout is None:
        return ""
    sizes = {axis: len(layout.ranks_along(0, [axis])) for axis in layout.axes}
    return " ".join(f"{axis} {at}" for axis, at in layout.coordinates(rank).items() if sizes[axis] > 1)


def headline(name: str, history: RunHistory) -> Text:
    """Progress, loss, speed, goodput and faults in two lines."""
    start, last, pace = history.start, history.last_step, recent_tokens_per_second(history)
    total = f" of {start.steps:,}" if start else ""
    first: list[str | tuple[str, str]] = [(name, "bold"), f"  step {history.step:,}{total}"]
    if start:
        first.append(f"  {start.world:,} ranks on {start.chip}")
    if history.end:
        first.append((f"  {history.end.outcome}", "bold"))
    second = []
    if last is not None:
        second.append(f"loss {formatting.loss(last.loss)}")
    if recent_steps(history) and pace:
        steps = recent_steps(history)
        second.append(f"{sum(step.seconds for step in steps) / len(steps):.2f} s a step")
        second.append(f"{formatting.count(pace)} tokens/s")
    if history.goodput is not None:
        second.append(f"goodput {history.goodput:.1%}")
    faults = len(history.recoveries)
    second.append(f"{faults:,} fault{'s' * (faults != 1)} survived")
    return Text.assemble(*first, "\n", "  ".join(second))


def event_line(event: Event) -> Text | None:
    """An event in one line; None for those that the headline has."""
    match event:
        case StartEvent():
            return Text(f"started at step {event.step:,} on {event.host or 'this host'}")
        case RecoveryEvent():
            return Text.assemble(("fault ", "red"), f"at step {event.step:,}: {format_recovery(event)}")
        case SpikeEvent():
            return Text.assemble(("spike ", "red"), format_spike(event))
        case WarningEvent():
            return Text.assemble(("warning ", "yellow"), event.message)
        case ResumeEvent():
            return Text(f"resumed from step {event.step:,}")
        case SaveEvent():
            return Text(f"saved step {event.step:,} in {event.seconds:.1f} s", style="dim")
        case EndEvent():
            return Text(f"{event.outcome} after step {event.step:,} {event.message}".rstrip(), style="bold")
        case _:
            return None
