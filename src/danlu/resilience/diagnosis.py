"""Which rank keeps the others waiting, and why: a pure function of what every rank did last."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from danlu.comm.flight_record import CollectiveRecord, RankFlight
from danlu.resilience.process_state import ProcessState

HEARTBEAT_LIMIT = 1.0
"""Seconds without a heartbeat after which no thread of a rank can have run: one comes every twentieth of a second."""

Cause = Literal["dead", "stopped", "file system", "python lock", "data", "storage", "outside", "network", "mismatch"]
"""Why a rank does not come: its process has ended; it was stopped by a signal; it waits for a file system that does not
answer; one thread keeps Python's lock, so that no other runs; it reads data; it saves; it is elsewhere in its own code;
all have come, and the collective does not end; ranks have entered different collectives."""

_PHASE_CAUSES: dict[str, Cause] = {"reading data": "data", "saving": "storage", "last save": "storage"}


@dataclass(frozen=True)
class RankView:
    """One rank as its host sees it."""

    flight: RankFlight
    process: ProcessState
    heartbeat_age: float
    """Seconds since a thread of it ran."""


@dataclass(frozen=True)
class Culprit:
    """A rank that others wait for, and that waits for nobody."""

    rank: int
    cause: Cause
    step: int
    """Steps it has done."""
    phase: str
    pid: int


@dataclass(frozen=True)
class Diagnosis:
    """Why a run does not go on."""

    culprits: tuple[Culprit, ...]
    """None if nobody waits, not even for data or storage."""
    collective: CollectiveRecord | None
    """Where the others wait."""
    waiting: tuple[int, ...]
    """Ranks that wait there."""


def diagnose(views: Mapping[int, RankView]) -> Diagnosis:
    """Follow who waits for whom to those who wait for nobody."""
    entered = {rank: _entered(view.flight.records) for rank, view in views.items()}
    stuck = {rank for rank, view in views.items() if _own_trouble(view)}

    def awaited_in(rank: int, record: CollectiveRecord) -> tuple[int, ...]:
        # Who has entered and then stopped does not do its part either.
        return (*_missing(rank, record, entered), *(each for each in _partners(rank, record) if each in stuck))

    pending: dict[int, CollectiveRecord | None] = {}
    waits_for: dict[int, tuple[int, ...]] = {}
    for rank, view in views.items():
        records = _unfinished(view)
        pending[rank] = next((each for each in records if awaited_in(rank, each)), records[-1] if records else None)
        if (record := pending[rank]) is not None:
            waits_for[rank] = awaited_in(rank, record)
    awaited = {rank for missing in waits_for.values() for rank in missing}
    roots = sorted((awaited | stuck) - {rank for rank in waits_for if waits_for[rank] and rank not in stuck})
    culprits = tuple(_culprit(rank, views) for rank in roots if rank in views)
    if not culprits and (met := _all_there(waits_for)):
        cause: Cause = "mismatch" if _operations(met, pending) > 1 else "network"
        culprits = tuple(_culprit(rank, views, cause) for rank in met)
    if not culprits and not waits_for:
        culprits = tuple(_culprit(rank, views) for rank, view in views.items() if view.flight.phase in _PHASE_CAUSES)
    blamed = {each.rank for each in culprits}
    return Diagnosis(culprits, *_largest_wait(pending, waits_for, blamed))


def _entered(records: Iterable[CollectiveRecord]) -> dict[tuple[str, str, int | None], int]:
    """The number of the newest collective of every group, and of the newest send and receive of every peer."""
    return {_channel(record): record.sequence for record in records}


def _channel(record: CollectiveRecord) -> tuple[str, str, int | None]:
    return record.group, record.operation if record.peer is not None else "", record.peer


def _unfinished(view: RankView) -> list[CollectiveRecord]:
    """The newest collective of every group, if it is not over as far as the rank knows; oldest first.

    The end of one that nobody waited for may have been missed: all have entered it, so that it keeps nobody.
    """
    newest = {_channel(record): record for record in view.flight.records}
    return sorted((each for each in newest.values() if each.left is None), key=lambda record: record.entered)


def _missing(
    rank: int, record: CollectiveRecord, entered: Mapping[int, Mapping[tuple[str, str, int | None], int]]
) -> tuple[int, ...]:
    """The ranks that have not entered a collective which this rank is in."""
    if record.peer is not None:
        if not record.members or rank not in record.members:
            return ()
        other = record.members[record.peer]
        answer = {"send": "receive", "receive": "send"}[record.operation]
        channel = (record.group, answer, record.members.index(rank))
        return (other,) if entered.get(other, {}).get(channel, 0) < record.sequence else ()
    members = record.members or tuple(each for each, seen in entered.items() if _channel(record) in seen)
    return tuple(
        each
        for each in members
        if each != rank and each in entered and entered[each].get(_channel(record), 0) < record.sequence
    )


def _partners(rank: int, record: CollectiveRecord) -> Iterator[int]:
    """The other ranks of a collective that this rank is in."""
    members = record.members if record.peer is None else record.members[record.peer : record.peer + 1]
    return (each for each in members if each != rank)


def _own_trouble(view: RankView) -> Cause | None:
    """What is wrong with a rank whatever the others do."""
    if not view.process.alive:
        return "dead"
    if view.process.stopped:
        return "stopped"
    if view.heartbeat_age > HEARTBEAT_LIMIT:
        return "file system" if view.process.in_uninterruptible_wait else "python lock"
    return None


def _culprit(rank: int, views: Mapping[int, RankView], cause: Cause | None = None) -> Culprit:
    view = views[rank]
    cause = cause or _own_trouble(view) or _PHASE_CAUSES.get(view.flight.phase, "outside")
    return Culprit(rank, cause, view.flight.step, view.flight.phase, view.flight.pid)


def _all_there(waits_for: Mapping[int, tuple[int, ...]]) -> list[int]:
    """Ranks in a collective that everybody has entered."""
    return sorted(rank for rank, missing in waits_for.items() if not missing)


def _operations(ranks: Iterable[int], pending: Mapping[int, CollectiveRecord | None]) -> int:
    """Different operations that ranks are in as the same collective of a group."""
    found: dict[tuple[str, int], set[str]] = {}
    for record in _records(ranks, pending):
        if record.peer is None:
            found.setdefault((record.group, record.sequence), set()).add(record.operation)
    return max(map(len, found.values()), default=0)


def _records(ranks: Iterable[int], pending: Mapping[int, CollectiveRecord | None]) -> Iterator[CollectiveRecord]:
    return (record for rank in ranks if (record := pending[rank]) is not None)


def _largest_wait(
    pending: Mapping[int, CollectiveRecord | None], waits_for: Mapping[int, tuple[int, ...]], culprits: set[int]
) -> tuple[CollectiveRecord | None, tuple[int, ...]]:
    """The collective in which most ranks wait for a culprit, and these ranks."""
    rooms: dict[tuple[str, str, int], list[int]] = {}
    for rank, missing in waits_for.items():
        record = pending[rank]
        if record is not None and (culprits & set(missing) or rank in culprits):
            rooms.setdefault((record.group, record.operation, record.sequence), []).append(rank)
    there = max(rooms.values(), key=len, default=[])
    waiting = [rank for rank in there if rank not in culprits] or there  # who is stopped inside of it does not wait
    return (pending[there[0]] if there else None), tuple(sorted(waiting))
