"""The dry run: `build` and one whole step of any rank of any world, in one process, without memory or network."""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining._utils import InferenceMode

from danlu.comm.fake import join_fake, transfers_pending
from danlu.comm.join import leave
from danlu.comm.mesh import Mesh, build_mesh
from danlu.framework.accumulate import Accumulation
from danlu.framework.build import ForwardBackward, build
from danlu.framework.folding import NotAlikeError, find_fold, fold
from danlu.framework.measures import even_experts, reduce_measures
from danlu.framework.moe import LocalExchange
from danlu.framework.optimiser_folding import NotLinearError
from danlu.framework.recording import StepRecorder
from danlu.framework.state import TrainState
from danlu.framework.step_record import StepRecord, step_record, trace
from danlu.framework.whereabouts import Whereabouts
from danlu.memory.live import LiveBytes
from danlu.parallel.actions import schedule_actions
from danlu.parallel.expert import ExpertExchange
from danlu.parallel.norm import clip
from danlu.parallel.pipeline import Pipeline
from danlu.spec.cluster import Cluster
from danlu.spec.plan import Plan
from danlu.spec.recipe import Recipe, has_experts
from danlu.spec.trace import DryRun, Trace

COMPILED = (
    "`compile` is true: blocks were run as they are written, because compiled code does not run on tensors without "
    "memory. What ranks send is the same; operators and activations are those of code that is not compiled, which "
    "keeps more of them."
)


def dry_runs(
    recipe: Recipe,
    plan: Plan,
    cluster: Cluster | None,
    ranks: Sequence[int],
    whole: bool = False,
    tell: Callable[[int], None] = lambda rank: None,
) -> DryRun:
    """Run one optimiser step as each of `ranks`; `tell` hears which is next."""
    traces: list[Trace] = []
    notes: list[str] = []
    for rank in ranks:
        tell(rank)
        traces.append(dry_run(recipe, plan, cluster, rank, whole, notes.append))
    return DryRun(
        name=recipe.name,
        cluster=cluster.name if cluster else "",
        levels=tuple(level.name for level in cluster.levels) if cluster else (),
        memory_limit=cluster.chip.memory if cluster else None,
        degrees=plan.degrees.model_dump(),
        microbatches=plan.microbatches,
        schedule=schedule_actions(plan),
        traces=tuple(traces),
        notes=tuple(dict.fromkeys(notes)),
    )


def dry_run(
    recipe: Recipe,
    plan: Plan,
    cluster: Cluster | None,
    rank: int,
    whole: bool = False,
    note: Callable[[str], None] = warnings.warn,
) -> Trace:
    """Run one optimiser step as rank `rank` of the plan's world, and say what it computes, sends and holds.

    Layers that are like their neighbours are counted rather than run, unless the `whole` is asked for. Where the dry
    run departs from the run itself, `note` hears of it.
    """
    if plan.compile:
        note(COMPILED)
        plan = plan.model_copy(update={"compile": False})
    with _fake_mesh(recipe, plan, cluster, rank) as mesh:
        folding = None if whole else find_fold(recipe, plan, mesh.coordinate("pp"))
        if folding is not None:
            try:
                short, long = (
                    _dry_record(shortened, replace(mesh, plan=its_plan), cluster)
                    for shortened, its_plan in (folding.short, folding.long)
                )
                return trace(mesh, *fold(short, long, folding), folded=folding.layers)
            except (NotAlikeError, NotLinearError) as error:
                note(f"rank {rank:,}: every layer was run, because layers that look alike are not: {error}")
        return trace(mesh, _dry_record(recipe, mesh, cluster))


def real_step(recipe: Recipe, mesh: Mesh, cluster: Cluster | None, warm_up: int = 0, even: bool = True) -> Trace:
    """Record a step on the real tensors and ranks of this world, for comparison with a dry run.

    It follows `warm_up` others; experts are loaded as their router wants if they need not be loaded `even`ly.
    """
    return trace(mesh, _record(recipe, mesh, cluster, None, warm_up, even))


@contextmanager
def _fake_mesh(recipe: Recipe, plan: Plan, cluster: Cluster | None, rank: int) -> Iterator[Mesh]:
    """Be a rank of a world that does not exist."""
    join_fake(rank, plan.degrees.world)
    try:
        yield build_mesh(plan, torch.device("cpu"), rank, cluster, experts=has_experts(recipe.model))
    finally:
        leave()


