"""Profiles steps of this rank: the training loop's own `take_step`, under torch's profiler."""

import json
import os
import socket
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from danlu.comm.mesh import ParallelMesh
from danlu.framework.loop import TrainStages, take_step
from danlu.framework.state import TrainState
from danlu.profiler.attribution import StepAttribution, attribute_step
from danlu.profiler.collective_calls import CollectiveRecorder, match_calls
from danlu.profiler.profiler_events import STEP, RankCollective, step_trees
from danlu.profiler.step_annotations import annotated_stages
from danlu.profiler.timeline import rank_timeline
from danlu.spec.plan import DENSE_AXES
from danlu.spec.profile import ProfiledCollectives, ProfiledStep, ProfileRequest, RankProfile
from danlu.spec.recipe import Recipe
from danlu.torch_compat import RecordFunction


def profile_rank(
    recipe: Recipe,
    state: TrainState,
    mesh: ParallelMesh,
    stages: TrainStages,
    request: ProfileRequest,
    report_phase: Callable[[str], None] = lambda phase: None,
) -> RankProfile | None:
    """Warm up, time steps without a profiler, and profile as many; None on a rank that is not profiled.

    All ranks call this together, and take the same number of steps.
    """

    def step(stages: TrainStages = stages) -> float:
        return take_step(recipe, state, mesh, stages).event.seconds

    report_phase("warming up")
    for _ in range(request.warmup):
        step()
    report_phase("timing steps without the profiler")
    plain = [step() for _ in range(request.steps)]
    report_phase("profiling")
    if mesh.rank not in request.ranks:
        for _ in range(1 + request.steps):
            step()
        return None
    with CollectiveRecorder() as recorder:
        step()
    numbers, seconds = list(range(state.step, state.step + request.steps)), []
    with annotated_stages(stages, state.stage_modules, mesh.plan.compile) as watched:
        activities = [ProfilerActivity.CPU]
        with profile(activities=activities, record_shapes=True, acc_events=True) as profiler:
            began = time.time_ns()
            for number in numbers:
                with RecordFunction(f"{STEP}{number}"):
                    seconds.append(step(watched))
    report_phase("reading the profile")
    trees = step_trees(_records(profiler))
    pipeline = mesh.plan.degrees.pp > 1
    found = [attribute_step(tree, match_calls(tree, recorder.calls), pipeline=pipeline) for tree in trees]
    timeline, dropped = rank_timeline(mesh.rank, trees, found)
    axes = [*DENSE_AXES, *(["ep"] if mesh.plan.degrees.ep > 1 else [])]
    return RankProfile(
        rank=mesh.rank,
        place={axis: mesh.coordinates[axis] for axis in axes},
        host=socket.gethostname(),
        pid=os.getpid(),
        started_ns=began,
        steps=tuple(
            ProfiledStep(step=number, seconds=took, parts={part: 1e-6 * each for part, each in step.parts.items()})
            for number, took, step in zip(numbers, seconds, found, strict=True)
        ),
        unprofiled_seconds=tuple(plain),
        collectives=_collective_totals(found),
        dropped_events=dropped,
        timeline=tuple(timeline),
    )


def _records(profiler: profile) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="danlu-profile-") as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        records: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
    return records


def _collective_totals(steps: list[StepAttribution]) -> tuple[ProfiledCollectives, ...]:
    exposed: dict[RankCollective, list[float]] = defaultdict(list)
    for step in steps:
        for called in step.collectives:
            exposed[called.call].append(called.exposed)
    return tuple(
        ProfiledCollectives(
            operation=call.operation,
            dtype=call.dtype,
            payload=call.payload,
            axes=call.axes,
            ranks=call.ranks,
            count=len(times),
            seconds=1e-6 * sum(times),
        )
        for call, times in exposed.items()
    )
