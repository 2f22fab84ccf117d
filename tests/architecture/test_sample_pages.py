"""What `docs/how-to/sample.md` and `docs/how-to/hand-off.md` show is what the program prints."""

import subprocess
import sys

import pytest
from source_tree import ROOT

SCRIPT = ROOT / "docs" / "how-to" / "make_sample.py"


@pytest.mark.full
@pytest.mark.timeout(900)
def test_every_output_of_the_pages_is_the_program_s_own() -> None:
    """A run is trained, sampled, exported and loaded by transformers, by the commands of the pages."""
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
