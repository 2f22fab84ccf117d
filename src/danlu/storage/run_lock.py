"""The lock of a run: one per folder, acquired before anything in it is written, naming its holder. No torch.

The lock is the kernel's and belongs to an open file, not to a process (an "open file description" lock): processes that
inherit the descriptor hold it too, and it is released when the last of them exits, however it ended. Testing whether
it is held changes nothing and needs no write permission. On NFS the server keeps it, so it works between hosts as well.
"""

import errno
import fcntl
import os
import pwd
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Annotated, Self

from pydantic import AfterValidator, ValidationError

from danlu.spec.description import SpecModel
from danlu.spec.run_folder import RunFolder

_FLOCK = "hhqqi4x"  # struct flock: type, whence, start, length (0: to the end), pid
_LOCKS_UNSUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
_POLL_SECONDS = 0.05
_EXIT_SECONDS = 20.0
"""How long ranks may take to exit after their launcher was killed: a second, on a busy machine several."""
_HOLDER_WRITE_TIMEOUT = 0.5
"""Seconds a holder has to write its name after it acquired the lock."""


class RunError(Exception):
    """A run cannot be started, changed or removed now; the message is one line with the reason and what to do."""


def _printable(text: str) -> str:
    """Others may have written the lock file: nothing in it may reach a terminal as an escape sequence."""
    if not text.isprintable() or len(text) > 255:
        raise ValueError("a name must be printable")
    return text


Printable = Annotated[str, AfterValidator(_printable)]


class LockHolder(SpecModel):
    """The process that runs a run."""

    pid: int
    host: Printable
    user: Printable
    since: float
    """Seconds since the epoch."""
    started: int = 0
    """Start time of the process in kernel clock ticks, so that a reused pid is not mistaken for it."""
    job: int | None = None
    """Slurm job id, if Slurm started it."""

    @property
    def is_local(self) -> bool:
        """Whether it runs on this host."""
        return self.host == socket.gethostname()

    @property
    def is_alive(self) -> bool:
        """Whether the process itself still exists, on this host."""
        return self.is_local and process_start_time(self.pid) == self.started

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.since).astimezone().strftime("%Y-%m-%d %H:%M:%S")
        job = f"job {self.job}, " if self.job else ""
        return f"{job}pid {self.pid} on {self.host}, started by {self.user}, since {since}"


UNKNOWN_HOLDER = LockHolder(pid=0, host="an unknown host", user="an unknown user", since=0.0)
"""A holder that could not write its name."""


@dataclass
class RunLock:
    """A lock that is held; as a context manager, until its end."""

    descriptor: int
    """A child that inherits it holds the lock too."""
    warning: str = ""
    """Why the run is not locked: a file system without locks."""

    def release(self) -> None:
        """Release it; children that inherited it keep holding it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def acquire(
    run: RunFolder, *, job: int | None = None, descriptor: int | None = None, pid: int | None = None, wait: float = 0.0
) -> RunLock:
    """Acquire a run's lock and write the holder's name into it; `RunError` names the holder if it is taken.

    With a `descriptor` of the lock file that another process has open, that process, `pid`, is the holder.
    Waits up to `wait` seconds for a holder that is about to exit, and a while in any case for the ranks of one that was
    killed: they notice, and exit too.
    """
    if descriptor is None:
        descriptor = _open_lock_file(run)
    began = time.monotonic()
    while (warning := _lock(descriptor)) is None:
        waited = time.monotonic() - began
        if waited >= wait and not (waited < _EXIT_SECONDS and _ranks_are_exiting(read_holder(run))):
            os.close(descriptor)
            raise RunError(_busy_message(run))
        time.sleep(_POLL_SECONDS)
    _write_holder(descriptor, pid or os.getpid(), job)
    return RunLock(descriptor, warning)


def read_holder(run: RunFolder) -> LockHolder | None:
    """The process that runs a run now, or None; changes nothing."""
    try:
        descriptor = os.open(_lock_path(run), os.O_RDONLY)
    except OSError:
        return None
    try:
        deadline = time.monotonic() + _HOLDER_WRITE_TIMEOUT
        while _is_held(descriptor):
            with suppress(ValidationError):
                return LockHolder.model_validate_json(os.pread(descriptor, 4096, 0))
            if time.monotonic() >= deadline:
                return UNKNOWN_HOLDER
            time.sleep(_POLL_SECONDS)
        return None
    finally:
        os.close(descriptor)


def process_start_time(pid: int) -> int:
    """Start time of a process of this host, in clock ticks since boot; 0 if there is none."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(line.rpartition(")")[2].split()[19])


def _lock_path(run: RunFolder) -> Path:
    return run.path / ".lock"


def _open_lock_file(run: RunFolder) -> int:
    try:
        return os.open(_lock_path(run), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        message = f"{run.path} cannot be written to: {error.strerror}; copy the run to resume it"
        raise RunError(message) from None


def _lock(descriptor: int) -> str | None:
    """Empty once acquired, None while another holds it, or why this file system has no locks."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _flock_struct())
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return None
        if error.errno in _LOCKS_UNSUPPORTED:
            return (
                f"this file system has no locks ({error.strerror}): a second start of this run would not be prevented"
            )
        raise
    return ""


def _is_held(descriptor: int) -> bool:
    try:
        answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _flock_struct())
    except OSError:
        return False
    return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)


def _flock_struct() -> bytes:
    return struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


def _write_holder(descriptor: int, pid: int, job: int | None) -> None:
    """Write the holder's name; on a full disk the lock is held without one."""
    try:
        user = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        user = str(os.geteuid())
    name = LockHolder(
        pid=pid, host=socket.gethostname(), user=user, since=time.time(), started=process_start_time(pid), job=job
    )
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, name.model_dump_json().encode(), 0)


def _ranks_are_exiting(found: LockHolder | None) -> bool:
    """Whether the holder itself is gone, so that its ranks alone still have the lock."""
    return found is not None and found.is_local and found.job is None and not found.is_alive


def _busy_message(run: RunFolder) -> str:
    found = read_holder(run)
    if found is None:
        return f"{run.path} was running until a moment ago: try again"
    if _ranks_are_exiting(found):
        return f"{run.path}: its launcher (pid {found.pid}) is gone and its ranks are exiting: try again in a moment"
    return f"{run.path} is running: {found}; stop it with: danlu stop {run.path.name}"
