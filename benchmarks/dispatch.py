"""Tokens to experts over a trimmed trunk: a copy per expert, or once per supernode. What passes the trunk?

    python benchmarks/dispatch.py [--quick] [--top-k 1 2 4 8] [--report FILE]

Eight ranks on four hosts in two supernodes, each host in a network namespace of its own; the kernel throttles every
host's link and, to a tenth of it, the trunk. Every rank sends tokens of experts drawn at random through both
dispatchers, forward and backward; results and gradients must be equal but for rounding. Bytes on the trunk are those
that the switch's port counted. By formula a token of k experts crosses the trunk k / 2 times as copies, and
1 - (1 / 2)^k times if it is sent once; it and its answer, forward and backward, are four rows. Needs root and iproute2.

Exits non-zero if the counted bytes are further from the formula than a bar. The last line is JSON.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from namespaces import add_rank_options, bytes_per_second, run_ranks, supernode_lab, why_no_lab
from reports import add_report_option, write_report
from rich.console import Console
from rich.table import Table
from torch import Tensor

from danlu.comm.rendezvous import RankInfo, rendezvous
from danlu.comm.world import World
from danlu.framework.decoder.moe import through_experts
from danlu.parallel.deduplicated_dispatch import DeduplicatedDispatcher
from danlu.parallel.expert import AllToAllDispatcher
from danlu.scheduler.network_lab import sent_bytes
from danlu.spec.byte_format import format_bytes

RANKS, HOSTS = 8, 4
INSIDE, TRUNK = "1gbit", "200mbit"
TOKENS, WIDTH, EXPERTS = 1024, 512, 64
TURNS, QUICK_TURNS = 5, 1
BAR = 0.05
"""Headers of packets and acknowledgements are on top of what the formula counts."""
PATIENCE = 600.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one turn each, for CI")
    parser.add_argument("--top-k", type=int, nargs="+", default=[1, 2, 4, 8], help="experts of a token")
    add_report_option(parser)
    add_rank_options(parser)
    parser.add_argument("--port", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank is not None:
        rank_main(asked)
        return 0
    if reason := why_no_lab():
        print(reason, file=sys.stderr)
        return 2
    with supernode_lab(INSIDE, TRUNK, nodes=2, hosts_each=HOSTS // 2) as lab, tempfile.TemporaryDirectory() as folder:
        told = ["--folder", folder, "--port", "/".join(lab.port("trunk", 0)), *(["--quick"] if asked.quick else [])]
        run_ranks(lab.hosts, RANKS, [__file__, *told, "--top-k", *map(str, asked.top_k)], PATIENCE)
        rows = json.loads((Path(folder) / "rows.json").read_text())
    figures = {
        "passed": all(abs(row[name]["off"]) <= BAR for row in rows for name in ("copies", "once")),
        "bar": BAR,
        "worst": max(abs(row[name]["off"]) for row in rows for name in ("copies", "once")),
        "rows": rows,
    }
    show(rows)
    write_report(asked.report, "dispatch", figures)
    print(json.dumps({"benchmark": "dispatch", **figures}))
    return int(not figures["passed"])


def rank_main(asked: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    place = RankInfo(asked.rank, asked.world, asked.rank % (RANKS // HOSTS), asked.store, bytes(32))
    world = World.join(place, "gloo", rendezvous(place))
    levels = world.level_groups(range(RANKS), (RANKS // HOSTS, HOSTS // 2, 2), "ep")
    everyone = world.new_group(range(RANKS), "ep")
    assert everyone is not None
    dispatchers = {"copies": AllToAllDispatcher(everyone), "once": DeduplicatedDispatcher(levels, EXPERTS)}
    namespace, _, interface = asked.port.partition("/")
    rows = []
    for top_k in asked.top_k:
        drawn = torch.Generator().manual_seed(asked.rank)
        x_TD = torch.randn(TOKENS, WIDTH, generator=drawn)
        chosen_TK = torch.rand(TOKENS, EXPERTS, generator=drawn).topk(top_k).indices
        weights_TK = torch.rand(TOKENS, top_k, generator=drawn)
        seconds: dict[str, list[float]] = {name: [] for name in dispatchers}
        counted: dict[str, list[int]] = {name: [] for name in dispatchers}
        found: dict[str, tuple[Tensor, ...]] = {}
        for _ in range(QUICK_TURNS if asked.quick else TURNS):
            for name, dispatcher in dispatchers.items():
                world.barrier()
                before = sent_bytes(namespace, interface) if asked.rank == 0 else 0
                world.barrier()
                began = time.perf_counter()
                found[name] = there_and_back(dispatcher, x_TD, chosen_TK, weights_TK)
                world.barrier()
                seconds[name].append(time.perf_counter() - began)
                if asked.rank == 0:
                    counted[name].append(sent_bytes(namespace, interface) - before)
        for copies, once in zip(found["copies"], found["once"], strict=True):
            torch.testing.assert_close(copies, once, rtol=1e-4, atol=1e-4)
        if asked.rank == 0:
            row = {name: told(name, top_k, statistics.median(counted[name]), seconds[name]) for name in dispatchers}
            ratios = {f"fewer_{key}": row["copies"][key] / row["once"][key] for key in ("bytes", "seconds")}
            rows.append({"top_k": top_k, **row, **ratios})
    if asked.rank == 0:
        (asked.folder / "rows.json").write_text(json.dumps(rows))
    world.barrier()
    world.shutdown()


def there_and_back(dispatcher: torch.nn.Module, *inputs: Tensor) -> tuple[Tensor, ...]:
    """The output, and the gradients of tokens and weights."""
    x_TD, chosen_TK, weights_TK = inputs
    x_TD, weights_TK = x_TD.clone().requires_grad_(), weights_TK.clone().requires_grad_()
    counts_E = chosen_TK.flatten().bincount(minlength=EXPERTS)
    y_TD = through_experts(x_TD, chosen_TK, weights_TK, chosen_TK.shape[1], counts_E, dispatcher, scale_by_expert)
    y_TD.square().sum().backward()
    assert x_TD.grad is not None
    assert weights_TK.grad is not None
    return y_TD.detach(), x_TD.grad, weights_TK.grad


def scale_by_expert(x_ND: Tensor, counts: list[int]) -> Tensor:
    """Experts that cost next to nothing, and differ."""
    return torch.cat([(expert + 1) * x for expert, x in enumerate(x_ND.split(counts))])


def told(name: str, top_k: int, counted: float, seconds: list[float]) -> dict[str, Any]:
    """Counted bytes beside the formula's."""
    row, sent = 4 * WIDTH, RANKS // 2 * TOKENS
    if name == "copies":
        formula = sent * (top_k / 2) * 4 * row
    else:
        extra = (8 + 4 + 4) * top_k  # numbers of its experts, their weights, and the weights' gradients
        formula = sent * (1 - 0.5**top_k) * (4 * row + extra)
    return {
        "bytes": counted,
        "formula": formula,
        "off": counted / formula - 1,
        "seconds": statistics.median(seconds),
        "bound": formula / bytes_per_second(TRUNK),
    }


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title=f"{TOKENS} tokens of {WIDTH} features a rank, {EXPERTS} experts on {RANKS} ranks: on the trunk")
    for column in ("top_k", "copies", "by formula", "once", "by formula", "fewer bytes", "faster"):
        table.add_column(column, justify="right")
    for row in rows:
        copies, once = row["copies"], row["once"]
        table.add_row(
            str(row["top_k"]),
            *(
                text
                for each in (copies, once)
                for text in (format_bytes(each["bytes"]), f"{format_bytes(each['formula'])} ({each['off']:+.1%})")
            ),
            f"{row['fewer_bytes']:.2f} ×",
            f"{row['fewer_seconds']:.2f} ×",
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)


if __name__ == "__main__":
    sys.exit(main())
