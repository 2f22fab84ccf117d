"""Real engines for the time of a session. Where one is missing its tests are skipped, except in CI: there they fail."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import fsspec.config
import pytest
from s3_lab import KEY, SECRET, S3Lab, missing_server
from slurm_lab import SlurmLab, missing_programs


def without(engine: str, reason: str) -> None:
    if os.environ.get("CI") == "true":
        pytest.fail(f"CI must have {engine}: {reason}")
    pytest.skip(reason)


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmLab]:
    """A Slurm of four nodes on two switches."""
    if missing := missing_programs():
        without("a Slurm", f"{', '.join(missing)} not installed (Debian: slurmctld slurmd slurm-client munge)")
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
        without("an S3 server", reason)
    before = dict(fsspec.config.conf)
    fsspec.config.conf["s3"] = {"key": KEY, "secret": SECRET}
    with tempfile.TemporaryDirectory(prefix="danlu-s3-") as folder:
        lab = S3Lab(Path(folder))
        try:
            lab.start()
            yield lab
        finally:
            lab.stop()
            fsspec.config.conf.clear()
            fsspec.config.conf.update(before)
