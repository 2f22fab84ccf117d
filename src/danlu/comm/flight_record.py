"""What a rank did last, in memory that outlives it: its collectives, its place in the step, a heartbeat. No torch.

A file of the host's memory (`/dev/shm`) with a header, the rank's groups, and a ring of its newest collectives. The
rank writes without locks between processes; whoever reads drops a collective that was being written.
"""

import hashlib
import mmap
import os
import shutil
import struct
import tempfile
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

CAPACITY = 512
"""Newest collectives that are kept."""
_SLOTS = CAPACITY + 16
"""Places in the ring: new collectives may take the oldest ones while somebody reads."""
MAX_GROUPS = 64
_MAGIC = b"DANLUFR1"
_HEADER = struct.Struct("<8siiqqdddd48s")
"""Magic, rank, pid, collectives so far, step, start of the clock, heartbeat, since when in the phase, spare, phase."""
_GROUP = struct.Struct("<64s24s104s")
"""Name that all members share, axes, ranks."""
_RECORD = struct.Struct("<qqddi24sHxx")
"""Number in its group from 1, bytes, entered, left, peer, operation, group."""
_GROUPS_AT = 256
_RECORDS_AT = _GROUPS_AT + MAX_GROUPS * _GROUP.size
FILE_BYTES = _RECORDS_AT + _SLOTS * _RECORD.size
NO_PEER = -1


class FlightRecordError(RuntimeError):
    """A flight record cannot be kept or read; the message says where and why."""


@dataclass(frozen=True)
class CollectiveRecord:
    """One collective as one rank entered it."""

    operation: str
    group: str
    """Name that all members of the group share."""
    axes: str
    """What the mesh calls the group."""
    members: tuple[int, ...]
    """The group's ranks in its order; none if they are too many and too irregular to be kept."""
    sequence: int
    """Its number among the collectives of the group on this rank, from 1; sends and receives by peer."""
    size: int
    """Bytes of this rank's part."""
    entered: float
    """Seconds of this host's monotonic clock."""
    left: float | None
    """When it was seen to be over, within a heartbeat; None while it goes on, and for what nobody waits for."""
    peer: int | None
    """The other rank of a send or receive, as the group numbers it."""


@dataclass(frozen=True)
class RankFlight:
    """What one rank did last."""

    rank: int
    pid: int
    collectives: int
    """Collectives entered so far."""
    step: int
    """Steps done."""
    phase: str
    """Where in the step it is."""
    phase_since: float
    heartbeat: float
    """When a thread of the rank ran last, in seconds of this host's monotonic clock."""
    clock_start: float
    """What to add to its times for seconds since the epoch."""
    records: tuple[CollectiveRecord, ...]
    """Newest collectives, oldest first."""

    @property
    def place(self) -> tuple[int, int, str, float]:
        """What changes when it moves: collectives, steps, the phase, and when it entered that."""
        return self.collectives, self.step, self.phase, self.phase_since


def flight_folder(run: Path) -> Path:
    """Where the ranks of a run on this host keep their records: the same place for everyone who knows the run."""
    base = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
    digest = hashlib.sha256(os.fsencode(run.resolve())).hexdigest()[:16]
    return base / f"danlu-{run.stat().st_uid}" / digest


def flight_path(run: Path, rank: int) -> Path:
    """The record of one rank."""
    return flight_folder(run) / f"rank-{rank}.flight"


def stack_path(run: Path, rank: int) -> Path:
    """Where a rank writes the Python stacks of its threads when it is asked to."""
    return flight_folder(run) / f"rank-{rank}.stack"


def make_flight_folder(run: Path) -> Path:
    """Make the folder of a run's records, which no other user can read; raises `FlightRecordError`."""
    inner = flight_folder(run)
    for folder in (inner.parent, inner):
        try:
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            found = folder.lstat()
        except OSError as error:
            raise FlightRecordError(f"{folder} cannot be made: {error.strerror}") from None
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise FlightRecordError(f"{folder} must be of this user alone, but others own it or may enter it")
    return inner


