"""Attention of documents and windows on a CPU: Danlu's operator beside torch's attention with a mask in memory.

    python benchmarks/attention_masks.py [--quick] [--report FILE]

Forward and backward over the same queries, keys and values, in bf16 on all cores, in turns in one process. The mask of
the other way is made beforehand and not counted. Beside them plain causal attention, which lets documents see each
other and sees beyond a window. The last line is JSON.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from reports import add_report_option, write_report
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from danlu.framework.decoder.attention import Documents
from danlu.ops.operators.masked_attention import masked_attention

TURNS, QUICK_TURNS = 9, 2
HEADS, KEY_HEADS, WIDTH = 8, 8, 64


class Case(NamedTuple):
    """Sequences, and what of them is seen."""

    sequences: int
    length: int
    document: int | None
    """Mean length of documents, which is drawn from an exponential distribution."""
    window: int | None

    def __str__(self) -> str:
        seen = f"documents of {self.document:,} on average" if self.document else f"a window of {self.window:,}"
        return f"{self.sequences} × {self.length:,} tokens, {seen}"


CASES = (
    Case(4, 2048, 500, None),
    Case(1, 8192, 500, None),
    Case(1, 8192, 2000, None),
    Case(1, 8192, None, 1024),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer turns")
    add_report_option(parser)
    asked = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    rows = []
    with Progress() as progress:
        task = progress.add_task("cases", total=len(CASES))
        for case in CASES:
            rows.append(measure(case, QUICK_TURNS if asked.quick else TURNS))
            progress.advance(task)
    show(rows)
    figures = {"turns": QUICK_TURNS if asked.quick else TURNS, "rows": rows}
    write_report(asked.report, "attention_masks", figures)
    print(json.dumps({"benchmark": "attention_masks", **figures}))
    return 0


def measure(case: Case, turns: int) -> dict[str, Any]:
    torch.manual_seed(1)
    shapes = [(case.sequences, case.length, heads, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16).requires_grad_() for shape in shapes)
    upstream = torch.randn(q.shape, dtype=torch.bfloat16)
    documents = visible(case)
    first, mask = documents.first_BS, documents.with_mask(torch.bfloat16).mask_B1SS
    assert first is not None
    assert mask is not None

    def by_torch(**seen: Any) -> Tensor:
        return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), **seen).transpose(1, 2)

    ways: dict[str, Callable[[], Tensor]] = {
        "mask": lambda: by_torch(attn_mask=mask),
        "causal": lambda: by_torch(is_causal=True),
        "Danlu": lambda: masked_attention(q, k, v, first, WIDTH**-0.5, case.window),
    }
    difference = (ways["mask"]().detach().float() - ways["Danlu"]().detach().float()).abs().max()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(-1, turns):
        for name in ways if turn % 2 else reversed(ways):
            began = time.perf_counter()
            torch.autograd.grad(ways[name](), (q, k, v), upstream)
            if turn >= 0:
                seconds[name].append(time.perf_counter() - began)
    median = {name: statistics.median(taken) for name, taken in seconds.items()}
    return {
        "case": str(case),
        **median,
        "spread": {name: [min(taken), max(taken)] for name, taken in seconds.items()},
        "faster": median["mask"] / median["Danlu"],
        "mask_bytes": mask.numel() * mask.element_size(),
        "difference": float(difference),
    }


def visible(case: Case) -> Documents:
    """Documents of drawn lengths in every sequence, or a window."""
    if case.document is None:
        return Documents.causal(case.length, torch.device("cpu"), case.window)
    random = np.random.default_rng(1)
    rows = []
    for _ in range(case.sequences):
        lengths = 1 + random.exponential(case.document, case.length).astype(np.int64)
        rows.append(np.concatenate([np.arange(each) for each in lengths[: case.length // 8]])[: case.length])
    return Documents.from_positions(torch.from_numpy(np.stack(rows)), case.window)


def show(rows: list[dict[str, Any]]) -> None:
    table = Table("sequences", "mask", "causal", "Danlu", "× mask", "the mask's MB")
    for row in rows:
        times = [f"{1e3 * row[name]:.0f} ms" for name in ("mask", "causal", "Danlu")]
        table.add_row(row["case"], *times, f"{row['faster']:.1f}", f"{row['mask_bytes'] / 1e6:.0f}")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
