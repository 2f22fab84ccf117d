"""The dry run: `build` and one whole step of any rank of any world, in one process, without memory or network."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining._utils import InferenceMode

from danlu.comm.fake import join_fake, transfers_pending
from danlu.comm.join import leave
from danlu.comm.mesh import Mesh, build_mesh
from danlu.comm.record import Call
from danlu.framework.accumulate import Accumulation
from danlu.framework.build import ForwardBackward, build
from danlu.framework.measures import even_experts, reduce_measures
from danlu.framework.moe import LocalExchange
from danlu.framework.operators import written_signature
from danlu.framework.recording import Record, StepRecorder, without_layer
from danlu.framework.state import TrainState
from danlu.framework.whereabouts import Whereabouts
from danlu.memory.live import LiveBytes
from danlu.memory.timeline import Context, instants
from danlu.parallel.expert import ExpertExchange
from danlu.parallel.norm import clip
from danlu.parallel.pipeline import Pipeline
from danlu.spec.cluster import Cluster
from danlu.spec.placing import joining_level
from danlu.spec.plan import DENSE_AXES, Plan
from danlu.spec.recipe import Recipe, has_experts
from danlu.spec.trace import Collective, Operator, Trace


class NotYetDryError(RuntimeError):
    """A part of the program that cannot run on fake tensors yet."""


def dry_run(recipe: Recipe, plan: Plan, cluster: Cluster | None, rank: int) -> Trace:
    """Run one optimiser step as rank `rank` of the plan's world, and say what it computes, sends and holds."""
    if plan.compile:
        raise NotYetDryError(
            "`compile` must be false for a dry run, but is true: compiled code does not run on fake tensors; what a "
            "rank sends is the same without it"
        )
    join_fake(rank, plan.degrees.world)
    try:
        mesh = build_mesh(plan, torch.device("cpu"), rank, cluster, experts=has_experts(recipe.model))
        with transfers_pending():
            return trace_step(recipe, mesh, cluster, FakeTensorMode(allow_non_fake_inputs=True))
    finally:
        leave()


def trace_step(
    recipe: Recipe,
    mesh: Mesh,
    cluster: Cluster | None,
    fake: AbstractContextManager[object] | None = None,
    warm_up: int = 0,
    even: bool = True,
) -> Trace:
    """Build a rank and record one of its steps; the optimiser has its states from the start.

    Without `fake` the same is done on real tensors and the real ranks of this world, for comparison: after steps of
    `warm_up`, and with experts loaded as their router wants if they need not be loaded `even`ly.
    """
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
        _follow_loss(forward_backward, where)
        recorder.start(where)
        with where.followed():
            _step(recipe, state, forward_backward, mesh, where)
        return _trace(mesh, cluster, recorder.record, live, where, time.perf_counter() - started)


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


def _trace(
    mesh: Mesh, cluster: Cluster | None, record: Record, live: LiveBytes, where: Whereabouts, seconds: float
) -> Trace:
    """What was recorded, with calls that are alike counted together in the order of their first."""
    degrees = mesh.plan.degrees
    changes, at, contexts = live.entries()
    memory, peak = instants(changes.cumsum(axis=0), at, where.contexts, contexts)
    axes = [*DENSE_AXES, *(["ep"] if degrees.ep > 1 else [])]
    return Trace(
        rank=mesh.rank,
        world=degrees.world,
        place={axis: mesh.place[axis] for axis in axes},
        stands_for=degrees.stage,
        collectives=_collectives(record.calls, cluster),
        operators=_operators(record, where.contexts),
        memory=memory,
        peak=peak,
        seconds=seconds,
    )


def _collectives(calls: list[Call], cluster: Cluster | None) -> tuple[Collective, ...]:
    levels = {group: _level(group, cluster) for group in {call.group for call in calls}}
    counts = Counter(
        (call.operation, call.dtype, call.size, call.axes, call.group.size(), levels[call.group]) for call in calls
    )
    return tuple(
        Collective(operation=operation, dtype=dtype, size=size, axes=axes, ranks=ranks, level=level, count=count)
        for (operation, dtype, size, axes, ranks, level), count in counts.items()
    )


def _operators(record: Record, contexts: list[Context]) -> tuple[Operator, ...]:
    counts: Counter[tuple[object, ...]] = Counter()
    for key, count in record.operators.items():
        phase, module, _ = contexts[key.context]
        counts[key.name, phase, without_layer(module), key.inputs, key.outputs, key.flops, key.bytes] += count
    return tuple(
        Operator(
            name=name,
            phase=phase,
            module=module,
            inputs=tuple(map(written_signature, inputs)),
            outputs=tuple(map(written_signature, outputs)),
            flops=flops,
            bytes=moved,
            count=count,
        )
        for (name, phase, module, inputs, outputs, flops, moved), count in counts.items()
    )


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


def _follow_loss(forward_backward: ForwardBackward, where: Whereabouts) -> None:
    """Give the loss a name of its own: it is no module, but its scores are often the largest activation."""
    if isinstance(forward_backward, Pipeline):
        loss = forward_backward.schedule._loss_fn
        forward_backward.schedule._loss_fn = where.inside("loss", loss) if loss else None
    elif isinstance(forward_backward, Accumulation):
        forward_backward.loss = where.inside("loss", forward_backward.loss)


def _level(group: dist.ProcessGroup, cluster: Cluster | None) -> str:
    """The innermost level of the network that joins all ranks of a group."""
    if cluster is None:
        return ""
    return joining_level(dist.get_process_group_ranks(group), dist.get_world_size(), cluster)


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
