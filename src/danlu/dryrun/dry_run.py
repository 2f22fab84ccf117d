"""The dry run: build any rank of any world and take one full step, on FakeTensors and a fake process group."""

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from danlu.comm.fake import hold_p2p_tensors
from danlu.comm.mesh import ParallelMesh, build_mesh
from danlu.comm.rank_layout import network_spans
from danlu.comm.world import World
from danlu.dryrun.layer_extrapolation import LayerMismatchError, extrapolate_step, find_extrapolation
from danlu.dryrun.live_memory import LiveMemoryTracker
from danlu.dryrun.module_tracker import ModuleTracker
from danlu.dryrun.optimizer_extrapolation import NonlinearGrowthError, recorded_optimizer
from danlu.dryrun.schedule_actions import schedule_actions
from danlu.dryrun.step_record import StepRecord, build_trace, freeze_record
from danlu.dryrun.step_recorder import StepRecorder
from danlu.framework.build import ForwardBackward, build_train_state
from danlu.framework.gradient_accumulation import GradientAccumulation
from danlu.framework.loop import TrainStages, take_step
from danlu.framework.mtp_passes import MtpPasses
from danlu.framework.owned_parameters import copied_parameters
from danlu.framework.stages import FixedData
from danlu.framework.state import TrainState
from danlu.framework.step_metrics import StepMetrics, all_reduce_metrics
from danlu.parallel.batch import Batch, TokensAhead
from danlu.parallel.pipeline import PipelineRunner
from danlu.spec.cluster import Cluster
from danlu.spec.plan import Plan
from danlu.spec.recipe import Recipe, has_experts
from danlu.spec.trace import DryRun, Trace
from danlu.torch_compat import FakeTensorMode
from danlu.torch_compat.pipelining import skip_shape_exchange, wrap_schedule_loss

COMPILE_NOTE = (
    "`compile` is true: blocks were run eagerly, because compiled code does not run on FakeTensors. What ranks send is "
    "the same; operators and activations are those of eager code, which keeps more of them."
)
RAMP_NOTE = "`batch.ramp` is set: the step is one of the full batch, the largest."


def dry_run_ranks(
    recipe: Recipe,
    plan: Plan,
    cluster: Cluster | None,
    ranks: Sequence[int],
    all_layers: bool = False,
    on_rank: Callable[[int], None] = lambda rank: None,
) -> DryRun:
    """Run one optimizer step as each of `ranks`; `on_rank` is called with each rank before it runs."""
    traces: list[Trace] = []
    notes: list[str] = []
    for rank in ranks:
        on_rank(rank)
        traces.append(dry_run_rank(recipe, plan, cluster, rank, all_layers, notes.append))
    return DryRun(
        name=recipe.name,
        cluster=cluster.name if cluster else "",
        levels=tuple(level.name for level in cluster.levels) if cluster else (),
        memory_limit=cluster.chip.memory if cluster else None,
        precision=recipe.precision.label,
        degrees=plan.degrees.model_dump(),
        microbatches=plan.microbatches,
        schedule=schedule_actions(plan),
        traces=tuple(traces),
        notes=tuple(dict.fromkeys(notes)),
    )


def dry_run_rank(
    recipe: Recipe,
    plan: Plan,
    cluster: Cluster | None,
    rank: int,
    all_layers: bool = False,
    on_note: Callable[[str], None] = warnings.warn,
) -> Trace:
    """Run one optimizer step as rank `rank` of the plan's world; the trace has what it computes, sends and allocates.

    Layers equal to their neighbors are extrapolated rather than run, unless `all_layers`. `on_note` gets a text where
    the dry run differs from the real run.
    """
    if recipe.batch.ramp:
        on_note(RAMP_NOTE)
        recipe = recipe.model_copy(update={"batch": recipe.batch.model_copy(update={"ramp": ()})})
    if plan.compile:
        on_note(COMPILE_NOTE)
        plan = plan.model_copy(update={"compile": False})
    with _fake_mesh(recipe, plan, cluster, rank) as mesh:
        extrapolation = None if all_layers else find_extrapolation(recipe, plan, mesh.coordinate("pp"))
        if extrapolation is not None:
            try:
                short, long = (
                    _record_step(shortened, replace(mesh, plan=its_plan), cluster)
                    for shortened, its_plan in (extrapolation.short, extrapolation.long)
                )
                # Muon divides the matrices of all layers over ranks, and groups may name layers: no two add the same.
                by_layer = recipe.optimizer.has_muon or recipe.optimizer.groups
                update = recorded_optimizer(_record_step(recipe, mesh, cluster, passes=False)) if by_layer else None
                return build_trace(
                    mesh,
                    *extrapolate_step(short, long, extrapolation, update),
                    skipped_layers=extrapolation.skipped_layers,
                )
            except (LayerMismatchError, NonlinearGrowthError) as error:
                on_note(f"rank {rank:,}: all layers were run: equal-looking layers behave differently: {error}")
        return build_trace(mesh, _record_step(recipe, mesh, cluster))


@contextmanager
def _fake_mesh(recipe: Recipe, plan: Plan, cluster: Cluster | None, rank: int) -> Iterator[ParallelMesh]:
    """The mesh of a rank in a fake process group."""
    world = World.fake(rank, plan.degrees.world, network_spans(cluster, plan.degrees.world))
    try:
        yield build_mesh(plan, world, cluster, experts=has_experts(recipe.model))
    finally:
        world.shutdown()


