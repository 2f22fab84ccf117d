"""A benchmark's report says where its figures come from."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def _report(folder: Path, figures: str) -> "subprocess.CompletedProcess[str]":
    program = (
        f"from pathlib import Path; from reports import write_report; write_report(Path('r.json'), 'x', {figures})"
    )
    environment = {"PYTHONPATH": str(BENCHMARKS), "PATH": "/usr/bin:/bin"}
    return subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_a_report_names_command_commit_and_machine(tmp_path: Path) -> None:
    assert not _report(tmp_path, "{'worst': 0.5}").returncode
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["figures"] == {"worst": 0.5}
    assert report["benchmark"] == "x"
    assert {"command", "commit", "date", "torch", "cpus", "load_average"} <= report.keys()
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=BENCHMARKS, capture_output=True, text=True, check=True)
    assert report["commit"].removesuffix("+changes") == head.stdout.strip()


def test_a_figure_that_is_no_number_is_refused(tmp_path: Path) -> None:
    failed = _report(tmp_path, "{'worst': float('nan')}")
    assert failed.returncode
    assert "not JSON compliant" in failed.stderr
