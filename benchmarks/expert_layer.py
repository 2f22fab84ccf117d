"""An expert layer of 64 experts on a CPU: Danlu's products of all experts at once beside one product after another.

    python benchmarks/expert_layer.py [--quick] [--report FILE]

Forward and backward of the layer with its router, dispatch and weighted sum, top 4 of 64 experts, on all cores. The
three ways take turns in one process: the loop, `torch.nn.functional.grouped_mm`, and what Danlu chooses. Loads are
those of a fresh router, whose busiest expert has about half more than the mean. Exits non-zero if Danlu is not 1.4 × as
fast as the loop. The last line is JSON.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from reports import add_report_option, write_report
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from danlu.chips.registry import find_chip
from danlu.framework.decoder import moe as moe_module
from danlu.framework.decoder.moe import MoeLayer
from danlu.ops.operators.experts import ExpertProducts, GroupedProducts, LoopedProducts
from danlu.spec.model import Moe

BAR = 1.4
TURNS, QUICK_TURNS = 15, 3
EXPERTS, TOP_K = 64, 4
SHAPES = ((512, 256, 256), (2048, 256, 256), (512, 512, 1024), (2048, 512, 1024))
"""Tokens, width, width of an expert."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
Chooser = Callable[[Tensor, torch.device], ExpertProducts]


def looped(counts: Tensor, device: torch.device) -> ExpertProducts:
    return LoopedProducts(counts)


def torch_grouped(counts: Tensor, device: torch.device) -> ExpertProducts:
    ends = counts.cumsum(0).to(torch.int32)
    return lambda x, weight, bias: F.grouped_mm(x, weight, offs=ends)


WAYS: dict[str, Chooser] = {"loop": looped, "grouped_mm": torch_grouped, "Danlu": GroupedProducts}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer turns, and no bar")
    add_report_option(parser)
    asked = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    find_chip("cpu").runtime.set_device(0)
    turns = QUICK_TURNS if asked.quick else TURNS
    cases = [(*shape, dtype) for shape in SHAPES for dtype in DTYPES]
    with Progress() as progress:
        task = progress.add_task("cases", total=len(cases))
        rows = []
        for case in cases:
            rows.append(measure(*case, turns))
            progress.advance(task)
    show(rows)
    missed = [] if asked.quick else [f"{row['case']}: {row['faster']:.2f} ×" for row in rows if row["faster"] < BAR]
    figures = {"bar": BAR, "turns": turns, "experts": EXPERTS, "rows": rows, "missed": missed}
    write_report(asked.report, "expert_layer", figures)
    print(json.dumps({"benchmark": "expert_layer", **figures}))
    return int(bool(missed))


def measure(tokens: int, width: int, hidden: int, dtype: str, turns: int) -> dict[str, Any]:
    torch.manual_seed(1)
    layer = MoeLayer(width, Moe(experts=EXPERTS, top_k=TOP_K, width=hidden), "swiglu", None)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    layer = layer.to(DTYPES[dtype])
    x = torch.randn(1, tokens, width).to(DTYPES[dtype]).requires_grad_()
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    for turn in range(-1, turns):
        for name in WAYS if turn % 2 else reversed(WAYS):
            moe_module.GroupedProducts = WAYS[name]
            began = time.perf_counter()
            layer(x).sum().backward()
            if turn >= 0:
                seconds[name].append(time.perf_counter() - began)
    median = {name: statistics.median(taken) for name, taken in seconds.items()}
    load = layer.router.load_E
    return {
        "case": f"{tokens} tokens, width {width}, experts of {hidden}, {dtype}",
        **{name: median[name] for name in WAYS},
        "spread": {name: [min(taken), max(taken)] for name, taken in seconds.items()},
        "busiest": float(load.max() / load.mean()),
        "faster": median["loop"] / median["Danlu"],
    }


def show(rows: list[dict[str, Any]]) -> None:
    table = Table("layer", *WAYS, "busiest expert", "× loop")
    for row in rows:
        times = [f"{1e3 * row[name]:.1f} ms" for name in WAYS]
        table.add_row(row["case"], *times, f"{row['busiest']:.2f} × mean", f"{row['faster']:.2f}")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
