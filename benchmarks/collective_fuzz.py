"""Hierarchical collectives against what numpy computes from all ranks' inputs, in as many drawn cases as wanted.

    python benchmarks/collective_fuzz.py [--cases 6000] [--report FILE]

Half of the cases on six ranks, half on eight, which are laid out on levels in several ways, in groups of a world and in
groups without one. Drawn are collective, type, shape (empty ones too), uneven splits and the number of pieces; the
tests run a few hundred of the same. Exits non-zero at the first wrong result. The last line is JSON.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from reports import ROOT, add_report_option, write_report
from rich.console import Console

sys.path.insert(0, str(ROOT / "tests" / "multiprocess"))
from hierarchical_rank import CASES, DTYPES, SHAPES
from ranks import run_ranks

RANK = ROOT / "tests" / "multiprocess" / "hierarchical_rank.py"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=6000)
    add_report_option(parser)
    asked = parser.parse_args()
    began, found = time.perf_counter(), []
    for ranks in SHAPES:
        share = asked.cases // len(SHAPES)
        with tempfile.TemporaryDirectory() as folder, Console(stderr=True).status(f"{share:,} cases on {ranks} ranks"):
            run_ranks(RANK, ranks, folder, str(share), seconds=60 + share)
            found += [json.loads(file.read_text()) | {"ranks": ranks} for file in sorted(Path(folder).iterdir())]
    wrong = [each["failed"] for each in found if each["failed"]]
    cases = sum({each["ranks"]: each["cases"] for each in found}.values())
    print(wrong[0] if wrong else f"{cases:,} cases, none wrong")
    figures = {
        "passed": not wrong,
        "cases": cases,
        "wrong": len(wrong),
        "collectives": len(CASES),
        "types": len(DTYPES),
        "layouts": sum(map(len, SHAPES.values())),
        "seconds": time.perf_counter() - began,
    }
    write_report(asked.report, "collective_fuzz", figures)
    print(json.dumps({"benchmark": "collective_fuzz", **figures}))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
