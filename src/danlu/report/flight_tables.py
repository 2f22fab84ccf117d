"""What every rank of a run does, as its host sees it."""

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.markup import escape
from rich.table import Table

from danlu.comm.flight_record import CollectiveRecord
from danlu.report import formatting
from danlu.resilience.describe import describe_collective, describe_diagnosis
from danlu.resilience.diagnosis import HEARTBEAT_LIMIT, Diagnosis, RankView


def flights_table(views: Mapping[int, RankView], found: Diagnosis) -> Table:
    """Every rank of this host: where it is, since when, and its newest collective; those to blame in red."""
    table = Table(box=None, header_style="dim", pad_edge=False)
    for name in ("rank", "process", "steps", "phase", "for", "newest collective", ""):
        table.add_column(name, justify="right" if name in ("rank", "steps", "for") else "left")
    blamed = {culprit.rank for culprit in found.culprits}
    now = time.monotonic()
    for rank, view in views.items():
        flight = view.flight
        newest = flight.records[-1] if flight.records else None
        table.add_row(
            str(rank),
            process_text(view),
            f"{flight.step:,}",
            escape(flight.phase),
            formatting.duration(now - flight.phase_since),
            escape(describe_collective(newest)) if newest else "",
            _state(newest, now),
            style="red" if rank in blamed else None,
        )
    return table


def process_text(view: RankView) -> str:
    """The state of a rank's process in a word or two."""
    if not view.process.alive:
        return "ended"
    if view.process.stopped:
        return "stopped"
    if view.heartbeat_age > HEARTBEAT_LIMIT:
        return f"silent for {formatting.duration(view.heartbeat_age)}"
    return "runs"


def _state(record: CollectiveRecord | None, now: float) -> str:
    if record is None:
        return ""
    return f"in it for {formatting.duration(now - record.entered)}" if record.left is None else "over"


def flights_json(views: Mapping[int, RankView], found: Diagnosis, stacks: Mapping[int, str]) -> dict[str, Any]:
    """The same for machines."""
    now = time.monotonic()
    return {
        "diagnosis": describe_diagnosis(found),
        "culprits": [asdict(culprit) | {"stacks": stacks.get(culprit.rank, "")} for culprit in found.culprits],
        "collective": None if found.collective is None else describe_collective(found.collective),
        "waiting": list(found.waiting),
        "ranks": [
            {
                "rank": rank,
                "pid": view.flight.pid,
                "process": process_text(view),
                "step": view.flight.step,
                "phase": view.flight.phase,
                "phase_seconds": round(now - view.flight.phase_since, 3),
                "collectives": view.flight.collectives,
                "newest": describe_collective(view.flight.records[-1]) if view.flight.records else None,
                "in_collective": bool(view.flight.records) and view.flight.records[-1].left is None,
            }
            for rank, view in views.items()
        ],
    }
