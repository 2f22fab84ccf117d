"""Files that are on disk when a function returns, and not only on their way there."""

import os
from pathlib import Path


def write_durably(path: Path, text: str) -> None:
    """Write a text file and wait until its content is on disk; its name is after `sync_folder`."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until what was made, renamed or removed in a folder is so on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