class FlightWriter:
    """Writes the record of this rank; all threads may."""

    def __init__(self, path: Path, rank: int) -> None:
        """A new record in an existing folder; raises `FlightRecordError`."""
        try:
            path.unlink(missing_ok=True)  # a reader of the last run's keeps it
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise FlightRecordError(f"{path} cannot be written: {error.strerror}") from None
        try:
            os.truncate(descriptor, FILE_BYTES)
            self._memory = mmap.mmap(descriptor, FILE_BYTES)
        finally:
            os.close(descriptor)
        self.path, self._rank, self._lock = path, rank, threading.Lock()
        self._clock_start = time.time() - time.monotonic()
        self._count, self._step = 0, 0
        self._phase, self._since, self._heartbeat = b"", time.monotonic(), time.monotonic()
        self._groups: dict[str, int] = {}
        self._sequences: dict[tuple[str, str, int], int] = {}
        self._write_header()

    def enter_phase(self, phase: str, step: int) -> None:
        """This rank is now at `phase` of the step after `step`."""
        self._phase, self._step, self._since = phase.encode()[:48], step, time.monotonic()
        self._write_header()

    def beat(self) -> None:
        """This rank's Python runs."""
        self._heartbeat = time.monotonic()
        self._write_header()

    def knows(self, group: str) -> bool:
        """Whether the group has been described."""
        return group in self._groups

    def describe(self, group: str, axes: str, members: Sequence[int]) -> None:
        """Describe a group before its first collective."""
        with self._lock:
            number = self._groups[group] = len(self._groups) % MAX_GROUPS
            at = _GROUPS_AT + number * _GROUP.size
            _GROUP.pack_into(self._memory, at, _fit(group, 64), _fit(axes, 24), _write_members(members))

    def enter(self, operation: str, group: str, size: int, peer: int | None) -> int:
        """A collective of a described group begins; returns what `leave` takes."""
        with self._lock:
            key = (group, operation if peer is not None else "", NO_PEER if peer is None else peer)
            sequence = self._sequences[key] = self._sequences.get(key, 0) + 1
            ticket, self._count = self._count, self._count + 1
            _RECORD.pack_into(
                self._memory,
                _RECORDS_AT + ticket % _SLOTS * _RECORD.size,
                sequence,
                size,
                time.monotonic(),
                0.0,
                NO_PEER if peer is None else peer,
                _fit(operation, 24),
                self._groups[group],
            )
            self._write_header()
        return ticket

    def leave(self, ticket: int) -> None:
        """A collective is over."""
        with self._lock:
            if self._count - ticket <= CAPACITY:  # else it has been overwritten
                at = _RECORDS_AT + ticket % _SLOTS * _RECORD.size + struct.calcsize("<qqd")
                struct.pack_into("<d", self._memory, at, time.monotonic())

    def begin_world(self) -> None:
        """Forget the groups and collectives so far: those of a new world are numbered anew, on every rank."""
        with self._lock:
            self._groups.clear()
            self._sequences.clear()
            self._count = 0
            self._memory[_RECORDS_AT:] = bytes(FILE_BYTES - _RECORDS_AT)
            self._write_header()

    def remove(self) -> None:
        """Delete the record of a rank that ended well."""
        self.path.unlink(missing_ok=True)
        with suppress(OSError):
            self.path.parent.rmdir()

    def _write_header(self) -> None:
        _HEADER.pack_into(
            self._memory,
            0,
            _MAGIC,
            self._rank,
            os.getpid(),
            self._count,
            self._step,
            self._clock_start,
            self._heartbeat,
            self._since,
            0.0,
            self._phase,
        )


