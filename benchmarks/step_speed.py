"""A training step of Danlu beside the same step in bare PyTorch, eager and compiled, in one run.

    python benchmarks/step_speed.py [--quick] [--ranks 1 2] [--report FILE]

A dense model of 42 M parameters and one with 32 experts a layer, in bf16 with fp32 parameters, on one process and on
two ranks. Bare PyTorch is written as its documentation does: FSDP2, `torch.nn.RMSNorm`, `grouped_mm` for experts,
`scaled_dot_product_attention`, `cross_entropy`, fused AdamW; compiled block by block. It keeps freed memory as Danlu
does. Every contender has processes of its own, because Danlu may replace torch's kernels in its own; they take turns of
one step, and who is not at turn waits without computing. MFU is of this machine's measured peak, the higher of bf16 and
fp32. Exits non-zero if a bar is missed: 1.5 × eager, 1.1 × compiled. The last line is JSON.
"""

import argparse
import ctypes
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import product
from typing import IO, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from reports import add_report_option, write_report
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from danlu.chips.registry import find_chip
from danlu.comm.mesh import build_mesh
from danlu.comm.rendezvous import RankInfo, rendezvous
from danlu.comm.world import World
from danlu.framework.build import build_train_state
from danlu.framework.decoder.decoder import Decoder
from danlu.framework.loop import TrainStages, take_step
from danlu.framework.stages import FixedData
from danlu.parallel.batch import Batch
from danlu.spec.model import Model, Moe
from danlu.spec.plan import fully_sharded_plan
from danlu.spec.recipe import BatchConfig, DataConfig, LRSchedule, PrecisionConfig, Recipe

