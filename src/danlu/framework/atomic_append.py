"""A file that is appended to by full records: a record that cannot be written in full leaves nothing."""

import os
from contextlib import suppress
from pathlib import Path


class AtomicAppendFile:
    """Appends to a file, which is opened when there is something to write."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def append(self, record: bytes) -> None:
        """Add a record, readable by others when this returns; on `OSError` the file is as it was."""
        if self._descriptor is None:
            self.path.parent.mkdir(exist_ok=True)
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        before = os.fstat(self._descriptor).st_size
        left = memoryview(record)
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._descriptor, before)
            raise

    def close(self) -> None:
        """Close the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