def _record_step(recipe: Recipe, mesh: ParallelMesh, cluster: Cluster | None, passes: bool = True) -> StepRecord:
    """Build a rank and record one of its steps; the optimizer has its states from the start.

    Without `passes` gradients appear from nothing: the optimizer phase is that of a full step, the rest is empty.
    """
    started = time.perf_counter()
    live = LiveMemoryTracker()
    recorder = StepRecorder(live)
    with hold_p2p_tensors(), ExitStack() as tensors:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        state, forward_backward = build_train_state(recipe, mesh.plan, mesh, _enter_into(tensors, fake, recorder))
        _skip_shape_inference(forward_backward)
        assume_balanced_routing(state)
        _tag_state_memory(live, state)
        tracker = ModuleTracker(state.stage_modules, live)
        if passes:
            _track_passes(forward_backward, tracker)
        else:
            forward_backward = partial(_gradients_alone, state)
        recorder.start_recording(tracker)
        with tracker.install_hooks():
            _take_step(recipe, mesh, state, forward_backward, tracker)
        return freeze_record(
            recorder.record,
            live.history(),
            tracker.contexts,
            cluster,
            mesh.world.size,
            seconds=time.perf_counter() - started,
        )


def _gradients_alone(state: TrainState, batch: Batch, counted: Tensor | None = None) -> Tensor:
    """Leave a gradient for every parameter, without any pass."""
    for parameter in state.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return torch.zeros(())


def _take_step(
    recipe: Recipe, mesh: ParallelMesh, state: TrainState, forward_backward: ForwardBackward, tracker: ModuleTracker
) -> None:
    """Take the training loop's own step, with values in place of those that fake tensors do not have."""

    def passes(batch: Batch, counted: Tensor | None = None) -> Tensor:
        loss = forward_backward(batch, counted)
        tracker.in_optimizer = True
        tracker.tag_gradients(state.parameters())
        return loss

    def metrics(modules: Iterable[nn.Module], mesh: ParallelMesh, loss: Tensor, memory: int, stop: bool) -> StepMetrics:
        all_reduce_metrics(modules, mesh, loss, memory, stop)
        clipped = 2 * recipe.optimizer.clip  # a gradient that is scaled down: clipping takes part in the step
        traffic = mesh.world.pop_traffic()
        return StepMetrics(loss=1.0, norm=clipped, memory=0, imbalance=None, stop_requested=False, traffic=traffic)

    stages = TrainStages(FixedData(_ZeroBatch(recipe, mesh)), passes, compute_metrics=metrics)
    take_step(recipe, state, mesh, stages)


class _ZeroBatch:
    """A batch of zeros: nothing in a dry run depends on its values."""

    def __init__(self, recipe: Recipe, mesh: ParallelMesh) -> None:
        degrees = mesh.plan.degrees
        self.rows, self.length = recipe.batch.sequences // degrees.dp, recipe.batch.length // degrees.cp
        self.positions = recipe.batch.length if recipe.data.document_mask else 0
        self.ahead = recipe.mtp.depth if recipe.mtp else 0

    def at(self, cursor: int) -> Batch:
        tokens_BS = torch.zeros(self.rows, self.length, dtype=torch.int64)
        positions = torch.zeros(self.rows, self.positions, dtype=torch.int64) if self.positions else None
        counted = tokens_BS.numel() if self.positions else None
        return Batch(tokens_BS, tokens_BS.clone(), positions, counted, self._tokens_ahead())

    def _tokens_ahead(self) -> TokensAhead | None:
        if not self.ahead:
            return None
        tokens_BKS = torch.zeros(self.rows, self.ahead, self.length, dtype=torch.int64)
        counted = (tokens_BKS[:, 0].numel(),) * self.ahead if self.positions else None
        return TokensAhead(tokens_BKS, tokens_BKS.clone(), counted)


def _tag_state_memory(live: LiveMemoryTracker, state: TrainState) -> None:
    for name, tensor in state.tensors().items():
        live.tag([tensor], "parameters" if name.startswith("model.") else "optimizer")
    for stage_module in state.stage_modules:
        live.tag([*stage_module.buffers(), *copied_parameters(stage_module)], "parameters")


def _main_passes(forward_backward: ForwardBackward) -> object:
    """What runs the microbatches."""
    return forward_backward.passes if isinstance(forward_backward, MtpPasses) else forward_backward


def _track_passes(forward_backward: ForwardBackward, tracker: ModuleTracker) -> None:
    """Track what no module does: the loss, whose logits are often the largest activation, and backward passes."""
    passes = _main_passes(forward_backward)
    if isinstance(passes, PipelineRunner):
        wrap_schedule_loss(passes.schedule, partial(tracker.as_module, "loss"))
        for stage in passes.stages:
            for name in ("backward_one_chunk", "backward_weight_one_chunk"):
                setattr(stage, name, tracker.as_backward(getattr(stage, name)))
    elif isinstance(passes, GradientAccumulation):
        passes.loss = tracker.as_module("loss", passes.loss)


@contextmanager
def _enter_into(stack: ExitStack, *contexts: AbstractContextManager[object]) -> Iterator[None]:
    """Enter contexts now, and exit them with `stack`."""
    for context in contexts:
        stack.enter_context(context)
    yield


def assume_balanced_routing(state: TrainState) -> None:
    """Give every expert an equal load: the router decides by values that FakeTensors do not have."""
    for stage_module in state.stage_modules:
        for module in stage_module.modules():
            if hasattr(module, "assume_balanced"):  # a router, or whatever sends tokens to experts
                cast(Any, module).assume_balanced = True


def _skip_shape_inference(forward_backward: ForwardBackward) -> None:
    """Skip the collective in which pipeline ranks agree on shapes: there are no peers to answer."""
    passes = _main_passes(forward_backward)
    if isinstance(passes, PipelineRunner):
        skip_shape_exchange(passes.schedule, passes.stages)
