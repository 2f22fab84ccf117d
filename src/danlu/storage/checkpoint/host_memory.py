"""The folders of runs in this host's memory: private to their user, removed after a clean run, else reclaimed later.

They hold copies for speed only: committed checkpoints are in the store, so removing a folder never loses one.
"""

import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from danlu.spec import RunFolder, SpecError, load_recipe
from danlu.storage.checkpoint.run_store import run_store_location

RESUME_GRACE_SECONDS = 3600.0
"""Seconds after its last save that a dead run's copies are kept for its resume, unless another run needs the memory."""
_PRIVATE_MODE = 0o700
_OWNER_FILE = "owner"
_BUFFER_GLOB = "[0-9]*-[0-9]"
_RUN_FOLDER = re.compile(r"danlu-[0-9]+/[0-9a-f]{16}")
"""Name of a run's folder; no other folder is cleaned up."""


class StagingInUseError(RuntimeError):
    """A process of the run is alive on this host and uses this memory."""


@dataclass(frozen=True)
class ReclaimedMemory:
    """Freed memory of a dead run."""

    owner: str
    """The store of its checkpoints."""
    folder: Path
    bytes: int

    def __str__(self) -> str:
        return f"freed {self.bytes / 1e6:.1f} MB in {self.folder}, left by a dead run that saved to {self.owner}"


def store_hash(where: str) -> str:
    """A name for a store that can be a folder name, and is the same in every process."""
    return blake2b(where.encode(), digest_size=8).hexdigest()


def staging_folder(where: str) -> Path:
    """The folder of this store's staging buffers: in memory, the same for the next process that saves there."""
    memory = Path("/dev/shm")
    root = memory if memory.is_dir() else Path(tempfile.gettempdir())
    return root / f"danlu-{os.getuid()}" / store_hash(where)


def make_private_folder(folder: Path) -> None:
    """Create a folder that only this user can read; refuses one of another user, and a link."""
    parent = folder.parent
    if _is_run(folder):
        _make_private_dir(parent)
    else:
        parent.mkdir(parents=True, exist_ok=True)
    _make_private_dir(folder)


def write_owner_file(folder: Path, owner: str) -> None:
    """Write into a run's folder which store it belongs to."""
    (folder / _OWNER_FILE).write_text(owner, "utf-8")


def remove_dead_buffers(folder: Path) -> int:
    """Remove what dead processes left in a run's folder, and the folder if it is unused; returns the bytes freed.

    A live process holds the locks of its buffers: while there is one, only dead buffers are removed.
    """
    freed = sum([_remove_if_dead(buffer) for buffer in _matching(folder, _BUFFER_GLOB)])
    if any(_matching(folder, _BUFFER_GLOB)):
        return freed
    for left in _matching(folder, "step-*"):
        freed += _tree_bytes(left)
        shutil.rmtree(left, ignore_errors=True)  # every rank of the host does this, some a moment later
    for left in (*_matching(folder, "*.new"), folder / _OWNER_FILE):
        left.unlink(missing_ok=True)
    with suppress(OSError):  # it is not empty, or already removed
        folder.rmdir()
        if _is_run(folder):
            folder.parent.rmdir()
    return freed


def reclaim_dead_runs(mine: Path, older_than: float = RESUME_GRACE_SECONDS) -> list[ReclaimedMemory]:
    """Free what other dead runs of this user left on this host more than so many seconds ago; returns what was freed.

    `mine` is the folder of the run that starts: what an earlier process of the same run left is kept for its resume.
    """
    if not _is_run(mine):
        return []
    return [found for other in _other_run_folders(mine) if other != mine and (found := _reclaim(other, older_than))]


def free_run_memory(run: RunFolder) -> int:
    """Free the memory of a dead run on this host; returns the bytes. `StagingInUseError` if a process is alive."""
    try:
        where, _ = run_store_location(run, load_recipe(run.recipe).checkpoint)
    except (OSError, SpecError):  # the recipe is no longer readable: use the default location
        where = str(run.checkpoints)
    folder = staging_folder(where if "://" in where else str(Path(where).resolve()))
    if _in_use(folder):
        raise StagingInUseError(
            f"{folder} must not be in use, but a process of run {run.path} is alive on this host; stop the run first"
        )
    return remove_dead_buffers(folder)


def _reclaim(folder: Path, older_than: float) -> ReclaimedMemory | None:
    """Clear one run's folder if it is dead and old enough; None if it is not, or was empty."""
    try:
        if time.time() - folder.stat().st_mtime < older_than or _in_use(folder):  # each save changes the folder
            return None
        owner = (
            (folder / _OWNER_FILE).read_text("utf-8", "replace")
            if (folder / _OWNER_FILE).is_file()
            else "an unknown store"
        )
    except FileNotFoundError:
        return None  # another rank was faster
    freed = remove_dead_buffers(folder)
    return ReclaimedMemory(owner, folder, freed) if freed else None


def _other_run_folders(mine: Path) -> Iterator[Path]:
    for folder in sorted(_matching(mine.parent, "[0-9a-f]" * 16)):
        if folder.is_dir() and not folder.is_symlink():
            yield folder


def _in_use(folder: Path) -> bool:
    return any(_locked(buffer) for buffer in _matching(folder, _BUFFER_GLOB))


def _locked(buffer: Path) -> bool:
    """Whether the process of a buffer is alive: its lock is released when it exits."""
    try:
        descriptor = os.open(buffer, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _remove_if_dead(buffer: Path) -> int:
    """Remove the buffer of a dead process, whatever its rank was; returns the bytes freed."""
    try:
        descriptor = os.open(buffer, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return 0  # another rank of this host was faster
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = os.fstat(descriptor)
        buffer.unlink(missing_ok=True)
    except BlockingIOError:
        return 0  # it is in use
    finally:
        os.close(descriptor)
    return _bytes_freed_by_unlink(found)


def _tree_bytes(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):  # ignores folders that another rank of this host removes meanwhile
        for name in names:
            with suppress(FileNotFoundError):
                total += _bytes_freed_by_unlink(Path(parent, name).lstat())
    return total


def _bytes_freed_by_unlink(file: os.stat_result) -> int:
    """Bytes freed with this name: a published buffer has two names, and is counted at the second."""
    return file.st_blocks * 512 if file.st_nlink == 1 else 0


def _matching(folder: Path, pattern: str) -> list[Path]:
    """Entries of a folder that match; none if another process of this host removes it meanwhile."""
    try:
        return list(folder.glob(pattern))
    except FileNotFoundError:
        return []


def _is_run(folder: Path) -> bool:
    return _RUN_FOLDER.fullmatch(f"{folder.parent.name}/{folder.name}") is not None


def _make_private_dir(folder: Path) -> None:
    folder.mkdir(mode=_PRIVATE_MODE, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(
            f"{folder} must be a folder of user {os.getuid()}, who trains here, but is "
            f"{'not a folder' if not stat.S_ISDIR(found.st_mode) else f'of user {found.st_uid}'}; have it removed"
        )
    if stat.S_IMODE(found.st_mode) != _PRIVATE_MODE:
        folder.chmod(_PRIVATE_MODE)
