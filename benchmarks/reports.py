"""Reports of benchmarks: JSON files with the figures, the command, the commit and the machine."""

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def add_report_option(parser: argparse.ArgumentParser) -> None:
    """Give a benchmark the option `--report FILE`."""
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the figures to this JSON file")


def write_report(path: Path | None, name: str, figures: dict[str, Any], command: str | None = None) -> None:
    """Write the figures of a benchmark to `path`, with their origin; nothing if no path is given.

    `command` makes the figures, if it is not the running one.
    """
    if path is None:
        return
    report = {
        "benchmark": name,
        "command": command or _this_command(),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": _version("torch"),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "figures": figures,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def commit() -> str:
    """The commit these files are from, with `+changes` if tracked files differ from it; `unknown` without git.

    Reports and pages (`docs`) do not count: of several reports one is written before the next is measured.
    """
    try:
        head = _git("rev-parse", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}+changes" if changed else head


def _this_command() -> str:
    return shlex.join(["python", os.path.relpath(Path(sys.argv[0]).resolve(), ROOT), *sys.argv[1:]])


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments], check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ).stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)  # without importing it: some benchmarks never need torch
    except PackageNotFoundError:
        return None