def read_flight(path: Path, *, collectives: bool = True, newest: bool = False) -> RankFlight:
    """The record of a rank, dead or alive, with or without its collectives; or with the newest of every group alone.

    Raises `FlightRecordError` if it is none, `OSError` if it is not there.
    """
    with path.open("rb") as file:
        raw = file.read(FILE_BYTES if collectives else _GROUPS_AT)
    if len(raw) < (FILE_BYTES if collectives else _GROUPS_AT) or raw[:8] != _MAGIC:
        raise FlightRecordError(f"{path} must be a flight record of {FILE_BYTES} bytes, but is another file")
    _, rank, pid, count, step, clock_start, heartbeat, since, _, phase = _HEADER.unpack_from(raw)
    kept = range(max(0, count - CAPACITY), count) if collectives else range(0)
    records = [_record(raw, number) for number in (_newest(raw, kept) if newest else kept)]
    return RankFlight(
        rank=rank,
        pid=pid,
        collectives=count,
        step=step,
        phase=_text(phase),
        phase_since=since,
        heartbeat=heartbeat,
        clock_start=clock_start,
        records=tuple(record for record in records if record is not None),
    )


def read_flights(run: Path, *, collectives: bool = True, newest: bool = False) -> list[RankFlight]:
    """The records of all ranks of a run on this host, by rank; those that cannot be read are left out."""
    found = []
    for path in flight_folder(run).glob("rank-*.flight"):
        with suppress(OSError, FlightRecordError):
            found.append(read_flight(path, collectives=collectives, newest=newest))
    return sorted(found, key=lambda flight: flight.rank)


def remove_snapshots(run: Path, keep_ranks: Collection[int] = ()) -> None:
    """Free the states that ranks of a run kept in this host's memory, but for some ranks'."""
    for path in flight_folder(run).glob("[0-9]*-[0-9]"):
        if int(path.name.partition("-")[0]) not in keep_ranks:
            path.unlink(missing_ok=True)
    if keep_ranks:
        return
    shutil.rmtree(flight_folder(run) / "copies", ignore_errors=True)  # of other hosts' ranks
    with suppress(OSError):  # records of ranks that failed stay
        flight_folder(run).rmdir()


def remove_flights(run: Path, *, keep_snapshots: bool = False) -> None:
    """Delete what a run's ranks left behind on this host."""
    if not keep_snapshots:
        shutil.rmtree(flight_folder(run), ignore_errors=True)
        return
    for path in flight_folder(run).glob("rank-*"):
        path.unlink(missing_ok=True)


def _newest(raw: bytes, kept: range) -> list[int]:
    """Numbers of the newest collective of every group, and of the newest send and receive of every peer."""
    ring = list(_RECORD.iter_unpack(raw[_RECORDS_AT:FILE_BYTES]))
    found: dict[tuple[int, int, bytes], int] = {}
    for number in kept:
        _, _, _, _, peer, operation, group = ring[number % _SLOTS]
        found[group, peer, operation if peer != NO_PEER else b""] = number
    return sorted(found.values())


def _record(raw: bytes, number: int) -> CollectiveRecord | None:
    at = _RECORDS_AT + number % _SLOTS * _RECORD.size
    sequence, size, entered, left, peer, operation, group = _RECORD.unpack_from(raw, at)
    if not sequence or not operation[0] or group >= MAX_GROUPS:  # being written
        return None
    name, axes, members = _GROUP.unpack_from(raw, _GROUPS_AT + group * _GROUP.size)
    return CollectiveRecord(
        operation=_text(operation),
        group=_text(name),
        axes=_text(axes),
        members=_read_members(_text(members)),
        sequence=sequence,
        size=size,
        entered=entered,
        left=left or None,
        peer=None if peer == NO_PEER else peer,
    )


def _write_members(members: Sequence[int]) -> bytes:
    """Ranks as text: `first:step:count` if they are evenly spaced, else one by one; nothing if that does not fit."""
    steps = {after - before for before, after in pairwise(members)}
    even = f"{members[0]}:{min(steps, default=1)}:{len(members)}" if len(steps) <= 1 else ""
    raw = (even or ",".join(map(str, members))).encode()
    return raw if len(raw) <= 104 else b""


def _read_members(text: str) -> tuple[int, ...]:
    if ":" in text:
        first, step, count = map(int, text.split(":"))
        return tuple(range(first, first + step * count, step))
    return tuple(map(int, text.split(","))) if text else ()


def _fit(text: str, width: int) -> bytes:
    return text.encode()[:width]


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")
