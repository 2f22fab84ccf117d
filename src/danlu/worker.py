"""The door of one training process: from a run's folder to its last step."""

import fcntl
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from danlu.chips.descriptor import Descriptor
from danlu.chips.measure import matmul_peak
from danlu.chips.registry import find
from danlu.comm.join import Place, join, leave, meet
from danlu.comm.mesh import Mesh, build_mesh
from danlu.framework.build import build
from danlu.framework.guard import stop_on_signal
from danlu.framework.journal import Journal
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
    RunFolder,
    Saved,
    Started,
    Warned,
    load_cluster,
    load_plan,
    load_recipe,
)
from danlu.spec.event import PeakSource
from danlu.spec.recipe import has_experts
from danlu.storage.checkpoint import Checkpoints

PEAK_SECONDS = 1.0
"""Time spent on measuring the matrix-multiply peak where no cluster file has it."""


def run_worker(run: RunFolder, place: Place) -> None:
    """Train the run in `run` as the rank at `place`; goes on from its newest checkpoint if there is one."""
    with stop_on_signal() as stop, _alone(run) if place.rank == 0 else nullcontext():
        recipe, plan = load_recipe(run.recipe), load_plan(run.plan)
        cluster = load_cluster(str(run.cluster)) if run.cluster.exists() else None
        chip = find(cluster.chip.kind if cluster else None)
        device = chip.runtime.device(place.local_rank)
        join(place, _backend(chip, place), meet(place))
        try:
            mesh = build_mesh(plan, device, place.rank, cluster, experts=has_experts(recipe.model))
            _train(run, recipe, mesh, chip, cluster, stop)
        except Exception as error:
            # At once: the other ranks fail for want of this one, and whoever looks for the culprit asks who was first.
            sys.stderr.write(f"{failure_line(place.rank, error)}\n")
            sys.stderr.flush()
            raise
        finally:
            leave()


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
) -> None:
    state, forward_backward = build(recipe, mesh.plan, mesh)
    checkpoints = Checkpoints(run.checkpoints, recipe.checkpoint.keep, mesh.device)
    if (newest := checkpoints.latest()) is not None:
        state.restore(checkpoints.load(newest, state.tensors()))
    elif recipe.weights:
        load_weights(state.parts, recipe.model, Path(recipe.weights))
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
        write(started)
        save = partial(_save, recipe, checkpoints, supply, mesh.rank, write)
        train(recipe, state, forward_backward, supply.feed, mesh, chip.runtime.memory_peak, write, save, stop)
        outcome: Literal["finished", "stopped"] = "finished" if state.step == recipe.steps else "stopped"
        write(Ended(time=time.time(), step=state.step, outcome=outcome))


def _save(
    recipe: Recipe,
    checkpoints: Checkpoints,
    supply: Supply,
    rank: int,
    write: Callable[[Event], None],
    state: TrainState,
    last: bool,
) -> None:
    """Save when it is time to: every so many steps, and when the run ends or is stopped; then see what was appended."""
    for message in supply.warnings():
        write(Warned(time=time.time(), rank=rank, message=message))
        if rank:  # rank 0 keeps the journal, the others have their logs
            sys.stderr.write(f"rank {rank}: {message}\n")
    every = recipe.checkpoint.every
    if last or (every and state.step % every == 0):
        started = time.time()
        path = checkpoints.save(state.step, state.tensors(), state.scalars())
        now = time.time()
        write(Saved(time=now, step=state.step, path=path.name, seconds=now - started))
        if not last:
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
