"""The door of one training process: from a run's folder to its last step."""

import fcntl
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from math import ceil
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from danlu.chips.descriptor import Descriptor
from danlu.chips.measure import matmul_peak
from danlu.chips.registry import find
from danlu.comm.join import Place, join, leave, meet
from danlu.comm.mesh import Mesh, build_mesh
from danlu.framework.build import build
from danlu.framework.continuity import Continuity, continuity
from danlu.framework.guard import stop_on_signal
from danlu.framework.journal import Journal
from danlu.framework.keeper import Keeper
from danlu.framework.loop import train
from danlu.framework.precision import DTYPES
from danlu.framework.state import TrainState
from danlu.framework.supply import Supply
from danlu.framework.weigh import weigh
from danlu.framework.weights import load_weights
from danlu.spec import (
    Cluster,
    Ended,
    Event,
    Recipe,
    Resumed,
    RunFolder,
    Started,
    Warned,
    load_cluster,
    load_plan,
    load_recipe,
)
from danlu.spec.event import PeakSource
from danlu.spec.recipe import Checkpoint, has_experts
from danlu.storage.checkpoint.checkpoints import Checkpoints, near_folder, open_checkpoints
from danlu.storage.checkpoint.home import home_of
from danlu.storage.checkpoint.saver import Policy
from danlu.storage.order import Ints
from danlu.storage.training_data import TrainingData

PEAK_SECONDS = 1.0
"""Time spent on measuring the matrix-multiply peak where no cluster file has it."""


def run_worker(run: RunFolder, place: Place) -> None:
    """Train the run in `run` as the rank at `place`; goes on from its newest checkpoint if there is one."""
    with stop_on_signal() as stop, _alone(run) if place.rank == 0 else nullcontext():
        recipe, plan = load_recipe(run.recipe), load_plan(run.plan)
        cluster = load_cluster(str(run.cluster)) if run.cluster.exists() else None
        chip = find(cluster.chip.kind if cluster else None)
        device = chip.runtime.device(place.local_rank)
        book = meet(place)
        join(place, _backend(chip, place), book)
        try:
            mesh = build_mesh(plan, device, place.rank, cluster, experts=has_experts(recipe.model))
            _train(run, recipe, mesh, chip, cluster, stop, place, book)
        except Exception as error:
            # At once: the other ranks fail for want of this one, and whoever looks for the culprit asks who was first.
            sys.stderr.write(f"{failure_line(place.rank, error)}\n")
            sys.stderr.flush()
            raise
        finally:
            leave()


def _checkpoints(run: RunFolder, saves: Checkpoint, mesh: Mesh) -> Checkpoints:
    where, options = home_of(run, saves)
    policy = Policy(
        parity=saves.parity,
        group=saves.group,
        retries=saves.retries,
        bandwidth=1e6 * saves.bandwidth,
        near=near_folder(saves.near, where) if saves.near else None,
    )
    return open_checkpoints(where, saves.keep, mesh.device, mesh.plan.degrees.model_dump(), policy, options)


def failure_line(rank: int, error: Exception) -> str:
    """What a rank says as soon as it fails, with the time."""
    return f"rank {rank} failed at {time.time():.6f}: {type(error).__name__}: {error}"


def _train(
    run: RunFolder,
    recipe: Recipe,
    mesh: Mesh,
    chip: Descriptor,
    cluster: Cluster | None,
    stop: Callable[[], bool],
    place: Place,
    book: Store,
) -> None:
    state, forward_backward = build(recipe, mesh.plan, mesh)
    saves = recipe.checkpoint
    checkpoints = _checkpoints(run, saves, mesh)
    if saves.peers:
        checkpoints.meet_neighbours(PrefixStore("checkpoints", book), place.local_rank, place.store)
    early: list[Event] = []  # told after `started`, which has the step that is found here
    keeper = Keeper(checkpoints, recipe.checkpoint, mesh.rank, mesh.plan.degrees.world, early.append)
    if not keeper.resume(state) and recipe.weights:
        load_weights(state.parts, recipe.model, Path(recipe.weights))
    keeper.rehearse(state, first_on_host=place.local_rank == 0, between_failures=_between_failures(mesh, cluster))
    if saves.scrub:
        checkpoints.scrub(3600 * saves.scrub)
    supply = Supply(run, recipe, mesh, state.cursor)
    peak, source = _peak(recipe, mesh, cluster)
    size, work = weigh(recipe)
    started = Started(
        time=time.time(),
        world=mesh.plan.degrees.world,
        chip=chip.name,
        parameters=size,
        step=state.step,
        steps=recipe.steps,
        tokens_per_step=recipe.batch.tokens,
        flops_per_token=work,
        peak=peak,
        peak_source=source,
        baseline_loss=supply.data.baseline,
    )
    with Journal(run, state.step) if mesh.rank == 0 else nullcontext() as journal:
        write: Callable[[Event], None] = journal.write if journal else lambda event: None
        keeper.write = write
        for event in (started, *(_with_continuity(early, run, supply.data) if journal else ())):
            write(event)
        save = partial(_save, keeper, supply, mesh.rank, write)
        train(
            recipe, state, forward_backward, supply.feed, mesh, chip.runtime.memory_peak, write, save,
            lambda: stop() or keeper.hopeless, keeper.settle,
        )  # fmt: skip
        keeper.close()
        outcome: Literal["finished", "stopped"] = "finished" if state.step == recipe.steps else "stopped"
        write(Ended(time=time.time(), step=state.step, outcome=outcome))


