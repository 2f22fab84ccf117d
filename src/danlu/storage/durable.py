"""Files that are on disk when a function returns, and not only on their way there."""

import os
from pathlib import Path


def write_durably(path: Path, content: str | bytes) -> None:
    """Write a file and wait until its content is on disk; its name is after `sync_folder`."""
    with path.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until what was made, renamed or removed in a folder is so on disk."""
    sync_file(folder)


def sync_file(path: Path) -> None:
    """Wait until the content of a file that is written and closed is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
