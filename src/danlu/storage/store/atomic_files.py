"""Files that are durable when a function returns."""

import os
from contextlib import suppress
from pathlib import Path


def write_and_fsync(path: Path, content: str | bytes) -> None:
    """Write a file and fsync it; its directory entry is durable only after `fsync_dir`."""
    with path.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())


def atomic_replace(path: Path, content: str | bytes) -> None:
    """Replace a file, durably when this returns; a crash leaves the old one or the new one, complete."""
    temporary = path.with_name(f"{path.name}.partial")
    write_and_fsync(temporary, content)
    fsync_dir(path.parent)  # files that it refers to must be durable first
    temporary.rename(path)
    fsync_dir(path.parent)


def make_dirs_durable(folder: Path) -> None:
    """Create a folder and its parents; their names are durable when this returns, whichever process created them."""
    parent = folder.parent
    if not parent.is_dir():
        make_dirs_durable(parent)
    folder.mkdir(exist_ok=True)
    with suppress(PermissionError):  # a folder that may not be listed cannot be fsynced; it is not ours
        fsync_dir(parent)


def fsync_dir(folder: Path) -> None:
    """Wait until what was created, renamed or removed in a folder is durable."""
    fsync_file(folder)


def fsync_file(path: Path) -> None:
    """Wait until the content of a file that is written and closed is durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
