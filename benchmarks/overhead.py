"""What Danlu's own loop costs: tokens/s against FSDP2 written bare, the same model on two ranks, in one run.

    python benchmarks/overhead.py [--quick]

Both live in the same processes and take turns of one step, so that noise of the machine hits both alike. It only
ever makes a step slower, so the speeds compared are those of the quarter of steps that were least disturbed.
Exits non-zero if the ratio is below the bar, eager or compiled. The last line is JSON.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.progress import track
from torch.distributed.fsdp import fully_shard

from danlu.chips.registry import find
from danlu.comm.join import Place, join, leave, meet
from danlu.comm.mesh import Mesh, build_mesh
from danlu.framework.build import build as build_run
from danlu.framework.feed import Feed
from danlu.framework.journal import Journal
from danlu.framework.loop import train
from danlu.framework.transformer import Decoder
from danlu.spec.model import Model
from danlu.spec.plan import Plan, fully_sharded
from danlu.spec.recipe import Batch, Data, Recipe, Schedule
from danlu.spec.run import RunFolder
from danlu.storage.build import build as build_shards
from danlu.storage.tokenizer import BytesTokenizer
from danlu.storage.tokens import Dataset, TokenShards

BAR = 0.98
WARM_UP = 2
ROUNDS = 4
"""A sample that misses the bar is taken longer, up to so many times: noise averages out, a real loss does not."""
RANKS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer turns, for CI")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        rank_main(arguments.rank, arguments.port, arguments.folder, turns=24 if arguments.quick else 80)
        return
    with tempfile.TemporaryDirectory() as folder:
        results = start_ranks(Path(folder), arguments.quick)
    for mode, result in results.items():
        print(
            f"{mode:9} bare {result['bare']:7.0f} tokens/s, danlu {result['danlu']:7.0f} tokens/s, ratio "
            f"{result['ratio']:.3f} (middle half of {result['turns']} turns {result['low']:.3f}–{result['high']:.3f})"
        )
    passed = all(result["ratio"] >= BAR for result in results.values())
    print(json.dumps({"benchmark": "overhead", "bar": BAR, "passed": passed, **results}))
    sys.exit(0 if passed else 1)


def start_ranks(folder: Path, quick: bool) -> dict[str, dict[str, float]]:
    build_shards(["python-stdlib"], folder / "shards", BytesTokenizer())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, __file__, "--port", str(port), "--folder", str(folder), *(["--quick"] if quick else [])]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ranks = [subprocess.Popen([*command, "--rank", str(rank)], env=environment) for rank in range(RANKS)]
    codes = [rank.wait() for rank in ranks]
    if any(codes):
        sys.exit(f"ranks ended with exit codes {codes}")
    return json.loads((folder / "results.json").read_text())


def rank_main(rank: int, port: int, folder: Path, turns: int) -> None:
    torch.set_num_threads(1)
    place = Place(rank=rank, world=RANKS, local_rank=rank, store=f"127.0.0.1:{port}")
    join(place, "gloo", meet(place))
    results = {}
    for mode in ("eager", "compiled"):
        plan = fully_sharded(RANKS).model_copy(update={"compile": mode == "compiled"})
        mesh = build_mesh(plan, torch.device("cpu"), rank, None, experts=False)
        recipe = make_recipe(folder, steps=WARM_UP + ROUNDS * turns)
        contenders = {"bare": bare(recipe, plan, mesh), "danlu": danlu(recipe, plan, mesh, folder / mode)}
        results[mode] = compete(contenders, turns, recipe.batch.tokens, rank)
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(results))
    leave()


def make_recipe(folder: Path, steps: int) -> Recipe:
    """14 M parameters; 1,024 tokens a step."""
    model = Model(vocabulary=264, layers=8, width=384, heads=6, mlp_width=1024, sequence=256)
    return Recipe(
        name="overhead",
        steps=steps,
        model=model,
        data=Data(shards=str(folder / "shards")),
        batch=Batch(sequences=4, length=256),
        schedule=Schedule(kind="constant"),
    )


def bare(recipe: Recipe, plan: Plan, mesh: Mesh) -> Callable[[int], None]:
    """FSDP2 as its tutorial writes it: shard every block, then the root; AdamW, clipping, the loss read every step."""
    torch.manual_seed(0)
    model = Decoder(recipe.model)
    for layer, block in model.blocks.items():
        if plan.compile:
            model.blocks[layer] = block = torch.compile(block)
        fully_shard(block, mesh=mesh.parameters)
    fully_shard(model.embed, mesh=mesh.parameters)
    fully_shard(model.head, mesh=mesh.parameters)
    fully_shard(model, mesh=mesh.parameters)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    data = Dataset(TokenShards.open(Path(recipe.data.shards)), recipe.batch.length, recipe.seed)
    share = recipe.batch.sequences // RANKS
    cursor = 0

    def steps(count: int) -> None:
        nonlocal cursor
        for _ in range(count):
            first = cursor + mesh.rank * share
            rows = torch.from_numpy(data.at(np.arange(first, first + share)))
            scores = model(rows[:, :-1])
            loss = F.cross_entropy(scores.flatten(0, 1).float(), rows[:, 1:].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            loss.item()
            cursor += recipe.batch.sequences

    return steps


def danlu(recipe: Recipe, plan: Plan, mesh: Mesh, folder: Path) -> Callable[[int], None]:
    """The whole loop as `danlu train` runs it: global loss and norm, journal, TensorBoard, the wish to stop."""
    state, forward_backward = build_run(recipe, plan, mesh)
    shards = TokenShards.open(Path(recipe.data.shards))
    feed = Feed(Dataset(shards, recipe.batch.length, recipe.seed), recipe.batch, recipe.model.vocabulary, mesh)
    if mesh.rank == 0:
        folder.mkdir()
    write = Journal(RunFolder(folder)).write if mesh.rank == 0 else (lambda event: None)
    memory_peak = find("cpu").runtime.memory_peak

    def steps(count: int) -> None:
        until = state.step + count
        train(
            recipe, state, forward_backward, feed, mesh, memory_peak, write,
            maybe_save=lambda state, last: None, stop=lambda: state.step + 1 >= until,
        )  # fmt: skip

    return steps


def compete(contenders: dict[str, Callable[[int], None]], turns: int, tokens: int, rank: int) -> dict[str, float]:
    """Take turns; the ratio is that of the first quartiles, and its spread that of single turns."""
    for steps in contenders.values():
        steps(WARM_UP)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        take_turns(contenders, turns, seconds, rank)
        speed = {name: tokens / statistics.quantiles(taken, n=4)[0] for name, taken in seconds.items()}
        # Rank 0's clock decides for both whether the sample is long enough.
        enough = torch.tensor(float(speed["danlu"] / speed["bare"] >= BAR))
        dist.broadcast(enough, src=0)
        if enough:
            break
    ratios = sorted(b / d for b, d in zip(seconds["bare"], seconds["danlu"], strict=True))
    low, _, high = statistics.quantiles(ratios, n=4)
    return speed | {"ratio": speed["danlu"] / speed["bare"], "low": low, "high": high, "turns": len(ratios)}


def take_turns(
    contenders: dict[str, Callable[[int], None]], turns: int, seconds: dict[str, list[float]], rank: int
) -> None:
    """Add the seconds of so many turns of every contender."""
    for turn in track(range(turns), description="turns", disable=rank != 0 or not sys.stdout.isatty()):
        # Whoever comes first in a turn comes second in the next.
        for name in sorted(contenders, reverse=bool(turn % 2)):
            dist.barrier()
            started = time.perf_counter()
            contenders[name](1)
            dist.barrier()
            seconds[name].append(time.perf_counter() - started)


if __name__ == "__main__":
    main()