def _dry_record(recipe: Recipe, mesh: Mesh, cluster: Cluster | None) -> StepRecord:
    with transfers_pending():
        return _record(recipe, mesh, cluster, FakeTensorMode(allow_non_fake_inputs=True), warm_up=0, even=True)


def _record(
    recipe: Recipe,
    mesh: Mesh,
    cluster: Cluster | None,
    fake: AbstractContextManager[object] | None,
    warm_up: int,
    even: bool,
) -> StepRecord:
    """Build a rank and record one of its steps; the optimiser has its states from the start."""
    started = time.perf_counter()
    live = LiveBytes()
    recorder = StepRecorder(live)
    with ExitStack() as tensors:
        state, forward_backward = build(recipe, mesh.plan, mesh, _entered(tensors, fake or nullcontext(), recorder))
        if fake is not None:
            _skip_vote(forward_backward)
        if even:
            _route_evenly(state)
        _claim_states(live, state)
        for _ in range(warm_up):
            _step(recipe, state, forward_backward, mesh, None)
        where = Whereabouts(state.parts, live)
        _follow_passes(forward_backward, where)
        recorder.start(where)
        with where.followed():
            _step(recipe, state, forward_backward, mesh, where)
        return step_record(
            recorder.record, live.entries(), where.contexts, cluster, seconds=time.perf_counter() - started
        )


def _step(
    recipe: Recipe, state: TrainState, forward_backward: ForwardBackward, mesh: Mesh, where: Whereabouts | None
) -> None:
    """One step as the loop takes it, but for the figures that fake tensors do not have."""
    loss = forward_backward(*_batch(recipe, mesh))
    if where is not None:
        where.optimising = True
        where.claim_gradients(state.parameters())
    reduce_measures(state, mesh, loss, memory=0, stop=False)
    clip(state.parameters(), norm=2.0, largest=1.0)
    state.update(recipe.optimizer.learning_rate)
    even_experts(state)
    state.advance(recipe.batch.sequences)


def _batch(recipe: Recipe, mesh: Mesh) -> tuple[Tensor, Tensor]:
    degrees = mesh.plan.degrees
    rows, length = recipe.batch.sequences // degrees.data, recipe.batch.length // degrees.cp
    tokens = (torch.arange(rows * length) % recipe.model.vocabulary).view(rows, length)
    return tokens, tokens.clone()


def _claim_states(live: LiveBytes, state: TrainState) -> None:
    for name, tensor in state.tensors().items():
        live.claim([tensor], "parameters" if name.startswith("model.") else "optimiser")
    for part in state.parts:
        live.claim(part.buffers(), "parameters")


def _follow_passes(forward_backward: ForwardBackward, where: Whereabouts) -> None:
    """Tell apart what no module does: the loss, whose scores are often the largest activation, and backward passes."""
    if isinstance(forward_backward, Pipeline):
        schedule = forward_backward.schedule
        schedule._loss_fn = where.inside("loss", schedule._loss_fn) if schedule._loss_fn else None
        for stage in forward_backward.stages:
            for name in ("backward_one_chunk", "backward_weight_one_chunk"):
                setattr(stage, name, where.going_back(getattr(stage, name)))
    elif isinstance(forward_backward, Accumulation):
        forward_backward.loss = where.inside("loss", forward_backward.loss)


@contextmanager
def _entered(stack: ExitStack, *contexts: AbstractContextManager[object]) -> Iterator[None]:
    """Enter contexts now, and leave them when `stack` is left."""
    for context in contexts:
        stack.enter_context(context)
    yield


def _route_evenly(state: TrainState) -> None:
    """Let every expert get its share: where tokens go depends on values that fake tensors do not have."""
    for part in state.parts:
        for module in part.modules():
            if isinstance(module, LocalExchange | ExpertExchange):
                module.even = True


def _skip_vote(forward_backward: ForwardBackward) -> None:
    """Leave out the vote of pipeline ranks on whether all know the shapes they exchange: nobody would answer."""
    if isinstance(forward_backward, Pipeline):
        for stage in forward_backward.stages:
            stage._inference_mode = InferenceMode.STATIC
        forward_backward.schedule._warmup_p2p = lambda *_: None  # type: ignore[method-assign]
