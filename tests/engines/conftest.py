"""Real engines for the time of a session. Where one is missing its tests are skipped, except in CI: there they fail."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_lab import SlurmLab, missing_programs


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmLab]:
    """A Slurm of four nodes on two switches."""
    if missing := missing_programs():
        reason = f"{', '.join(missing)} not installed (Debian: slurmctld slurmd slurm-client munge)"
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI must have a Slurm: {reason}")
        pytest.skip(reason)
    # Not pytest's own folder: a socket's path may have 107 characters at most.
    with tempfile.TemporaryDirectory(prefix="danlu-slurm-") as folder:
        lab = SlurmLab(Path(folder))
        try:
            lab.start()
            yield lab
        finally:
            lab.stop()