EAGER_BAR, COMPILED_BAR = 1.5, 1.1
TURNS, QUICK_TURNS = 7, 3
WARM_UP = 2
LENGTH, SEQUENCES = 256, 2
MODELS = {
    "dense": Model(
        vocabulary=16000, layers=8, width=512, heads=8, kv_heads=4, mlp_width=1408, sequence=LENGTH, tied=False
    ),
    "experts": Model(
        vocabulary=4096, layers=6, width=256, heads=4, mlp_width=256, sequence=LENGTH, tied=False,
        moe=Moe(experts=32, top_k=4, width=256, balance="bias"),
    ),
}  # fmt: skip
CONTENDERS = ("PyTorch", "PyTorch compiled", "Danlu", "Danlu compiled")
Step = Callable[[], None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer turns, one process, and no bars")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks")
    add_report_option(parser)
    for name in ("--contender", "--model"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    for name in ("--rank", "--world", "--port"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.contender:
        worker_main(asked)
        return 0
    cases = list(product(MODELS, [1] if asked.quick else asked.ranks))
    peak = measured_peak()
    rows: list[dict[str, Any]] = []
    turns = QUICK_TURNS if asked.quick else TURNS
    with Progress() as progress:
        task = progress.add_task("turns", total=len(cases) * (turns + 1))
        for model, ranks in cases:
            rows += measure(model, ranks, turns, peak, lambda: progress.advance(task))
    missed = [] if asked.quick else misses(rows)
    show(rows, missed)
    figures = {"peak": peak, "bars": [EAGER_BAR, COMPILED_BAR], "rows": rows, "missed": missed}
    write_report(asked.report, "step_speed", figures)
    print(json.dumps({"benchmark": "step_speed", **figures}))
    return int(bool(missed))


def measured_peak() -> float:
    """FLOP/s of a large product on all cores, in the faster of bf16 and fp32."""
    best = 0.0
    for dtype in (torch.bfloat16, torch.float32):
        a = torch.randn(1536, 1536).to(dtype)
        a @ a
        for _ in range(5):
            started = time.perf_counter()
            a @ a
            best = max(best, 2 * 1536**3 / (time.perf_counter() - started))
    return best


class Contender:
    """The processes of one contender."""

    def __init__(self, name: str, model: str, ranks: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        threads = max(1, (os.cpu_count() or 1) // ranks)
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, __file__, "--contender", name, "--model", model, "--world", str(ranks)]
        self.ranks = [
            subprocess.Popen(
                [*command, "--rank", str(rank), "--port", str(port)],
                env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for rank in range(ranks)
        ]  # fmt: skip

    def take_turn(self) -> float:
        """Seconds of one step: the slowest rank's."""
        for rank in self.ranks:
            _pipe(rank.stdin).write("step\n")
            _pipe(rank.stdin).flush()
        return max(float(_pipe(rank.stdout).readline()) for rank in self.ranks)

    def close(self) -> None:
        """End the processes."""
        for rank in self.ranks:
            _pipe(rank.stdin).close()
            rank.wait(timeout=120)


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def measure(model: str, ranks: int, turns: int, peak: float, advance: Callable[[], None]) -> list[dict[str, Any]]:
    """Every contender's steps, in turns."""
    contenders = {name: Contender(name, model, ranks) for name in CONTENDERS}
    for contender in contenders.values():
        for _ in range(WARM_UP):
            contender.take_turn()
    advance()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(turns):
        for name in sorted(contenders, reverse=bool(turn % 2)):
            seconds[name].append(contenders[name].take_turn())
        advance()
    for contender in contenders.values():
        contender.close()
    flops = step_flops(MODELS[model])
    return [
        {
            "model": model, "ranks": ranks, "contender": name, "seconds": statistics.median(taken),
            "lowest": min(taken), "highest": max(taken), "mfu": flops / statistics.median(taken) / peak,
            "tokens_per_second": SEQUENCES * LENGTH / statistics.median(taken),
        }
        for name, taken in seconds.items()
    ]  # fmt: skip


def step_flops(model: Model) -> float:
    """Of the matrix products of a step: six per parameter that a token passes, and attention's."""
    with torch.device("meta"):
        made = Decoder(model)
    active = 0.0
    for name, parameter in made.named_parameters():
        if "embed" not in name:
            share = model.moe.top_k / model.moe.experts if model.moe and ".experts." in name else 1.0
            active += share * parameter.numel()
    attention = 6 * model.layers * model.heads * model.head_dim * LENGTH  # scores and sums, the causal half
    return SEQUENCES * LENGTH * (6 * active + attention)


def worker_main(asked: argparse.Namespace) -> None:
    """Take a step for every line that is read, and answer with its seconds."""
    torch.manual_seed(0)
    answers = os.dup(1)
    os.dup2(2, 1)  # what libraries print must not be taken for an answer
    make = danlu_step if asked.contender.startswith("Danlu") else bare_step
    step = make(MODELS[asked.model], asked.contender.endswith("compiled"), asked.rank, asked.world, asked.port)
    for _ in sys.stdin:
        started = time.perf_counter()
        step()
        os.write(answers, f"{time.perf_counter() - started}\n".encode())
    dist.destroy_process_group()


def rows_for(rank: int, world: int, vocabulary: int) -> Tensor:
    """This rank's share of one batch of tokens, the same for every contender."""
    tokens = torch.randint(vocabulary, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return tokens.chunk(world)[rank]


def danlu_step(model: Model, compiled: bool, rank: int, world: int, port: int) -> Step:
    place = RankInfo(rank=rank, world_size=world, local_rank=rank, endpoint=f"127.0.0.1:{port}", token=bytes(32))
    find_chip("cpu").runtime.set_device(rank)
    joined = World.join(place, "gloo", rendezvous(place))
    plan = fully_sharded_plan(world).model_copy(update={"compile": compiled})
    mesh = build_mesh(plan, joined, None, experts=model.moe is not None)
    recipe = Recipe(
        name="step-speed", steps=10**6, model=model, data=DataConfig(shards="none"),
        batch=BatchConfig(sequences=SEQUENCES, length=LENGTH),
        schedule=LRSchedule(kind="constant"), precision=PrecisionConfig(compute="bf16"),
    )  # fmt: skip
    state, passes = build_train_state(recipe, plan, mesh)
    stages = TrainStages(FixedData(SameBatch(rows_for(rank, world, model.vocabulary))), passes)

    def step() -> None:
        take_step(recipe, state, mesh, stages)

    return step


class SameBatch:
    """Every batch has the same rows."""

    def __init__(self, rows: Tensor) -> None:
        self.batch = Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())

    def at(self, cursor: int) -> Batch:
        """The same."""
        return self.batch


class PlainBlock(nn.Module):
    """A layer as PyTorch's documentation would write it."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        width, head = model.width, model.head_dim
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.q = nn.Linear(width, model.heads * head, bias=False)
        self.k, self.v = (nn.Linear(width, model.num_kv_heads * head, bias=False) for _ in range(2))
        self.o = nn.Linear(model.heads * head, width, bias=False)
        if model.moe is None:
            self.gate, self.up = (nn.Linear(width, model.mlp_dim, bias=False) for _ in range(2))
            self.down = nn.Linear(model.mlp_dim, width, bias=False)
        else:
            experts, hidden = model.moe.experts, model.moe.width
            self.router = nn.Linear(width, experts, bias=False)
            shapes = ((experts, width, hidden), (experts, width, hidden), (experts, hidden, width))
            self.w1, self.w3, self.w2 = (nn.Parameter(torch.randn(shape) * 0.02) for shape in shapes)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attention, and a feed-forward network or experts."""
        x = x + self.attend(self.attention_norm(x), cos, sin)
        y = self.mlp_norm(x)
        return x + (self.through_experts(y) if self.model.moe else self.down(F.silu(self.gate(y)) * self.up(y)))

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Grouped-query attention."""
        q, k, v = (
            each(x).unflatten(-1, (-1, self.model.head_dim)).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.o(y.transpose(1, 2).flatten(2))

    def through_experts(self, x: Tensor) -> Tensor:
        """The weighted sum of what a token's experts make of it."""
        moe = self.model.moe
        assert moe is not None
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).float().softmax(-1).topk(moe.top_k, dim=-1)
        order = chosen.flatten().argsort(stable=True)
        ends = torch.bincount(chosen.flatten(), minlength=moe.experts).cumsum(0).to(torch.int32)
        copies = tokens[order // moe.top_k]
        hidden = F.silu(F.grouped_mm(copies, self.w1, offs=ends)) * F.grouped_mm(copies, self.w3, offs=ends)
        made = F.grouped_mm(hidden, self.w2, offs=ends)
        scaled = made * weights.flatten()[order, None].to(made.dtype)
        return torch.zeros_like(tokens).index_add(0, order // moe.top_k, scaled).view_as(x)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


class PlainModel(nn.Module):
    """A decoder as PyTorch's documentation would write it."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.embed = nn.Embedding(model.vocabulary, model.width)
        self.blocks = nn.ModuleList(PlainBlock(model) for _ in range(model.layers))
        self.norm = nn.RMSNorm(model.width, eps=1e-5)
        self.head = nn.Linear(model.width, model.vocabulary, bias=False)
        pairs = torch.arange(0, model.head_dim, 2, dtype=torch.float32) / model.head_dim
        self.angle = torch.outer(torch.arange(LENGTH), 10000.0**-pairs)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        x, cos, sin = self.embed(tokens), self.angle.cos(), self.angle.sin()
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def bare_step(model: Model, compiled: bool, rank: int, world: int, port: int) -> Step:
    libc = ctypes.CDLL(None)
    libc.mallopt(-4, 0), libc.mallopt(-1, -1)  # keep freed memory
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    plain = PlainModel(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in plain.blocks:
        if compiled:
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(plain, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    rows = rows_for(rank, world, model.vocabulary)

    def step() -> None:
        logits = plain(rows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step


def by_case(rows: list[dict[str, Any]]) -> dict[tuple[str, int], dict[str, dict[str, Any]]]:
    cases: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for row in rows:
        cases.setdefault((row["model"], row["ranks"]), {})[row["contender"]] = row
    return cases


def ratios(case: dict[str, dict[str, Any]]) -> tuple[float, float]:
    """How much faster the better of Danlu's two is than PyTorch, eager and compiled."""
    ours = min(case["Danlu"]["seconds"], case["Danlu compiled"]["seconds"])
    return case["PyTorch"]["seconds"] / ours, case["PyTorch compiled"]["seconds"] / ours


def misses(rows: list[dict[str, Any]]) -> list[str]:
    found = []
    for (model, ranks), case in by_case(rows).items():
        eager, compiled = ratios(case)
        if eager < EAGER_BAR:
            found.append(f"{model} on {ranks} ranks: {eager:.2f} × eager")
        if compiled < COMPILED_BAR:
            found.append(f"{model} on {ranks} ranks: {compiled:.2f} × compiled")
    return found


def show(rows: list[dict[str, Any]], missed: list[str]) -> None:
    table = Table("model", "ranks", *CONTENDERS, "× eager", "× compiled", "MFU")
    for (model, ranks), case in by_case(rows).items():
        eager, compiled = ratios(case)
        times = [f"{case[name]['seconds']:.2f} s" for name in CONTENDERS]
        mfu = max(case[name]["mfu"] for name in ("Danlu", "Danlu compiled"))
        table.add_row(model, str(ranks), *times, f"{eager:.2f}", f"{compiled:.2f}", f"{mfu:.0%}")
    console = Console()
    console.print(table)
    for each in missed:
        console.print(f"[red]missed[/red]: {each}")


if __name__ == "__main__":
    sys.exit(main())
