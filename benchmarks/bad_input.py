"""Give the commands 10,000 invalid files: is each refused with a message, or read?

    python benchmarks/bad_input.py [--cases 10000] [--seed 1] [--report FILE] [--more]

Recipes, clusters, plans, run folders, data sets and Hugging Face folders are drawn from a grammar of each: wrong types,
missing and duplicate keys, huge numbers, escapes, deep nesting, 50 MB of padding, other encodings, links, pipes and
folders instead of files. Every case must end with success or with a message that names the file and what to do, without
a traceback, within 2 s of CPU time and 1 GiB, and write nothing outside its folder. Exits non-zero otherwise, and keeps
the folders of the failed cases. With `--more` the figures are added to those in FILE, so that a campaign can be split;
give each part another `--seed`.
"""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "faults"))

from bad_input import Bench, Report, campaign
from reports import add_report_option, write_report


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--cases", type=int, default=10_000)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--more", action="store_true", help="add to the report that is there")
    add_report_option(options)
    asked = options.parse_args()
    shared = Path("/dev/shm")
    work = Path(tempfile.mkdtemp(prefix="danlu-bad-input-", dir=shared if shared.is_dir() else None))
    bench = Bench(work)
    try:
        report = _watched(bench, asked.cases, asked.seed)
    finally:
        bench.close()
    figures = _figures(report)
    if asked.more and asked.report and asked.report.exists():
        figures = _added(json.loads(asked.report.read_text(encoding="utf-8"))["figures"], figures)
    _show(figures, report)
    write_report(asked.report, "bad_input", figures)
    if not report.faults:
        shutil.rmtree(work)
    return int(bool(report.faults))


def _watched(bench: Bench, cases: int, seed: int) -> Report:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("cases", total=cases)

        def on_case(report: Report) -> None:
            progress.update(task, completed=report.cases, description=f"cases, {len(report.faults)} at fault")

        return campaign(bench, cases, seed, on_case)


def _figures(report: Report) -> dict[str, Any]:
    return {
        "cases": report.cases,
        "accepted": report.accepted,
        "refused": report.refused,
        "at_fault": len(report.faults),
        "kinds": dict(sorted(report.kinds.items())),
        "slowest_seconds": round(report.slowest, 3),
        "slowest_case": report.slowest_case,
        "peak_memory": report.memory,
        "peak_memory_case": report.memory_case,
        "worker_restarts": report.restarts,
    }


def _added(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """The sum of two parts of a campaign."""
    summed = {key: before[key] + now[key] for key in ("cases", "accepted", "refused", "at_fault", "worker_restarts")}
    kinds = {
        kind: before["kinds"].get(kind, 0) + now["kinds"].get(kind, 0) for kind in {**before["kinds"], **now["kinds"]}
    }
    slowest, fullest = (max((before, now), key=lambda each: each[key]) for key in ("slowest_seconds", "peak_memory"))
    return {
        **now,
        **summed,
        "kinds": dict(sorted(kinds.items())),
        **{key: slowest[key] for key in ("slowest_seconds", "slowest_case")},
        **{key: fullest[key] for key in ("peak_memory", "peak_memory_case")},
    }


def _show(figures: dict[str, Any], report: Report) -> None:
    table = Table(title="Bad input", title_justify="left", show_header=False)
    for kind, count in figures["kinds"].items():
        table.add_row(kind, f"{count:,}")
    table.add_section()
    for name, value in (
        ("cases", f"{figures['cases']:,}"),
        ("read", f"{figures['accepted']:,}"),
        ("refused with a message", f"{figures['refused']:,}"),
        ("at fault", f"{figures['at_fault']:,}"),
        ("slowest, processor time", f"{figures['slowest_seconds']:.2f} s of 2 s: {figures['slowest_case']}"),
        ("most memory", f"{figures['peak_memory'] >> 20} MiB of 1,024 MiB: {figures['peak_memory_case']}"),
    ):
        table.add_row(name, value)
    console = Console()
    console.print(table)
    for fault in report.faults[:20]:
        console.print(f"{', '.join(fault['wrong'])}: {fault['case']}\n  in {fault['folder']}", markup=False)
        console.print((fault["raised"] or fault["said"])[-600:], markup=False, style="dim")


if __name__ == "__main__":
    sys.exit(main())
