"""Layouts trained on real ranks of this machine, one step at a time on command.

Every world of ranks is started once and builds all its layouts; then it waits for orders on its standard input, so
that layouts of different worlds can take turns and noise of the machine affects all of them equally. Used by
`plan_truth.py` and `topology.py`.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from danlu.spec.cluster import Cluster
from danlu.spec.model import Model, Moe
from danlu.spec.names import sanitize_name
from danlu.spec.plan import Degrees, PipelineConfig, Plan
from danlu.spec.recipe import BatchConfig, DataConfig, LRSchedule, Recipe

MANY_STEPS = 10**6
"""More than any layout runs."""


@dataclass(frozen=True)
class Layout:
    """A plan and the model it is tried with."""

    name: str
    plan: Plan
    experts: bool = False
    length: int = 256
    """Tokens per sequence; the batch always has the same number of tokens."""
    quick: bool = False
    """In the sample."""

    @property
    def world(self) -> int:
        """Ranks that it takes."""
        return self.plan.degrees.world


def plan(schedule: str = "1f1b", per_rank: int = 1, **settings: Any) -> Plan:
    degrees = Degrees(**{axis: settings.pop(axis) for axis in list(settings) if axis in Degrees.model_fields})
    return Plan(degrees=degrees, pipeline=PipelineConfig(schedule=schedule, stages_per_rank=per_rank), **settings)


def layouts() -> list[Layout]:
    """One, two and four ranks of this machine."""
    return [
        Layout("one rank", plan(), quick=True),
        Layout("one rank, recompute full, accumulate 4", plan(recompute="full", microbatches=4), quick=True),
        Layout("one rank, experts", plan(), experts=True),
        Layout("fsdp 2", plan(shard=2), quick=True),
        Layout("fsdp 2, accumulate 4", plan(shard=2, microbatches=4), quick=True),
        Layout("fsdp 2, recompute full", plan(shard=2, recompute="full")),
        Layout("replicas 2", plan(replicate=2)),
        Layout("tp 2", plan(tp=2), quick=True),
        Layout("cp 2, length 512", plan(cp=2), length=512),
        Layout("gpipe 2, 4 microbatches", plan("gpipe", pp=2, microbatches=4)),
        Layout("1f1b 2, 8 microbatches", plan(pp=2, microbatches=8), quick=True),
        Layout("interleaved 2 × 2, 4 microbatches", plan("interleaved", 2, pp=2, microbatches=4)),
        Layout("fsdp 2, experts", plan(shard=2), experts=True),
        Layout("ep 2, experts", plan(shard=2, ep=2), experts=True),
        Layout("fsdp 4", plan(shard=4)),
        Layout("hsdp 2 × 2", plan(replicate=2, shard=2)),
        Layout("fsdp 2 × tp 2", plan(shard=2, tp=2)),
        Layout("1f1b 2 × fsdp 2, 4 microbatches", plan(pp=2, shard=2, microbatches=4)),
        Layout("ep 4, experts", plan(shard=4, ep=4), experts=True),
    ]


def layouts_apart() -> list[Layout]:
    """Four ranks, each on its own host, two hosts per supernode."""
    return [
        Layout("fsdp 4", plan(shard=4)),
        Layout("hsdp 2 × 2", plan(replicate=2, shard=2)),
        Layout("replicas 4", plan(replicate=4)),
        Layout("fsdp 2 × tp 2", plan(shard=2, tp=2)),
        Layout("fsdp 2 × cp 2", plan(shard=2, cp=2)),
        Layout("1f1b 2 × fsdp 2, 4 microbatches", plan(pp=2, shard=2, microbatches=4)),
        Layout("1f1b 2 × replicas 2, 4 microbatches", plan(pp=2, replicate=2, microbatches=4)),
        Layout("1f1b 2 × tp 2, 4 microbatches", plan(pp=2, tp=2, microbatches=4)),
        Layout("1f1b 4, 8 microbatches", plan(pp=4, microbatches=8)),
        Layout("ep 2 × hsdp 2, experts", plan(replicate=2, shard=2, ep=2), experts=True),
        Layout("ep 4, experts", plan(shard=4, ep=4), experts=True),
    ]


def recipe(layout: Layout) -> Recipe:
    """17 M parameters (37 M with experts) and 2,048 tokens a step."""
    moe = Moe(experts=8, top_k=2, width=704, dense_layers=1) if layout.experts else None
    model = Model(vocabulary=4096, layers=4, width=512, heads=8, mlp_width=1408, sequence=512, moe=moe)
    return Recipe(
        name=sanitize_name(layout.name),
        steps=MANY_STEPS,
        model=model,
        data=DataConfig(shards="none"),
        batch=BatchConfig(sequences=2048 // layout.length, length=layout.length),
        schedule=LRSchedule(kind="constant"),
    )


class Noise:
    """Random samples: their contents do not change how long a step takes."""

    def __init__(self, batch: BatchConfig, vocabulary: int) -> None:
        self.length, self.vocabulary = batch.length, vocabulary

    def read_samples(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """The same rows for every request."""
        draw = np.random.default_rng(int(indices[0]))
        return draw.integers(0, self.vocabulary, (len(indices), self.length + 1))


@dataclass(frozen=True)
class World:
    """Ranks that wait for orders."""

    ranks: tuple[subprocess.Popen[str], ...]

    def build(self, name: str, made: Recipe, layout: Plan, cluster: Cluster | None = None) -> None:
        """Build a layout on all ranks, placed on the levels of a cluster, and run its first step."""
        placed = None if cluster is None else cluster.model_dump(mode="json")
        spec = {"recipe": made.model_dump(mode="json"), "plan": layout.model_dump(mode="json"), "cluster": placed}
        self.order(do="build", layout=name, **spec)
        self.step(name)

    def step(self, name: str) -> float:
        """Seconds of one step of a layout."""
        return float(self.order(do="step", layout=name)["seconds"])

    def order(self, **what: Any) -> dict[str, Any]:
        """Send an order to all ranks, and return rank 0's answer when all are done."""
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.write(json.dumps(what) + "\n")
            rank.stdin.flush()
        answers = []
        for number, rank in enumerate(self.ranks):
            assert rank.stdout is not None
            line = rank.stdout.readline()
            if not line:
                sys.exit(f"rank {number} of {len(self.ranks)} ended with exit code {rank.wait()} at {what}")
            answers.append(json.loads(line))
        return answers[0]


