"""Writes the events of a run: JSON lines and TensorBoard."""

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from danlu.framework.atomic_append import AtomicAppendFile
from danlu.framework.event_metrics import MetricsSink, event_metrics
from danlu.framework.tensorboard import TensorBoardWriter
from danlu.spec.event import Event, SpikeEvent, WarningEvent
from danlu.spec.run_folder import RunFolder

MAX_BUFFERED_EVENTS = 10_000
"""Events kept in memory while the disk cannot be written."""


class EventWriter:
    """Appends events to the run's folder, on rank 0: metrics are global, so the other ranks have nothing to add.

    A disk that cannot be written never ends training: events wait in memory until it can, and are passed to
    `on_waiting` meanwhile.
    """

    def __init__(
        self,
        run: RunFolder,
        step: int = 0,
        on_waiting: Callable[[str], None] = lambda line: None,
        sinks: Sequence[MetricsSink] = (),
    ) -> None:
        """Append to what is there; TensorBoard scalars after `step`, which a resumed run repeats, are purged.

        Events are also passed to `sinks`, which are closed with this writer.
        """
        self._sinks = sinks
        with suppress(OSError):  # the first write reports it
            _drop_unfinished_line(run.events)
        self._events = AtomicAppendFile(run.events)
        self._charts = TensorBoardWriter(run.tensorboard, purge_step=step + 1 if step else None)
        self._waiting: deque[str] = deque(maxlen=MAX_BUFFERED_EVENTS)
        self._on_waiting = on_waiting
        self._warned = False

    def write(self, event: Event) -> None:
        """Add an event; other processes can read it when this returns, unless the disk cannot be written."""
        line = event.model_dump_json()
        self._waiting.append(line)
        if isinstance(event, SpikeEvent) and event.rewound_to is not None:
            self._charts.purge_from(event.rewound_to + 1)
        try:
            self._write_waiting()
            if (found := event_metrics(event)) is not None:
                step, metrics = found
                self._charts.add_scalars(step, event.time, metrics)
        except OSError as error:
            self._warn(error)
        if self._waiting:
            self._on_waiting(line)
        for sink in self._sinks:
            sink.add(event)

    def _write_waiting(self) -> None:
        self._events.append("".join(f"{line}\n" for line in self._waiting).encode())
        self._waiting.clear()

    def _warn(self, error: OSError) -> None:
        """Warn once that the run's folder cannot be written."""
        if self._warned:
            return
        self._warned = True
        message = (
            f"{self._events.path.parent} cannot be written (events, TensorBoard): {error.strerror}; training "
            f"continues; free space, or later events are lost (the newest {MAX_BUFFERED_EVENTS:,} are kept in memory)"
        )
        warning = WarningEvent(time=time.time(), rank=0, message=message).model_dump_json()
        self._waiting.append(warning)
        self._on_waiting(warning)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for sink in self._sinks:
            sink.close()  # may warn, which is an event
        with suppress(OSError):  # already reported at the first failure
            self._write_waiting()
        self._charts.close()
        self._events.close()


def _drop_unfinished_line(events: Path) -> None:
    """Drop the partial line that a killed process left: it is no event, and would corrupt the next one."""
    if events.exists():
        content = events.read_bytes()
        with events.open("r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)


class RankEvents:
    """The events of one rank: rank 0 passes them on, any other puts its warnings into its own log."""

    def __init__(self, rank: int) -> None:
        """Events wait in memory until `write_to` says where they go."""
        self.rank = rank
        self.waiting: list[Event] = []
        self._write: Callable[[Event], None] = self.waiting.append

    def write_to(self, write: Callable[[Event], None]) -> None:
        """Pass events on from now on; those that waited are the caller's to write."""
        self._write = write

    def write(self, event: Event) -> None:
        """Write one event of the run."""
        if self.rank == 0:
            self._write(event)

    def warn(self, message: str) -> None:
        """Warn the user, naming this rank."""
        if self.rank == 0:
            self._write(WarningEvent(time=time.time(), rank=0, message=message))
        else:
            sys.stderr.write(f"rank {self.rank}: {message}\n")
