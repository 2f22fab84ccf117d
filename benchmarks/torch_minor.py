"""One row of the table of torch's minors: the tests that use torch, and every layout of the parity table.

python benchmarks/torch_minor.py 2.9.1      # in an environment with that torch; `bash .ci/torch 2.9.1` makes one
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from reports import ROOT, commit, write_report

RESULT = ROOT / "docs" / "reports" / "torch.json"
REAL_RANKS = ("brought", "collectives", "dryrun", "repeat", "session", "train", "weights")
"""Tests of real ranks that use most of torch; the quick ones of each."""
ON_ALL_CORES = ("-n", "auto", "--dist", "loadfile")


def main() -> int:
    """Run the tests and write the row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="the torch that must be installed, such as 2.9.1")
    wanted = parser.parse_args().version
    if (found := version("torch").partition("+")[0]) != wanted:
        parser.error(f"torch {found} is installed here, not {wanted}: bash .ci/torch {wanted}")
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder)
        runs = {
            "unit": [*files_with_torch(), "-m", "not full", *ON_ALL_CORES],
            "ranks": [*(f"tests/multiprocess/test_{name}.py" for name in REAL_RANKS), "-m", "not full", *ON_ALL_CORES],
            "parity": ["tests/multiprocess/test_parity.py", "--reports", folder],
        }
        counts = [run_tests(arguments, results / f"{name}.xml") for name, arguments in runs.items()]
        parity = json.loads((results / "parity.json").read_text("utf-8"))["figures"]
    passed, ran = sum(count[0] for count in counts), sum(count[1] for count in counts)
    row = {
        "tests": f"{passed} of {ran}",
        "passed": passed == ran,
        "layouts": str(parity["layouts"]),
        "loss": parity["worst"]["loss"],
        "norm": parity["worst"]["norm"],
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
    }
    record(wanted, row)
    print(f"torch {wanted}: {row['tests']} tests, {row['layouts']} layouts, losses within {row['loss']:.1e}")
    return 0 if row["passed"] else 1


def files_with_torch() -> list[str]:
    """Test files of one process that import torch, or a room that does."""
    found = re.compile(r"^\s*(import|from) torch\b", re.MULTILINE)
    files = sorted((ROOT / "tests" / "unit").glob("test_*.py"))
    return [str(file.relative_to(ROOT)) for file in files if found.search(file.read_text("utf-8"))]


def run_tests(arguments: list[str], result: Path) -> tuple[int, int]:
    """How many tests passed, of how many."""
    subprocess.run([sys.executable, "-m", "pytest", "-q", *arguments, f"--junitxml={result}"], cwd=ROOT)
    suite = ElementTree.parse(result).getroot()[0]
    ran, bad = int(suite.attrib["tests"]), int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    return ran - bad, ran


def record(minor: str, row: dict[str, Any]) -> None:
    """Add the row to those of other minors."""
    rows = json.loads(RESULT.read_text("utf-8"))["figures"]["minors"] if RESULT.exists() else {}
    rows[minor] = row
    write_report(RESULT, "torch", {"minors": dict(sorted(rows.items()))}, "bash .ci/torch VERSION")


if __name__ == "__main__":
    sys.exit(main())
