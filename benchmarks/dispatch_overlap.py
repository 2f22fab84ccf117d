"""Tokens to experts in parts: how much of their way hides behind the experts?

    python benchmarks/dispatch_overlap.py [--quick] [--links 500mbit 1gbit 2gbit] [--parts 2 4 8] [--report FILE]

Two ranks on two hosts, each in a network namespace of its own, the kernel throttles the link between them. A layer of
experts goes forward and backward on every rank, half of its tokens to the other one: with all tokens at once, as
`dispatch_chunks = 1` does, and in parts, in turns; results and gradients must be equal but for rounding. Beside them is
the experts by themselves, and four times an all-to-all by itself (there and back, forward and backward), measured in
the same turns. Parts may take less than both: two all-to-alls under way use a link better than one. Needs root and
iproute2.

The last line is JSON.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from namespaces import add_rank_options, run_ranks, supernode_lab, why_no_lab
from reports import add_report_option, write_report
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

from danlu.comm.rendezvous import RankInfo, rendezvous
from danlu.comm.world import World
from danlu.framework.decoder.moe import Experts, through_experts
from danlu.parallel.chunked_dispatch import ChunkedDispatcher
from danlu.parallel.expert import AllToAllDispatcher
from danlu.spec.model import Moe

RANKS = 2
TOKENS, WIDTH, INNER, EXPERTS, TOP_K = 2048, 512, 256, 16, 2
TURNS, QUICK_TURNS = 11, 2
PATIENCE = 900.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two turns each")
    parser.add_argument("--links", nargs="+", default=["500mbit", "1gbit", "2gbit"], help="rates, as `tc` writes them")
    parser.add_argument("--parts", type=int, nargs="+", default=[2, 4, 8], help="numbers of parts, beside one")
    add_report_option(parser)
    add_rank_options(parser)
    parser.add_argument("--link", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank is not None:
        rank_main(asked)
        return 0
    if reason := why_no_lab():
        print(reason, file=sys.stderr)
        return 2
    rows = []
    for link in asked.links:
        with supernode_lab(link, link, nodes=2, hosts_each=1) as lab, tempfile.TemporaryDirectory() as folder:
            told = ["--folder", folder, "--link", link, "--parts", *map(str, asked.parts)]
            told += ["--quick"] if asked.quick else []
            run_ranks(lab.hosts, RANKS, [__file__, *told], PATIENCE)
            rows += [{"link": link, **row} for row in json.loads((Path(folder) / "rows.json").read_text())]
    figures = {"rows": rows, "most": max(row["faster"] for row in rows)}
    show(rows)
    write_report(asked.report, "dispatch_overlap", figures)
    print(json.dumps({"benchmark": "dispatch_overlap", **figures}))
    return 0


def rank_main(asked: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    place = RankInfo(asked.rank, asked.world, 0, asked.store, bytes(32))
    world = World.join(place, "gloo", rendezvous(place))
    group = world.new_group(range(RANKS), "ep")
    assert group is not None
    torch.manual_seed(asked.rank)
    x_TD, weights_TK = torch.randn(TOKENS, WIDTH), torch.rand(TOKENS, TOP_K)
    chosen_TK = torch.rand(TOKENS, EXPERTS).topk(TOP_K).indices
    held = EXPERTS // RANKS
    experts = Experts(WIDTH, Moe(experts=held, top_k=TOP_K, width=INNER), "swiglu")
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.02)
    dispatchers: dict[int, nn.Module] = {1: AllToAllDispatcher(group)}
    dispatchers |= {parts: ChunkedDispatcher(group, EXPERTS, parts) for parts in asked.parts}
    copies = TOKENS * TOP_K
    jobs: dict[str, Callable[[], Any]] = {
        str(parts): partial(there_and_back, dispatcher, experts, x_TD, chosen_TK, weights_TK)
        for parts, dispatcher in dispatchers.items()
    }
    # The load is even but for chance, so these take what a layer's experts and one of its four ways take.
    jobs["experts"] = partial(alone, experts, torch.randn(copies, WIDTH), [copies // held] * held)
    jobs["way"] = partial(send, torch.randn(copies, WIDTH), group)
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    found: dict[str, Any] = {}
    turns = range((QUICK_TURNS if asked.quick else TURNS) + 1)
    bar = Console(stderr=True)
    for turn in track(turns, f"{asked.link}, turns", console=bar, disable=asked.rank > 0):
        for name, job in jobs.items():
            world.barrier()
            began = time.perf_counter()
            found[name] = job()
            world.barrier()
            if turn:  # the first is for warming up
                seconds[name].append(time.perf_counter() - began)
    for parts in asked.parts:
        for one, other in zip(found["1"], found[str(parts)], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    if asked.rank == 0:
        (asked.folder / "rows.json").write_text(json.dumps(list(told(asked.parts, seconds))))
    world.barrier()
    world.shutdown()


def there_and_back(dispatcher: nn.Module, experts: Experts, *inputs: Tensor) -> tuple[Tensor, ...]:
    """The output, and the gradients of tokens, weights and experts."""
    x_TD, chosen_TK, weights_TK = inputs
    x_TD, weights_TK = x_TD.clone().requires_grad_(), weights_TK.clone().requires_grad_()
    counts_E = chosen_TK.flatten().bincount(minlength=EXPERTS)
    y_TD = through_experts(x_TD, chosen_TK, weights_TK, TOP_K, counts_E, dispatcher, experts)
    grads = torch.autograd.grad(y_TD.square().sum(), [x_TD, weights_TK, *experts.parameters()])
    return y_TD.detach(), *grads


def alone(experts: Experts, x_ND: Tensor, counts: list[int]) -> None:
    """Experts forward and backward."""
    x_ND = x_ND.requires_grad_()
    torch.autograd.grad(experts(x_ND, counts).square().sum(), [x_ND, *experts.parameters()])


def send(x_ND: Tensor, group: dist.ProcessGroup) -> None:
    """One all-to-all."""
    dist.all_to_all_single(torch.empty_like(x_ND), x_ND, group=group)


def told(numbers: list[int], seconds: dict[str, list[float]]) -> Any:
    """A row for every number of parts."""
    experts, way = (statistics.median(seconds[name]) for name in ("experts", "way"))
    for parts in (1, *numbers):
        taken = seconds[str(parts)]
        pairs = sorted(one / part for one, part in zip(seconds["1"], taken, strict=True))
        yield {
            "parts": parts,
            "seconds": statistics.median(taken),
            "faster": statistics.median(pairs),
            "low": pairs[len(pairs) // 4],
            "high": pairs[-1 - len(pairs) // 4],
            "experts": experts,
            "ways": 4 * way,
        }


def show(rows: list[dict[str, Any]]) -> None:
    title = f"{TOKENS:,} tokens of {WIDTH} features a rank, {TOP_K} of {EXPERTS} experts each, on two hosts"
    table = Table(title=title)
    for column in (
        "link",
        "parts",
        "a layer",
        "its experts",
        "its ways",
        "faster",
        "quartiles",
    ):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["link"],
            str(row["parts"]),
            *(f"{1000 * row[key]:.0f} ms" for key in ("seconds", "experts", "ways")),
            f"{row['faster']:.2f} ×",
            f"{row['low']:.2f} to {row['high']:.2f}",
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)


if __name__ == "__main__":
    sys.exit(main())
