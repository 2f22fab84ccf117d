"""What `docs/how-to/data.md` shows is what the program prints."""

import subprocess
import sys

from source_tree import ROOT

SCRIPT = ROOT / "docs" / "how-to" / "make_data.py"


def test_every_output_of_the_page_is_the_program_s_own() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
