"""In CI no test is left out, and what CI installs is what CONTRIBUTING says to install."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from source_tree import ROOT

LEFT_OUT = {
    "test_skip.py": 'import pytest\ndef test_it():\n    pytest.skip("no Slurm")\n',
    "test_mark.py": 'import pytest\n@pytest.mark.skipif(True, reason="no glibc")\ndef test_it(): ...\n',
    "test_module.py": 'import pytest\npytest.importorskip("no_such_package_at_all", reason="no S3")\n',
    "test_fixture.py": 'import pytest\n@pytest.fixture\ndef f():\n    pytest.skip("no FUSE")\ndef test_it(f): ...\n',
    "test_fails.py": 'import pytest\n@pytest.mark.xfail(reason="known")\ndef test_it():\n    assert False\n',
    "test_passes.py": 'import pytest\n@pytest.mark.xfail(reason="cured")\ndef test_it(): ...\n',
    "test_none.py": 'import pytest\n@pytest.mark.parametrize("n", [])\ndef test_it(n): ...\n',
}
REASONS = ("no Slurm", "no glibc", "no S3", "no FUSE", "known", "cured", "empty parameter set")


def run(folder: Path, ci: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Pytest over tests that leave something out, with this repository's conftest."""
    shutil.copy(ROOT / "tests" / "conftest.py", folder)
    (folder / "pytest.ini").write_text("[pytest]\n")
    for name, text in LEFT_OUT.items():
        (folder / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-ra", "--continue-on-collection-errors", *options, str(folder)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")} | {"CI": ci}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=360)


@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["alone", "over workers"])
def test_what_is_left_out_fails_in_ci_with_its_reason(tmp_path: Path, options: tuple[str, ...]) -> None:
    result = run(tmp_path, "true", *options)
    assert result.returncode == 1
    assert result.stdout.splitlines()[-1].startswith("3 failed, 4 errors in "), result.stdout
    assert [reason for reason in REASONS if reason not in result.stdout] == []


def test_elsewhere_it_is_skipped(tmp_path: Path) -> None:
    result = run(tmp_path, "")
    assert result.stdout.splitlines()[-1].startswith("5 skipped, 1 xfailed, 1 xpassed in "), result.stdout
    assert result.returncode == 0


def test_ci_says_that_it_is_ci() -> None:
    before, _, tests = (ROOT / ".ci" / "run").read_text("utf-8").partition("\nexport CI=true")
    assert "tests/unit" in tests and "-m pytest" not in before


def installed(text: str) -> tuple[set[str], set[str]]:
    """Extras of this project and packages of the system that a text installs."""
    extras = re.search(r"'\.\[([\w,]+)\]'", text)
    packages = re.search(r"(?:apt-get install --no-install-recommends|for package in) ([\w +-]+)", text)
    assert extras and packages
    added = re.findall(r"missing\+=\(([a-z+]+)\)", text)
    return set(extras[1].split(",")), {*packages[1].split(), *added} - {"python3", "python3-venv", "python3-dev"}


def test_contributing_installs_what_ci_installs() -> None:
    ours, ci = (installed((ROOT / name).read_text("utf-8")) for name in ("CONTRIBUTING.md", ".ci/run"))
    assert ours == ci
    assert {"s3", "data", "hf"} <= ci[0] and "libfuse2" in ci[1]
