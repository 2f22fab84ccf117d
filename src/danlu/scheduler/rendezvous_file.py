"""The rendezvous endpoint of ranks on one host: a file in a folder that only its owner can access.

A port, even on loopback, is open to every user of the host, and `torch.distributed`'s store does not authenticate.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from danlu.storage.run_lock import process_start_time

_PREFIX = "danlu-rendezvous-"
_STALE_SECONDS = 600.0
"""Seconds that ranks may outlive their launcher; older folders are stale."""


@contextmanager
def rendezvous_file() -> Iterator[str]:
    """A new endpoint for `--store`, removed afterwards; leftovers of killed launchers are removed first.

    In the temporary folder, not in the run's: that may be on a slow shared file system.
    """
    _sweep(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
    try:
        yield f"file:{folder / 'store'}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(root: Path) -> None:
    for folder in root.glob(f"{_PREFIX}[0-9]*-*"):
        with suppress(OSError):  # another launcher may sweep at the same time
            found = folder.lstat()
            pid = int(folder.name.removeprefix(_PREFIX).partition("-")[0])
            if (
                found.st_uid == os.geteuid()
                and not process_start_time(pid)
                and time.time() - found.st_mtime > _STALE_SECONDS
            ):
                shutil.rmtree(folder, ignore_errors=True)
