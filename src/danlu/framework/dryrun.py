"""The dry run: `build` and one whole step of any rank of any world, in one process, without memory or network."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining._utils import InferenceMode

from danlu.comm.fake import join_fake
from danlu.comm.join import leave
from danlu.comm.mesh import Mesh, build_mesh
from danlu.comm.record import Call, CollectiveRecorder
from danlu.framework.build import ForwardBackward, build
from danlu.framework.measures import reduce_measures
from danlu.framework.moe import LocalExchange
from danlu.framework.state import TrainState
from danlu.memory.live import LiveBytes
from danlu.parallel.expert import ExpertExchange
from danlu.parallel.norm import clip
from danlu.parallel.pipeline import Pipeline
from danlu.spec.cluster import Cluster
from danlu.spec.plan import Plan
from danlu.spec.recipe import Recipe, has_experts
from danlu.spec.trace import Collective, Trace


class NotYetDryError(RuntimeError):
    """A part of the program that cannot run on fake tensors yet."""


def dry_run(recipe: Recipe, plan: Plan, cluster: Cluster | None, rank: int) -> Trace:
    """Run one optimiser step as rank `rank` of the plan's world, and say what it sends and holds."""
    if plan.compile:
        raise NotYetDryError(
            "`compile` must be false for a dry run, but is true: compiled code does not run on fake tensors; what a "
            "rank sends is the same without it"
        )
    join_fake(rank, plan.degrees.world)
    try:
        mesh = build_mesh(plan, torch.device("cpu"), rank, cluster, experts=has_experts(recipe.model))
        return trace_step(recipe, mesh, cluster, FakeTensorMode(allow_non_fake_inputs=True))
    finally:
        leave()


def trace_step(
    recipe: Recipe, mesh: Mesh, cluster: Cluster | None, fake: AbstractContextManager[object] | None = None
) -> Trace:
    """Build a rank and record its second step: by then the optimiser has its states, and FSDP its buffers.

    Without `fake` the same is done on real tensors and the real ranks of this world, for comparison.
    """
    live, recorder = LiveBytes(), CollectiveRecorder()
    with ExitStack() as tensors:
        state, forward_backward = build(recipe, mesh.plan, mesh, _entered(tensors, fake or nullcontext(), live))
        if fake is not None:
            _skip_vote(forward_backward)
            _route_evenly(state)
        live.mark(state.parameters(), "parameters")
        _step(recipe, state, forward_backward, mesh)
        live.mark(_optimizer_tensors(state), "optimiser")
        live.reset_peak()
        with recorder:
            _step(recipe, state, forward_backward, mesh)
        return _trace(mesh, cluster, recorder, live)


def _step(recipe: Recipe, state: TrainState, forward_backward: ForwardBackward, mesh: Mesh) -> None:
    """One step as the loop takes it, but for the figures that fake tensors do not have."""
    loss = forward_backward(*_batch(recipe, mesh))
    reduce_measures(state, mesh, loss, memory=0, stop=False)
    clip(state.parameters(), norm=2.0, largest=1.0)
    state.update(recipe.optimizer.learning_rate)
    state.advance(recipe.batch.sequences)


def _trace(mesh: Mesh, cluster: Cluster | None, recorder: CollectiveRecorder, live: LiveBytes) -> Trace:
    """What was recorded, with calls that are alike counted together in the order of their first."""
    counts: dict[tuple[str, str, int, str, int, str], int] = {}
    for call in recorder.calls:
        key = (call.operation, call.dtype, call.size, call.axes, call.group.size(), _level(call, cluster))
        counts[key] = counts.get(key, 0) + 1
    return Trace(
        rank=mesh.rank,
        world=mesh.plan.degrees.world,
        collectives=tuple(
            Collective(operation=o, dtype=d, size=s, axes=a, ranks=n, level=level, count=count)
            for (o, d, s, a, n, level), count in counts.items()
        ),
        peak=live.peak_total,
        peak_by_kind={kind: size for kind, size in live.peak.items() if size},
    )


def _batch(recipe: Recipe, mesh: Mesh) -> tuple[Tensor, Tensor]:
    degrees = mesh.plan.degrees
    rows, length = recipe.batch.sequences // degrees.data, recipe.batch.length // degrees.cp
    tokens = (torch.arange(rows * length) % recipe.model.vocabulary).view(rows, length)
    return tokens, tokens.clone()


def _optimizer_tensors(state: TrainState) -> list[Tensor]:
    return [value for held in state.optimizer.state.values() for value in held.values() if isinstance(value, Tensor)]


def _level(call: Call, cluster: Cluster | None) -> str:
    """The innermost level of the network that joins all ranks of a group."""
    if cluster is None:
        return ""
    ranks = dist.get_process_group_ranks(call.group)
    for depth, level in enumerate(cluster.levels):
        inside = prod(each.fanout for each in cluster.levels[: depth + 1])
        if min(ranks) // inside == max(ranks) // inside:
            return level.name
    return cluster.levels[-1].name


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
