"""The training loop: every stage is named here, the collective ones too; nothing hides in a callback."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from danlu.comm.mesh import ParallelMesh
from danlu.comm.traffic_meter import StepTraffic
from danlu.framework.build import ForwardBackward
from danlu.framework.collapse_alarm import CollapseAlarm
from danlu.framework.optimizer import learning_rate
from danlu.framework.spike_recovery import SpikeRecovery
from danlu.framework.stages import (
    CheckpointStage,
    DataStage,
    EvaluationStage,
    EventSink,
    IgnoreEvents,
    MetricsStage,
    NoCheckpoints,
    NoEvaluation,
    NoProgress,
    NoSnapshots,
    ProgressStage,
    SnapshotStage,
)
from danlu.framework.state import TrainState
from danlu.framework.step_guard import Verdict
from danlu.framework.step_metrics import all_reduce_counted, compute_step_metrics, update_router_biases
from danlu.parallel.grad_norm import clip_grads_with_norm
from danlu.spec.event import StepEvent
from danlu.spec.recipe import Recipe


def _never() -> bool:
    return False


def _unknown_memory() -> int:
    return 0


@dataclass(frozen=True)
class TrainStages:
    """What the loop calls. What is left out does nothing: no checkpoints, evaluation or events, no request to stop."""

    data: DataStage
    forward_backward: ForwardBackward
    checkpoints: CheckpointStage = field(default_factory=NoCheckpoints)
    evaluation: EvaluationStage = field(default_factory=NoEvaluation)
    events: EventSink = field(default_factory=IgnoreEvents)
    stop_requested: Callable[[], bool] = _never
    """Whether this rank was asked to stop; all ranks stop after the same step."""
    memory_peak: Callable[[], int] = _unknown_memory
    """Largest memory of this rank so far, in bytes."""
    progress: ProgressStage = field(default_factory=NoProgress)
    snapshots: SnapshotStage = field(default_factory=NoSnapshots)
    quarantined: frozenset[int] = frozenset()
    """Steps that failed again and again, here by the number of steps before them: their batches are passed over."""
    compute_metrics: MetricsStage = compute_step_metrics
    """Global loss, norm and stop request; a dry run has its own, because its tensors have no values to read."""


class StepResult(NamedTuple):
    """A step that was taken."""

    event: StepEvent
    verdict: Verdict
    stop_requested: bool
    """Some rank was asked to stop, or gave up on its checkpoints."""
    local_square: float
    """This rank's part of the squared norm of the gradient: replicas have the same."""


def run_training_loop(recipe: Recipe, state: TrainState, mesh: ParallelMesh, stages: TrainStages) -> None:
    """Take steps until the recipe's are done or a rank is asked to stop.

    All ranks see the same metrics, so all of them decide alike.
    """
    recovery, last = SpikeRecovery(recipe, stages.checkpoints, stages.events), False
    collapse = CollapseAlarm(recipe)
    while state.step < recipe.steps and not last:
        _evaluate_if_due(state, stages)  # a run that was asked to stop does this when it resumes
        if state.step in stages.quarantined:
            _pass_over_batch(recipe, state, mesh, stages)
            continue
        step = take_step(recipe, state, mesh, stages)
        stages.events.write(step.event)
        if (warning := collapse.check(step.event.imbalance)) and mesh.rank == 0:
            stages.events.warn(warning)
        last = step.stop_requested
        rewound = recovery.rewound(state, step.event, step.verdict)
        # in memory that outlives this process: a fault costs the step in flight
        stages.snapshots.take_if_due(state, step.local_square)
        if rewound:
            continue  # the state is that of a checkpoint: there is nothing new to save
        state.guard.raise_if_diverged(step.event.loss, step.event.norm, state.step)
        last |= state.step == recipe.steps

        stages.progress.enter_phase("last save" if last else "saving", state.step)
        for warning in stages.data.pop_warnings():
            stages.events.warn(warning)
        was_due = stages.checkpoints.save_if_due(state, last)  # in the background; the last one is waited for
        if was_due and not last:
            stages.progress.enter_phase("refreshing data", state.step)
            stages.data.refresh(state.cursor)  # a broadcast: all ranks read appended data from the same sample on
    if state.step == recipe.steps:
        _evaluate_if_due(state, stages)


