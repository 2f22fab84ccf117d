"""What these tests need of the machine. Where it is missing they are skipped, and in CI so they fail."""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

sys.path += [str(Path(__file__).parents[1] / room) for room in ("engines", "multiprocess")]

from fuse_mount import NoFuseError, served
from s3_lab import S3Lab, missing_server, running_server


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Lab]:
    """An S3 server that a test may kill and start again."""
    if reason := missing_server():
        pytest.skip(reason)
    with running_server() as lab:
        yield lab


@pytest.fixture
def memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in memory where there is one: files are made, synced and thrown away by the thousand."""
    shared = Path("/dev/shm")
    made = Path(
        tempfile.mkdtemp(prefix="danlu-test-", dir=shared if shared.is_dir() else tmp_path_factory.getbasetemp())
    )
    yield made
    shutil.rmtree(made)


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
            pytest.skip(f"a tmpfs cannot be mounted: {done.stderr.strip() or 'mount failed'}")
        places.append(place)

    yield mount
    for place in places:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.fixture
def failing() -> Iterator[Callable[[Path, Path, Path], None]]:
    """Mounts a folder at a place with faults by a file of rules, for the time of a test."""
    with ExitStack() as mounts:

        def mount(source: Path, place: Path, rules: Path) -> None:
            try:
                mounts.enter_context(served("failing_fs.py", source, place, str(rules)))
            except NoFuseError as error:
                pytest.skip(str(error))

        yield mount
