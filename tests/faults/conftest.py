"""What these tests need of the machine. Where it is missing they are skipped, except in CI: there they fail."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path += [str(Path(__file__).parents[1] / room) for room in ("engines", "multiprocess")]

from s3_lab import S3Lab, missing_server


def without(what: str, reason: str) -> None:
    """Skip a test for want of something, or fail it in CI."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"CI must have {what}: {reason}")
    pytest.skip(reason)


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Lab]:
    """An S3 server that a test may kill and start again."""
    if reason := missing_server():
        without("an S3 server", reason)
    with tempfile.TemporaryDirectory(prefix="danlu-s3-") as folder:
        lab = S3Lab(Path(folder))
        try:
            lab.start()
            yield lab
        finally:
            if lab.server is not None:
                lab.kill()


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[Path, int], None]]:
    """Mounts file systems in memory of so many bytes, for the time of a test."""
    places: list[Path] = []

    def mount(place: Path, size: int) -> None:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            without("the right to mount a tmpfs", done.stderr.strip() or "mount failed")
        places.append(place)

    yield mount
    for place in places:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.fixture
def failing(tmp_path: Path) -> Iterator[Callable[[Path, Path, Path], None]]:
    """Mounts a folder at a place with faults by a file of rules, for the time of a test."""
    if not Path("/dev/fuse").exists():
        without("FUSE", "/dev/fuse is not there")
    try:
        import fuse  # noqa: F401
    except (ImportError, OSError) as error:
        without("FUSE", f"{error} (pip install fusepy; Debian: libfuse2)")
    servers: list[tuple[subprocess.Popen[bytes], Path]] = []

    def mount(source: Path, place: Path, rules: Path) -> None:
        script = Path(__file__).with_name("failing_fs.py")
        with (tmp_path / "fuse.log").open("wb") as log:
            server = subprocess.Popen([sys.executable, str(script), str(source), str(place), str(rules)], stderr=log)
        servers.append((server, place))
        deadline = time.monotonic() + 60
        while not place.is_mount():
            if server.poll() is not None or time.monotonic() > deadline:
                without("FUSE", (tmp_path / "fuse.log").read_text() or "the file system does not appear")
            time.sleep(0.05)

    yield mount
    for server, place in servers:
        unmount = shutil.which("fusermount3") or shutil.which("fusermount")
        command = [unmount, "-u", "-z", str(place)] if unmount else ["umount", "--lazy", str(place)]
        subprocess.run(command, check=True)
        server.kill()  # a mount that is let go lazily lives as long as somebody has a file of it open
        server.wait(20)
