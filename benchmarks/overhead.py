"""The overhead of Danlu's loop and what it gains: tokens/s beside plain FSDP2, the same model on two ranks, in one run.

    python benchmarks/overhead.py [--quick] [--report FILE]

Plain FSDP2 runs twice: on Danlu's process groups, beside which Danlu's loop is judged, and on PyTorch's own (gloo), as
it does without Danlu. All run in the same processes and take turns of one step, a fixed number of them, so that noise
of the machine affects all equally. Every eighth turn all evaluate the same held-out data before their step. A tenth of
the turns is trimmed at either end; the interval is that of 95 % of bootstrap samples of the turns. Danlu prefetches its
batches from disk, writes its events and serves its metrics over HTTP. The cost of a save is how much longer a block of
steps with one takes than a block without, until the checkpoint is complete and read back; the ratio counts one every
five minutes.

Exits non-zero if the ratio is below the bar: 0.98, eager and compiled each. `--quick` takes fewer turns, which are too
noisy for that bar: both together must reach 0.94, which a loop that is a tenth slower does not. The last line is JSON.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from reports import add_report_option, write_report
from rich.progress import track
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from danlu.chips.registry import find_chip
from danlu.comm.mesh import ParallelMesh, build_mesh
from danlu.comm.rendezvous import RankInfo, rendezvous
from danlu.comm.world import World
from danlu.framework.batch_loader import BatchLoader
from danlu.framework.build import build_train_state as build_run
from danlu.framework.checkpoint_manager import CheckpointManager
from danlu.framework.decoder.decoder import Decoder
from danlu.framework.evaluation import Evaluation
from danlu.framework.event_writer import EventWriter, RankEvents
from danlu.framework.loop import TrainStages, run_training_loop
from danlu.framework.metrics_server import MetricsServer
from danlu.framework.stages import FixedData
from danlu.framework.state import TrainState
from danlu.spec.model import Model
from danlu.spec.plan import Plan, fully_sharded_plan
from danlu.spec.recipe import (
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    EvaluationSource,
    LRSchedule,
    Recipe,
)
from danlu.spec.run_folder import RunFolder
from danlu.storage.checkpoint.engine import open_checkpoint_engine
from danlu.storage.data.build import build_dataset as build_shards
from danlu.storage.data.held_out import HeldOutSamples
from danlu.storage.data.token_shards import ShuffledDataset, TokenShards
from danlu.storage.data.tokenizer import BytesTokenizer

Floats = NDArray[np.float64]

BAR, QUICK_BAR = 0.98, 0.94
EVALUATE_EVERY = 8
EVALUATION_TOKENS = 2048
"""Two steps' tokens: some tenths of a step's time every eighth step, far more often than a run would evaluate."""
WARM_UP = EVALUATE_EVERY
TURNS, QUICK_TURNS = 100, 24
BLOCKS, QUICK_BLOCKS = 8, 3
"""Blocks of steps with a save, and as many without."""
BLOCK_STEPS = EVALUATE_EVERY
"""So that every block has one evaluation."""
SAVE_EVERY = 300.0
"""Seconds between saves. Runs save every few minutes to every few hours."""
TRIMMED = 0.1
RESAMPLED = 2000
RANKS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer turns and a lower bar, for CI")
    add_report_option(parser)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        rank_main(arguments.rank, arguments.port, arguments.folder, arguments.quick)
        return
    with tempfile.TemporaryDirectory() as folder:
        results = start_ranks(Path(folder), arguments.quick)
    for mode, found in results.items():
        print(
            f"{mode:9} PyTorch {found['pytorch']:6.0f} tokens/s, on Danlu's groups {found['bare']:6.0f}, Danlu "
            f"{found['danlu']:6.0f}: {found['gain']:.2f} × PyTorch, of its own groups' "
            f"{found['ratio']:.3f} ({found['low']:.3f} to {found['high']:.3f}, {found['turns']} turns); "
            f"a save every {SAVE_EVERY:.0f} s costs {found['save_s']:.2f} s; {found['unsaved']:.3f} without, "
            f"{found['evaluated']:.3f} with an evaluation"
        )
    ratios = [found["ratio"] for found in results.values()]
    bar = QUICK_BAR if arguments.quick else BAR
    judged = [float(np.sqrt(np.prod(ratios)))] if arguments.quick else ratios
    passed = all(ratio >= bar for ratio in judged)  # NaN is not
    print(f"{'passed' if passed else 'FAILED'}: {', '.join(f'{ratio:.3f}' for ratio in judged)}, must be {bar} or more")
    figures = {"bar": bar, "quick": arguments.quick, "passed": passed, "save_every_s": SAVE_EVERY, **results}
    write_report(arguments.report, "overhead", figures)
    print(json.dumps({"benchmark": "overhead", **figures}))
    sys.exit(0 if passed else 1)


def start_ranks(folder: Path, quick: bool) -> dict[str, dict[str, float]]:
    build_shards(["python-stdlib"], folder / "shards", BytesTokenizer())
    build_shards([__file__], folder / "held-out", BytesTokenizer())
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


def rank_main(rank: int, port: int, folder: Path, quick: bool) -> None:
    torch.set_num_threads(1)
    turns, blocks = (QUICK_TURNS, QUICK_BLOCKS) if quick else (TURNS, BLOCKS)
    place = RankInfo(rank=rank, world_size=RANKS, local_rank=rank, endpoint=f"127.0.0.1:{port}", token=bytes(32))
    joined = World.join(place, "gloo", rendezvous(place))
    sockets = dist.new_group(list(range(RANKS)))
    results = {}
    for mode in ("eager", "compiled"):
        plan = fully_sharded_plan(RANKS).model_copy(update={"compile": mode == "compiled"})
        mesh = build_mesh(plan, joined, None, experts=False)
        recipe = make_recipe(folder, steps=WARM_UP + turns + 2 * (blocks + 1) * BLOCK_STEPS)
        ours = Danlu(recipe, plan, mesh, folder / mode)
        groups = {"bare": mesh.fsdp_mesh, "pytorch": DeviceMesh.from_group(sockets, "cpu")}
        contenders = {name: bare(recipe, plan, over) for name, over in groups.items()}
        seconds = take_turns({**contenders, "danlu": ours.steps}, turns, rank)
        results[mode] = summary(seconds, cost_of_a_save(ours, blocks), recipe.batch.tokens)
        ours.close()
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(results))
    joined.shutdown()


def make_recipe(folder: Path, steps: int) -> Recipe:
    """14 M parameters; 1,024 tokens a step."""
    model = Model(vocabulary=264, layers=8, width=384, heads=6, mlp_width=1024, sequence=256)
    return Recipe(
        name="overhead",
        steps=steps,
        model=model,
        data=DataConfig(shards=str(folder / "shards")),
        batch=BatchConfig(sequences=4, length=256),
        schedule=LRSchedule(kind="constant"),
        evaluation=EvaluationConfig(
            every=EVALUATE_EVERY,
            tokens=EVALUATION_TOKENS,
            data=(EvaluationSource(name="held-out", shards=str(folder / "held-out")),),
        ),
    )


def bare(recipe: Recipe, plan: Plan, mesh: DeviceMesh) -> Callable[[int], None]:
    """FSDP2 tuned by hand: every block, the embedding and the head sharded, the head gathered only once.

    Batches are preloaded in memory, gradients are clipped without DTensor's dispatch, the loss is this rank's own.
    """
    torch.manual_seed(0)
    model = Decoder(recipe.model)
    for layer, block in model.blocks.items():
        if plan.compile:
            model.blocks[layer] = block = torch.compile(block)
        fully_shard(block, mesh=mesh)
    fully_shard(model.embed, mesh=mesh)
    fully_shard(model.head, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
    group, rank = mesh.get_group(), mesh.get_local_rank()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    data = ShuffledDataset(TokenShards.open(Path(recipe.data.shards)), recipe.batch.length, recipe.seed)
    share = recipe.batch.sequences // RANKS
    firsts = (step * recipe.batch.sequences + rank * share for step in range(recipe.steps))
    batches = enumerate([torch.from_numpy(data.read_samples(np.arange(first, first + share))) for first in firsts])
    source = TokenShards.open(Path(recipe.evaluation.data[0].shards))
    held_out = HeldOutSamples(source, recipe.batch.length, recipe.evaluation.tokens)
    mine = torch.from_numpy(held_out.read_samples(np.arange(rank, held_out.count, RANKS))).split(share)

    def loss_of(rows: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1).float(), rows[:, 1:].flatten())

    @torch.no_grad()
    def evaluate() -> float:
        model.eval()
        mean = torch.stack([loss_of(rows) for rows in mine]).mean() / RANKS
        dist.all_reduce(mean, group=group)
        model.train()
        return mean.item()

    def steps(count: int) -> None:
        for _ in range(count):
            number, rows = next(batches)
            if number % EVALUATE_EVERY == 0:
                evaluate()
            loss = loss_of(rows)
            loss.backward()
            clip_locally(model.parameters(), 1.0, group)
            optimizer.step()
            optimizer.zero_grad()
            loss.item()

    return steps


@torch.no_grad()
def clip_locally(parameters: Iterable[nn.Parameter], largest: float, group: dist.ProcessGroup) -> None:
    """Clip by the global norm: local gradients in one call each, and one number over the network."""
    gradients = [parameter.grad.to_local() for parameter in parameters]  # type: ignore[union-attr]
    square = torch.stack(torch._foreach_norm(gradients)).square().sum()
    dist.all_reduce(square, group=group)
    norm = square.sqrt().item()
    if norm > largest:
        torch._foreach_mul_(gradients, largest / norm)


class Danlu:
    """The full loop of `danlu train`: global loss and norm, events, metrics, evaluation, saves, stop requests."""

    def __init__(self, recipe: Recipe, plan: Plan, mesh: ParallelMesh, folder: Path) -> None:
        self.recipe, self.mesh = recipe, mesh
        self.state, self.forward_backward = build_run(recipe, plan, mesh)
        shards = TokenShards.open(Path(recipe.data.shards))
        batches = BatchLoader(
            ShuffledDataset(shards, recipe.batch.length, recipe.seed), recipe.batch, recipe.model.vocabulary, mesh
        )
        if mesh.rank == 0:
            folder.mkdir()
        events = RankEvents(mesh.rank)
        if mesh.rank == 0:
            metrics = MetricsServer(recipe.name, port=0)
            events.write_to(EventWriter(RunFolder(folder), sinks=[metrics]).write)
        checkpoints = open_checkpoint_engine(folder / "checkpoints", 1, mesh.world, plan.degrees.model_dump())
        self.manager = _Periodic(checkpoints, CheckpointConfig(keep=1), mesh.rank, events)
        self.manager.preflight(self.state, first_on_host=mesh.rank == 0, between_failures=None)
        self.until = 0
        self.stages = TrainStages(
            FixedData(batches),
            self.forward_backward,
            self.manager,
            Evaluation(recipe, mesh, self.state, events.warn),
            events,
            stop_requested=lambda: self.state.step + 1 >= self.until,
            memory_peak=find_chip("cpu").runtime.max_memory,
        )

    def steps(self, count: int) -> None:
        """Take so many steps."""
        self.until = self.state.step + count
        run_training_loop(self.recipe, self.state, self.mesh, self.stages)

    def steps_with_a_save(self, count: int) -> None:
        """The same, with a save that begins after the first of them, and is complete in the end."""
        self.manager.settings = CheckpointConfig(every=self.state.step + 1, keep=1)
        self.steps(count)
        self.manager.settings = CheckpointConfig(keep=1)
        self.manager.checkpoints.wait_for_saves()

    def close(self) -> None:
        """Check that every save succeeded, and free the memory."""
        self.manager.close()
        assert self.manager.last_saved_step, "a save must have come about to be counted"
        assert not self.manager.consecutive_failures


class _Periodic(CheckpointManager):
    """Does not treat the end of a turn as the end of the run."""

    def save_if_due(self, state: TrainState, last: bool) -> bool:
        return super().save_if_due(state, last=False)


def take_turns(contenders: dict[str, Callable[[int], None]], turns: int, rank: int) -> dict[str, Floats]:
    """Seconds of every turn of one step; the order alternates from turn to turn."""
    for steps in contenders.values():
        steps(WARM_UP)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in track(range(turns), description="turns", disable=rank != 0 or not sys.stdout.isatty()):
        for name in sorted(contenders, reverse=bool(turn % 2)):
            seconds[name].append(timed(contenders[name], 1))
    return {name: np.array(taken) for name, taken in seconds.items()}


def timed(steps: Callable[[int], None], count: int) -> float:
    dist.barrier()
    started = time.perf_counter()
    steps(count)
    dist.barrier()
    return time.perf_counter() - started


def cost_of_a_save(ours: Danlu, blocks: int) -> float:
    """Seconds that a save adds to a run, waiting and slowed steps together."""
    ours.steps_with_a_save(BLOCK_STEPS)
    extra = []
    for block in range(blocks):
        order = [ours.steps_with_a_save, ours.steps] if block % 2 else [ours.steps, ours.steps_with_a_save]
        taken = {steps: timed(steps, BLOCK_STEPS) for steps in order}
        extra.append(taken[ours.steps_with_a_save] - taken[ours.steps])
    return float(np.mean(extra))


def summary(seconds: dict[str, Floats], save: float, tokens: int) -> dict[str, float]:
    """Speeds, their ratio and its interval; regular saves slow Danlu down, and not the other."""
    bare, danlu = seconds["bare"], seconds["danlu"]
    slower = 1 + save / SAVE_EVERY
    evaluated = np.arange(len(bare)) % EVALUATE_EVERY == 0

    def seconds_a_step(turns: Floats) -> float:
        """With their share of evaluations, which would be trimmed as outliers if they were not kept apart."""
        share = 1 / EVALUATE_EVERY
        return share * trimmed_mean(turns[evaluated]) + (1 - share) * trimmed_mean(turns[~evaluated])

    random = np.random.default_rng(0)
    kinds = [np.flatnonzero(evaluated), np.flatnonzero(~evaluated)]
    ratios = []
    for _ in range(RESAMPLED):
        draw = np.arange(len(bare))
        for kind in kinds:
            draw[kind] = random.choice(kind, len(kind))
        ratios.append(seconds_a_step(bare[draw]) / seconds_a_step(danlu[draw]) / slower)
    low, high = np.quantile(ratios, [0.025, 0.975])
    unsaved = seconds_a_step(bare) / seconds_a_step(danlu)
    return {
        "pytorch": tokens / seconds_a_step(seconds["pytorch"]),
        "gain": seconds_a_step(seconds["pytorch"]) / seconds_a_step(danlu) / slower,
        "bare": tokens / seconds_a_step(bare),
        "danlu": tokens / seconds_a_step(danlu) / slower,
        "ratio": unsaved / slower,
        "evaluated": trimmed_mean(bare[evaluated]) / trimmed_mean(danlu[evaluated]),
        "low": float(low),
        "high": float(high),
        "unsaved": unsaved,
        "save_s": save,
        "turns": len(bare),
    }


def trimmed_mean(values: Floats) -> float:
    """The mean without a tenth of the values at either end."""
    cut = int(TRIMMED * len(values))
    return float(np.sort(values)[cut : len(values) - cut].mean())


if __name__ == "__main__":
    main()
