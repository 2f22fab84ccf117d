"""A run's metrics in TensorBoard's format, written synchronously.

Not with tensorboardX's own writer: its thread dies at the first disk error, and the next `add_scalar` then blocks
forever.
"""

import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

import google_crc32c
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.summary import scalar

from danlu.framework.atomic_append import AtomicAppendFile


class TensorBoardWriter:
    """One event file in a folder that TensorBoard reads."""

    def __init__(self, folder: Path, purge_step: int | None = None) -> None:
        """Scalars of `purge_step` and later in other files of the folder are dropped."""
        self._file = AtomicAppendFile(folder / f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}")
        self._head = [Event(wall_time=time.time(), file_version="brain.Event:2")]
        if purge_step is not None:
            self.purge_from(purge_step)

    def purge_from(self, step: int) -> None:
        """Drop what was added for `step` and later ones, with the next scalars that are added."""
        start = SessionLog(status=SessionLog.START)
        self._head.append(Event(wall_time=time.time(), step=step, session_log=start))

    def add_scalars(self, step: int, moment: float, scalars: Mapping[str, float]) -> None:
        """Add the scalars of a step; on `OSError` none of them is written."""
        events = [Event(wall_time=moment, step=step, summary=scalar(name, value)) for name, value in scalars.items()]
        self._file.append(b"".join(_record(event.SerializeToString()) for event in (*self._head, *events)))
        self._head = []

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _record(data: bytes) -> bytes:
    """TensorFlow's record: length, its checksum, data, its checksum."""
    length = struct.pack("<Q", len(data))
    return length + _masked_sum(length) + data + _masked_sum(data)


def _masked_sum(data: bytes) -> bytes:
    found = google_crc32c.value(data)
    return struct.pack("<I", ((found >> 15 | found << 17) + 0xA282EAD8) & 0xFFFFFFFF)