def _between_failures(mesh: Mesh, cluster: Cluster | None) -> float | None:
    """Mean seconds between failures of the whole run: it fails as often as any of its nodes."""
    if cluster is None or cluster.failures is None:
        return None
    return cluster.failures.node_mtbf / ceil(mesh.plan.degrees.world / cluster.chips_per_node)


def _with_continuity(events: list[Event], run: RunFolder, data: TrainingData) -> list[Event]:
    """What was found when the run resumed, with what the run's history says of its samples."""
    told: list[Event] = []
    for event in events:
        if isinstance(event, Resumed):
            found = _continuity(event, run, data)
            if found is not None:
                event = event.model_copy(update={"repeated": found.repeated, "skipped": found.skipped})
                told += _discontinuity(event)
        told.append(event)
    return told


def _continuity(event: Resumed, run: RunFolder, data: TrainingData) -> Continuity | None:
    try:
        history = list(run.read_events())
    except ValueError:  # a line that is no event: whoever shows the run names it, and nothing is claimed of samples
        return None

    def which(indices: Ints) -> list[tuple[int, int, int]]:
        places = data.places(indices)
        return [(place.source, data.epoch(place.source, place.place), place.number) for place in places]

    return continuity(history, event.step, event.samples, data.length, which)


def _discontinuity(event: Resumed) -> list[Event]:
    if not event.repeated and not event.skipped:
        return []
    message = (
        f"the checkpoint of step {event.step} counts {event.samples} samples, but the steps up to it consumed others: "
        f"{event.repeated} are read again and {event.skipped} never; was the length of a sequence or the batch changed?"
    )
    return [Warned(time=event.time, rank=0, message=message)]


def _save(
    keeper: Keeper, supply: Supply, rank: int, write: Callable[[Event], None], state: TrainState, last: bool
) -> None:
    """Tell what the data has to say, save when it is time to, and then see what was appended."""
    for message in supply.warnings():
        write(Warned(time=time.time(), rank=rank, message=message))
        if rank:  # rank 0 keeps the journal, the others have their logs
            sys.stderr.write(f"rank {rank}: {message}\n")
    if keeper.maybe_save(state, last) and not last:
        supply.take_up(state.cursor)


def _backend(chip: Descriptor, place: Place) -> str:
    if chip.collectives is not None:
        return chip.collectives.backend
    if place.world > 1:
        raise RuntimeError(f"chip {chip.name} must offer collectives for {place.world} ranks, but has none; use 1 rank")
    return "gloo"  # a run of one never talks to anybody


def _peak(recipe: Recipe, mesh: Mesh, cluster: Cluster | None) -> tuple[float, PeakSource]:
    """FLOP/s of all ranks that MFU is reckoned against, and where the figure comes from."""
    dtype, world = recipe.precision.compute, mesh.plan.degrees.world
    if cluster is not None:
        return cluster.chip.peak[dtype] * world, "measured by danlu probe" if cluster.chip.measured else "data sheet"
    # All ranks at once, as they will train: on a CPU they share memory, clock and, if they are many, cores.
    dist.barrier()
    rate = matmul_peak(mesh.device, DTYPES[dtype], PEAK_SECONDS, pieces=1)
    peak = torch.tensor(rate, device=mesh.device)
    dist.all_reduce(peak)
    return float(peak), "measured at start"


@contextmanager
def _alone(run: RunFolder) -> Iterator[None]:
    """Hold the run's lock, so that a second start of the same run does not write into the first."""
    with (run.path / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(f"run {run.path} must not be under way, but is; wait for it, or end it") from None
        yield
