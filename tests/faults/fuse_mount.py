"""Mount the file systems of this folder that run in a process of their own."""

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class NoFuseError(RuntimeError):
    """This machine does not let a process serve a file system; the message says why."""


@contextmanager
def served(script: str, source: Path, place: Path, *arguments: str) -> Iterator[None]:
    """Let `script` of this folder show `source` at `place` for a while; `NoFuseError` where that cannot be."""
    if not Path("/dev/fuse").exists():
        raise NoFuseError("/dev/fuse is not there")
    try:
        import fuse  # noqa: F401
    except (ImportError, OSError) as error:
        raise NoFuseError(f"{error} (pip install fusepy; Debian: libfuse2)") from None
    command = [sys.executable, str(Path(__file__).with_name(script)), str(source), str(place), *arguments]
    log = place.with_name(f"{place.name}.fuse.log")
    with log.open("wb") as errors:
        server = subprocess.Popen(command, stderr=errors)
    try:
        deadline = time.monotonic() + 180
        while not place.is_mount():
            if server.poll() is not None or time.monotonic() > deadline:
                raise NoFuseError(log.read_text() or "the file system does not appear")
            time.sleep(0.02)
        yield
    finally:
        if place.is_mount():
            unmount = shutil.which("fusermount3") or shutil.which("fusermount")
            command = [unmount, "-u", "-z", str(place)] if unmount else ["umount", "--lazy", str(place)]
            subprocess.run(command, check=True)
        server.kill()  # a mount that is let go lazily lives as long as somebody has a file of it open
        server.wait(20)
