"""Compile every kernel for every target without its chip: registers, spills, shared memory, matrix instructions.

    python benchmarks/kernel_resources.py --report docs/reports/kernel_resources.json
    python benchmarks/kernel_resources.py --targets sm_90 gfx942 --kernels rms_norm attention

At the shapes of a real model, in bf16. Exits with 1 if a kernel does not compile or breaks its budget
(`danlu.language.compilation.BUDGETS`). Compiling is not running: nothing here says that a kernel is right or fast.
"""

import argparse
import tempfile
from dataclasses import asdict
from typing import Any

import triton
from reports import add_report_option, write_report
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from danlu.chips.kernel_targets import TARGETS
from danlu.language.catalog import KERNELS
from danlu.language.compilation import BUDGETS, compile_kernel
from danlu.language.declaration import tiles_for


def measure(name: str, target_name: str) -> dict[str, Any]:
    """What one kernel uses on one target, and which of its budget that breaks."""
    kernel, target = KERNELS[name], TARGETS[target_name]
    tile = tiles_for(kernel, target, kernel.example)
    chosen = {"tile": dict(tile.sizes), "threads": tile.threads, "stages": tile.stages}
    try:
        use = compile_kernel(kernel, target)
    except Exception as error:
        return {**chosen, "broken": [f"does not compile: {type(error).__name__}: {error}"]}
    return {
        **chosen,
        **asdict(use),
        "seconds": round(use.seconds, 2),
        "broken": BUDGETS[name, target_name].breaches(use),
    }


def show(console: Console, results: dict[str, dict[str, dict[str, Any]]]) -> None:
    """A table with a row for every kernel and target."""
    table = Table(title="One thread's registers and spills, a block's shared memory")
    for column in ("kernel", "target", "tile"):
        table.add_column(column, no_wrap=True)
    for column in ("threads", "registers", "spills", "shared", "matrix", "seconds"):
        table.add_column(column, justify="right")
    table.add_column("budget")
    for name, by_target in results.items():
        for target, found in by_target.items():
            tile = " × ".join(str(size) for size in found["tile"].values())
            keys = ("threads", "registers", "spill_bytes", "shared_bytes", "matrix_instructions", "seconds")
            numbers = [str(found.get(key, "—")) for key in keys]
            table.add_row(name, target, tile, *numbers, "; ".join(found["broken"]) or "kept")
    console.print(table)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS), metavar="KERNEL")
    options.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS), metavar="TARGET")
    add_report_option(options)
    chosen = options.parse_args()
    console = Console()
    pairs = [(name, target) for name in chosen.kernels for target in chosen.targets]
    results: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in chosen.kernels}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with tempfile.TemporaryDirectory() as folder, Progress(*columns, console=console) as progress:
        triton.knobs.cache.dir = folder  # what was compiled before would take no time
        task = progress.add_task("compile", total=len(pairs))
        for name, target in pairs:
            progress.update(task, description=f"{name} for {target}")
            results[name][target] = measure(name, target)
            progress.advance(task)
    show(console, results)
    broken = sum(bool(found["broken"]) for by_target in results.values() for found in by_target.values())
    figures = {"triton": triton.__version__, "pairs": len(pairs), "broken": broken, "kernels": results}
    write_report(chosen.report, "kernel_resources", figures)
    console.print(f"{len(pairs) - broken} of {len(pairs)} within their budgets")
    raise SystemExit(1 if broken else 0)


if __name__ == "__main__":
    main()
