"""Do the compiler's graph passes gain? A decoder block, compiled without passes, with each alone, and with all.

    python benchmarks/graph_passes.py [--quick] [--width 512] [--dtypes bf16 fp32] [--report FILE]

Forward and backward of one block, in bf16 and fp32. Variants take turns, so that what else the machine does hits all of
them alike; the time is this process's CPU time, of which the lower quartile of all turns counts, since noise only adds.
A pass that is on by default must not be slower than none in either dtype, beyond the spread. The last line is JSON.
What the compiler has in its cache is not rewritten again, and counts no rewrites.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from reports import add_report_option, write_report
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn

from danlu.compiler.pass_manager import PassManager
from danlu.compiler.passes import ALL_PASSES
from danlu.framework.decoder.block import Block
from danlu.spec.model import Model

SEQUENCES, LENGTH = 4, 256
TURNS, QUICK_TURNS = 40, 6
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SLOWER = 1.03
"""A pass that is on may be this much slower in a dtype where it neither gains nor loses."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few turns of a narrow block, for CI")
    parser.add_argument("--width", type=int, default=512, help="of the block's hidden states")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    add_report_option(parser)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    width, turns = (128, QUICK_TURNS) if asked.quick else (asked.width, TURNS)
    variants = {"none": (), **{each.name: (each,) for each in ALL_PASSES}, "all": ALL_PASSES}
    rows = []
    console = Console(width=None if sys.stdout.isatty() else 120)
    with Progress(console=console, disable=not sys.stdout.isatty()) as progress:
        task = progress.add_task("compiling", total=len(asked.dtypes) * (len(variants) + turns))
        for name in asked.dtypes:
            steps, managers = {}, {}
            for variant, passes in variants.items():
                progress.update(task, description=f"{name}: compiling with {variant}")
                managers[variant] = PassManager(passes)
                steps[variant] = compiled_step(width, DTYPES[name], managers[variant])
                progress.advance(task)
            progress.update(task, description=f"{name}: timing")
            seconds = take_turns(steps, turns, lambda: progress.advance(task))
            rows += [told(name, variant, seconds, managers[variant]) for variant in variants]
    figures = {"passed": not slower_by_default(rows), "width": width, "tokens": SEQUENCES * LENGTH, "rows": rows}
    show(console, width, rows)
    write_report(asked.report, "graph_passes", figures)
    print(json.dumps({"benchmark": "graph_passes", **figures}))
    return int(not figures["passed"])


def compiled_step(width: int, dtype: torch.dtype, manager: PassManager) -> Callable[[], None]:
    """Forward and backward of a compiled block, called until it is compiled."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Model(vocabulary=64, layers=1, width=width, heads=width // 64, kv_heads=width // 128, sequence=LENGTH)
    block = Block(model, 0)
    for parameter in block.parameters():
        nn.init.normal_(parameter, 0, width**-0.5) if parameter.ndim > 1 else nn.init.ones_(parameter)
    block = block.to(dtype)
    compiled = torch.compile(block.forward, options=manager.compile_options() or None)
    x_BSD = torch.randn(SEQUENCES, LENGTH, width, dtype=dtype, requires_grad=True)
    upstream_BSD = torch.randn_like(x_BSD)

    def step() -> None:
        compiled(x_BSD).backward(upstream_BSD)
        block.zero_grad()
        x_BSD.grad = None

    step()
    step()
    return step


def take_turns(steps: dict[str, Callable[[], None]], turns: int, after: Callable[[], None]) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(turns):
        names = list(steps) if turn % 2 else list(reversed(steps))
        for name in names:
            began = time.process_time()
            steps[name]()
            seconds[name].append(time.process_time() - began)
        after()
    return seconds


def told(dtype: str, variant: str, seconds: dict[str, list[float]], manager: PassManager) -> dict[str, Any]:
    low = {name: statistics.quantiles(each, n=4)[0] for name, each in seconds.items()}
    return {
        "dtype": dtype,
        "passes": variant,
        "milliseconds": 1e3 * low[variant],
        "ratio": low[variant] / low["none"],
        "rewrites": sum(manager.rewrites.values()),
        "refused": manager.refused,
    }


def slower_by_default(rows: list[dict[str, Any]]) -> list[str]:
    on = {each.name for each in ALL_PASSES if each.on}
    return [row["passes"] for row in rows if row["passes"] in on and row["ratio"] > SLOWER]


def show(console: Console, width: int, rows: list[dict[str, Any]]) -> None:
    table = Table(title=f"A block of width {width}, {SEQUENCES} × {LENGTH} tokens: forward and backward, one thread")
    for column in ("dtype", "passes", "ms", "of none", "rewrites", "refused"):
        table.add_column(column, justify="right")
    for row in rows:
        figures = f"{row['milliseconds']:.2f}", f"{row['ratio']:.3f}", str(row["rewrites"]), str(len(row["refused"]))
        table.add_row(row["dtype"], row["passes"], *figures)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
