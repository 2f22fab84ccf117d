"""Real engines for the time of a session. Where one is missing its tests are skipped, and in CI so they fail."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import fsspec.config
import pytest
from s3_lab import KEY, SECRET, S3Lab, missing_server, running_server
from slurm_lab import SlurmLab, missing_programs


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmLab]:
    """A Slurm of four nodes on two switches."""
    if missing := missing_programs():
        pytest.skip(f"{', '.join(missing)} not installed (Debian: slurmctld slurmd slurm-client munge)")
    # Not pytest's own folder: a socket's path may have 107 characters at most.
    with tempfile.TemporaryDirectory(prefix="danlu-slurm-") as folder:
        lab = SlurmLab(Path(folder))
        try:
            lab.start()
            yield lab
        finally:
            lab.stop()


@pytest.fixture
def s3() -> Iterator[S3Lab]:
    """An S3 server with one empty bucket, whose credentials fsspec finds where it looks for them."""
    if reason := missing_server():
        pytest.skip(reason)
    before = dict(fsspec.config.conf)
    fsspec.config.conf["s3"] = {"key": KEY, "secret": SECRET}
    try:
        with running_server() as lab:
            yield lab
    finally:
        fsspec.config.conf.clear()
        fsspec.config.conf.update(before)