@contextmanager
def worlds(
    sizes: Sequence[int], apart: Sequence[str] = (), interface: str = "", host: str = "127.0.0.1"
) -> Iterator[dict[int, World]]:
    """Start the ranks of every world size; `apart` are commands that put each rank on its own host."""
    started: dict[int, World] = {}
    try:
        for size in sizes:
            started[size] = World(tuple(_start(size, apart, interface, host)))
        yield started
    finally:
        for world in started.values():
            for rank in world.ranks:
                rank.kill()
                rank.wait()


def _start(size: int, apart: Sequence[str], interface: str, host: str) -> Iterator[subprocess.Popen[str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | ({"GLOO_SOCKET_IFNAME": interface} if interface else {})
    for rank in range(size):
        command = [sys.executable, __file__, "--rank", str(rank), "--world", str(size), "--store", f"{host}:{port}"]
        if apart:
            command = [*apart[rank].split(), *command]
        yield subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def rank_main(rank: int, world: int, store: str) -> None:
    """Execute orders: `build` a layout, run a `step` of it, or `drop` it."""
    import torch

    from danlu.chips.registry import find_chip
    from danlu.comm.rendezvous import RankInfo, rendezvous
    from danlu.comm.world import World

    torch.set_num_threads(1)
    find_chip("cpu").runtime.set_device(rank)
    place = RankInfo(rank=rank, world_size=world, local_rank=rank, endpoint=store, token=bytes(32))
    joined = World.join(place, "gloo", rendezvous(place))
    built: dict[str, Callable[[], float]] = {}
    for line in sys.stdin:
        order = json.loads(line)
        name = order["layout"]
        answer: dict[str, Any] = {"layout": name}
        if order["do"] == "build":
            placed = None if order["cluster"] is None else Cluster.model_validate(order["cluster"])
            built[name] = build(Recipe.model_validate(order["recipe"]), Plan.model_validate(order["plan"]), placed)
        elif order["do"] == "drop":
            del built[name]
        else:
            answer["seconds"] = built[name]()
        print(json.dumps(answer), flush=True)
    joined.shutdown()


def build(made: Recipe, layout: Plan, cluster: Cluster | None) -> Callable[[], float]:
    """A function that trains one step with the full loop of `danlu train`, and returns its seconds."""
    import torch.distributed as dist
    from group_sharing_world import GroupSharingWorld

    from danlu.chips.registry import find_chip
    from danlu.comm.mesh import build_mesh
    from danlu.framework.batch_loader import BatchLoader
    from danlu.framework.build import build_train_state as build_run
    from danlu.framework.loop import TrainStages, run_training_loop
    from danlu.framework.stages import FixedData

    mesh = build_mesh(layout, GroupSharingWorld.adopt(), cluster, experts=made.decoder.moe is not None)
    state, forward_backward = build_run(made, layout, mesh)
    feed = BatchLoader(Noise(made.batch, made.decoder.vocabulary), made.batch, made.decoder.vocabulary, mesh)
    memory_peak = find_chip("cpu").runtime.max_memory
    stages = TrainStages(FixedData(feed), forward_backward, stop_requested=lambda: True, memory_peak=memory_peak)

    def step() -> float:
        dist.barrier()
        began = time.perf_counter()
        run_training_loop(made, state, mesh, stages)
        dist.barrier()
        return time.perf_counter() - began

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--store", required=True)
    arguments = parser.parse_args()
    rank_main(arguments.rank, arguments.world, arguments.store)


if __name__ == "__main__":
    main()