def _pass_over_batch(recipe: Recipe, state: TrainState, mesh: ParallelMesh, stages: TrainStages) -> None:
    count = recipe.batch.sequences_at(state.cursor)
    if mesh.rank == 0:
        stages.events.warn(
            f"the program failed twice at step {state.step + 1:,}: its batch, samples {state.cursor:,} to "
            f"{state.cursor + count - 1:,}, is passed over (`danlu data locate` shows them)"
        )
    state.next_step(count)
    if state.step == recipe.steps:
        stages.checkpoints.save_if_due(state, last=True)


def _evaluate_if_due(state: TrainState, stages: TrainStages) -> None:
    stages.progress.enter_phase("evaluating", state.step)
    if (evaluated := stages.evaluation.run_if_due(state)) is not None:
        stages.events.write(evaluated)


def _by_level(traffic: StepTraffic, mesh: ParallelMesh) -> dict[str, int] | None:
    if mesh.world.size == 1 or not mesh.world.levels:
        return None
    return {level.name: round(sent) for level, sent in zip(mesh.world.levels, traffic.sent, strict=True)}


def take_step(recipe: Recipe, state: TrainState, mesh: ParallelMesh, stages: TrainStages) -> StepResult:
    """One optimizer step: the loop's, and the dry run's."""
    started = time.perf_counter()
    sequences, scaler = recipe.batch.sequences_at(state.cursor), state.loss_scaler
    stages.progress.enter_phase("reading data", state.step)
    batch = stages.data.at(state.cursor)
    state.seed_step(mesh.dp_rank)  # ranks that share sequences draw the same random numbers
    counted = all_reduce_counted(batch, mesh)  # None where all targets count, without asking other ranks
    if scaler:
        scaler.set_auxiliary(state.stage_modules)
    stages.progress.enter_phase("forward and backward", state.step)
    loss = stages.forward_backward(batch, counted)
    stop = stages.stop_requested() or stages.checkpoints.too_many_failures
    stages.progress.enter_phase("metrics", state.step)
    metrics = stages.compute_metrics(state.stage_modules, mesh, loss, stages.memory_peak(), stop)  # all-reduces

    if scaler:
        metrics = scaler.unscaled(metrics)
    rate = learning_rate(state.step, recipe.steps, recipe.optimizer, recipe.schedule)
    verdict = state.guard.judge(metrics.loss, metrics.norm, state.step + 1, scaler is not None and scaler.can_back_off)
    stages.progress.enter_phase("update", state.step)
    if verdict.applied:
        if scaler:
            scaler.unscale_gradients(state.parameters())
        clip_grads_with_norm(state.parameters(), metrics.norm, recipe.optimizer.clip)
        stages.checkpoints.wait_for_staging()  # a save may still be copying the tensors that now change
        state.optimizer_step(rate)
        update_router_biases(state.stage_modules)
    scale = scaler.update(metrics) if scaler else None
    state.next_step(sequences)
    event = StepEvent(
        time=time.time(),
        step=state.step,
        loss=metrics.loss,
        norm=metrics.norm,
        learning_rate=rate,
        tokens=sequences * recipe.batch.length,
        seconds=time.perf_counter() - started,
        memory=metrics.memory,
        committed=verdict.applied,
        reason=verdict.reason,
        imbalance=metrics.imbalance,
        counted=None if counted is None else int(counted),
        loss_scale=scale,
        mtp_losses=metrics.mtp_losses,
        all_to_all_seconds=metrics.traffic.all_to_all_seconds or None,
        traffic=_by_level(metrics.traffic, mesh),
    )
    return StepResult(event, verdict, metrics.stop_requested, metrics.local_square)
