"""One rank of `resilience_cost.py`: RANK WORLD PORT FOLDER TURNS. Trains in turns, with the machinery and without."""

import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.distributed import Work

from danlu.comm.flight_record import FlightWriter, flight_path, make_flight_folder
from danlu.comm.flight_recorder import FlightRecorder
from danlu.comm.mesh import build_mesh
from danlu.comm.rendezvous import RankInfo, rendezvous
from danlu.comm.world import World
from danlu.framework.batch_loader import BatchLoader
from danlu.framework.build import build_train_state
from danlu.framework.loop import TrainStages, run_training_loop
from danlu.framework.stages import FixedData, NoProgress, NoSnapshots
from danlu.framework.state import TrainState
from danlu.framework.state_snapshots import StateSnapshots
from danlu.spec import load_recipe
from danlu.spec.plan import Degrees, Plan
from danlu.spec.resilience import ResilienceConfig
from danlu.storage.checkpoint.local_shards import local_tensor
from danlu.storage.data.token_shards import ShuffledDataset, TokenShards

WARM_UP_TURNS = 4


class TimedSnapshots:
    """Snapshots, and how long each took."""

    def __init__(self, snapshots: StateSnapshots) -> None:
        self._snapshots, self.seconds = snapshots, list[float]()

    def take_if_due(self, state: TrainState, local_square: float) -> None:
        """Keep the state as it is now."""
        began = time.perf_counter()
        self._snapshots.take_if_due(state, local_square)
        self.seconds.append(time.perf_counter() - began)


class TimedRecorder(FlightRecorder):
    """A recorder that knows how long it has kept collectives waiting."""

    def __init__(self, writer: FlightWriter) -> None:
        self.seconds = 0.0
        super().__init__(writer)

    def _enter(self, operator: str, args: tuple[Any, ...]) -> int:
        began = time.perf_counter()
        ticket = super()._enter(operator, args)
        self.seconds += time.perf_counter() - began
        return ticket

    def _entered(self, ticket: int, work: Work | None) -> None:
        began = time.perf_counter()
        super()._entered(ticket, work)
        self.seconds += time.perf_counter() - began


def main() -> None:
    rank, world_size, port, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    turns = int(sys.argv[5])
    torch.set_num_threads(1)
    place = RankInfo(rank, world_size, rank, f"127.0.0.1:{port}", bytes(32))
    world = World.join(place, "gloo", rendezvous(place))
    recipe, plan = load_recipe(folder / "recipe.toml"), Plan(degrees=Degrees(shard=world_size))
    mesh = build_mesh(plan, world, None, experts=False)
    state, forward_backward = build_train_state(recipe, plan, mesh)
    dataset = ShuffledDataset(TokenShards.open(folder / "shards"), recipe.batch.length, recipe.seed)
    data = FixedData(BatchLoader(dataset, recipe.batch, recipe.model.vocabulary, mesh))
    make_flight_folder(folder)
    seconds: dict[str, list[float]] = {"with": [], "without": [], "recorder": []}
    snapshots = StateSnapshots.open(make_flight_folder(folder), state, world, ResilienceConfig(), None, None, _fail)
    assert snapshots is not None
    timed = TimedSnapshots(snapshots)
    for turn in range(-WARM_UP_TURNS, 2 * turns):
        kind = "with" if turn // 2 % 2 == turn % 2 else "without"  # a, b, b, a: drift falls on both alike
        with ExitStack() as stack:
            recorder: TimedRecorder | NoProgress = NoProgress()
            if kind == "with":
                recorder = TimedRecorder(FlightWriter(flight_path(folder, rank), rank))
                stack.callback(recorder.close)
            stages = TrainStages(
                data,
                forward_backward,
                stop_requested=lambda: True,  # after one step
                progress=recorder,
                snapshots=timed if kind == "with" else NoSnapshots(),
            )
            world.barrier()
            began = time.perf_counter()
            run_training_loop(recipe, state, mesh, stages)
            world.barrier()
            took = time.perf_counter() - began
        if turn >= 0:
            seconds[kind].append(took)
            if isinstance(recorder, TimedRecorder):
                seconds["recorder"].append(recorder.seconds)
    snapshots.close()
    if rank == 0:
        held = sum(local_tensor(tensor).nbytes for tensor in state.tensors().values())
        (folder / "seconds.json").write_text(json.dumps(seconds | {"snapshot": timed.seconds, "state_bytes": held}))
    world.shutdown()


def _fail(message: str) -> None:
    raise RuntimeError(message)


if __name__ == "__main__":
    main()
