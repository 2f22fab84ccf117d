"""One row of the table of torch's minors: the tests that use torch, and every layout of the parity table.

python benchmarks/torch_minor.py 2.9.1                  # in an environment with that torch
python benchmarks/torch_minor.py 2.9.1 --only layouts   # the other part stays as it was found before

`bash .ci/torch 2.9.1` makes such an environment, and passes options on.
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
PARTS = ("tests", "layouts")


def main() -> int:
    """Run the tests, the table or both, and write what was found into the minor's row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="the torch that must be installed, such as 2.9.1")
    parser.add_argument("--only", choices=PARTS, help="run one part; the row keeps what the other found before")
    asked = parser.parse_args()
    wanted = asked.version
    if (found := version("torch").partition("+")[0]) != wanted:
        parser.error(f"torch {found} is installed here, not {wanted}: bash .ci/torch {wanted}")
    passed = True
    for part in [asked.only] if asked.only else PARTS:
        row = {"tests": run_tests, "layouts": train_layouts}[part]()
        row |= {"date": datetime.now(UTC).date().isoformat(), "commit": commit()}
        record(wanted, part, row)
        print(f"torch {wanted}: {row['passed']} of {row['ran']} {part}")
        passed &= row["passed"] == row["ran"]
    return 0 if passed else 1


def run_tests() -> dict[str, Any]:
    """The tests that use torch, of one process and of several; those that failed by name."""
    runs = (files_with_torch(), [f"tests/multiprocess/test_{name}.py" for name in REAL_RANKS])
    cases = [
        case for files in runs for case in run_pytest(*files, "-m", "not full", "-n", "auto", "--dist", "loadfile")
    ]
    failed = [name for name, ok in cases if not ok]
    return {"passed": len(cases) - len(failed), "ran": len(cases), "failed": failed}


def train_layouts() -> dict[str, Any]:
    """Every layout of the parity table, compared with one process."""
    with tempfile.TemporaryDirectory() as folder:
        cases = run_pytest("tests/multiprocess/test_parity.py", "--reports", folder)
        written = Path(folder) / "parity.json"  # not if a rank failed
        worst = json.loads(written.read_text("utf-8"))["figures"]["worst"] if written.exists() else {}
    failed = [name for name, ok in cases if not ok]
    figures = {name: worst[name] for name in ("loss", "norm") if name in worst}
    return {"passed": len(cases) - len(failed), "ran": len(cases), "failed": failed, **figures}


def files_with_torch() -> list[str]:
    """Test files of one process that import torch, or a room that does."""
    found = re.compile(r"^\s*(import|from) torch\b", re.MULTILINE)
    files = sorted((ROOT / "tests" / "unit").glob("test_*.py"))
    return [str(file.relative_to(ROOT)) for file in files if found.search(file.read_text("utf-8"))]


def run_pytest(*arguments: str) -> list[tuple[str, bool]]:
    """Every test that ran, and whether it passed."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.xml"
        subprocess.run([sys.executable, "-m", "pytest", "-q", *arguments, f"--junitxml={result}"], cwd=ROOT)
        ran = ElementTree.parse(result).getroot().iter("testcase")
        cases = [case for case in ran if case.find("skipped") is None]
        return [
            (
                f"{case.attrib['classname']}.{case.attrib['name']}",
                case.find("failure") is None and case.find("error") is None,
            )
            for case in cases
        ]


def record(minor: str, part: str, row: dict[str, Any]) -> None:
    """Put what a part found into the minor's row, beside what others found."""
    rows = json.loads(RESULT.read_text("utf-8"))["figures"]["minors"] if RESULT.exists() else {}
    rows[minor] = rows.get(minor, {}) | {part: row}
    write_report(RESULT, "torch", {"minors": dict(sorted(rows.items()))}, "bash .ci/torch VERSION")


if __name__ == "__main__":
    sys.exit(main())
