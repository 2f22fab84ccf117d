"""A plan as numbers, and its groups on the levels of the network."""

from math import prod
from typing import NamedTuple

from danlu.cost.collectives import GroupShape, Network
from danlu.cost.memory import ReplicaCounts
from danlu.cost.software import ShardScope
from danlu.spec.cluster import Cluster
from danlu.spec.plan import LOOPED_SCHEDULES, Axis, PipelineSchedule, Plan

_AXES: tuple[Axis, ...] = ("tp", "cp", "shard", "replicate", "pp")
"""Axes of the mesh from the innermost outwards, as ranks are placed."""


class ParallelLayout(NamedTuple):
    """A plan as numbers; made by `layout_from_plan`, or by a search."""

    pp: int = 1
    replicate: int = 1
    shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    microbatches: int = 1
    schedule: PipelineSchedule = "1f1b"
    stages_per_rank: int = 1
    stage_layers: tuple[int, ...] = ()
    reshard_after_forward: bool = False
    reduces_once_per_step: bool = False
    """Whether gradients are kept whole until the last microbatch; also if the software knows nothing else."""
    optimizer_over_replicas: bool = False
    loss_chunks: int = 1
    """Parts of the vocabulary whose logits are computed one after another, and again in the backward pass."""
    ring: bool = False
    """Whether `cp` is a ring; also if the software knows nothing else."""
    group_shapes: tuple[tuple[str, GroupShape], ...] = ()
    """Shapes of groups that are not contiguous: an axis by its name; `shard×cp` and `expert_shard` for the ranks that
    one copy of dense and of expert states is sharded over, `data×cp` and `expert_data` for all that hold the same ones.
    """

    @property
    def dp(self) -> int:
        """Ranks that read different sequences."""
        return self.replicate * self.shard

    @property
    def world(self) -> int:
        """All ranks."""
        return self.pp * self.replicate * self.shard * self.cp * self.tp


def layout_from_plan(plan: Plan, cluster: Cluster) -> ParallelLayout:
    """The numbers of a plan, with its mapping on the levels of the cluster."""
    degrees = plan.degrees
    names = [level.name for level in cluster.levels]
    spans = tuple(
        (axis, tuple(levels.get(name, 1) for name in names)) for axis, levels in sorted(plan.mapping.items()) if levels
    )
    looped = plan.pipeline.schedule in LOOPED_SCHEDULES
    return ParallelLayout(
        pp=degrees.pp,
        replicate=degrees.replicate,
        shard=degrees.shard,
        cp=degrees.cp,
        tp=degrees.tp,
        ep=degrees.ep,
        microbatches=plan.microbatches,
        schedule=plan.pipeline.schedule,
        stages_per_rank=plan.pipeline.stages_per_rank if looped else 1,
        stage_layers=tuple(plan.pipeline.layers),
        reshard_after_forward=plan.resolved_reshard_after_forward,
        reduces_once_per_step=plan.reduce_gradients == "step",
        optimizer_over_replicas=plan.shard_optimizer_over_replicas,
        loss_chunks=plan.loss_chunks,
        ring=plan.context_parallel == "ring",
        group_shapes=spans,
    )


class LayoutGroups:
    """The groups of a layout, each with its members on every level."""

    def __init__(self, layout: ParallelLayout, network: Network, expert_tp: int) -> None:
        given = dict(layout.group_shapes)
        self._stride: dict[Axis, int] = {}
        stride = 1
        for axis in _AXES:
            self._stride[axis] = stride
            stride *= getattr(layout, axis)
        span, across = network.group_shape, layout.ep * expert_tp
        self.tp = given.get("tp") or span(layout.tp, 1)
        self.cp = given.get("cp") or span(layout.cp, layout.tp)
        self.ep = given.get("ep") or span(layout.ep, expert_tp)
        self.expert_tp = span(expert_tp, 1)
        self.pp = given.get("pp") or span(layout.pp, self._stride["pp"])
        self.replicate = given.get("replicate") or span(layout.replicate, self._stride["replicate"])
        stage = layout.dp * layout.cp * layout.tp
        self.dense = ReplicaCounts(layout.cp * layout.dp, layout.cp * layout.shard)
        self.experts = ReplicaCounts(max(1, stage // across), max(1, stage // layout.replicate // across))
        axes = [given[axis] for axis in ("cp", "shard") if axis in given]
        group = _combine_shapes(axes) if axes else span(self.dense.per_group, layout.tp)
        every = _combine_shapes([group, self.replicate]) if axes else span(self.dense.total, layout.tp)
        self._spans = {
            (True, "group"): given.get("shard×cp") or group,
            (True, "all"): given.get("data×cp") or every,
            (False, "group"): given.get("expert_shard") or span(self.experts.per_group, across),
            (False, "all"): given.get("expert_data") or span(self.experts.total, across),
        }

    def p2p_level(self, rank: int) -> int:
        """The level between a pp rank and the next one."""
        level, inside = 0, 1
        for index, ranks in enumerate(self.pp):
            if ranks > 1 and (rank + 1) % inside == 0:
                level = index
            inside *= ranks
        return level

    def replicas(self, dense: bool) -> ReplicaCounts:
        """Ranks that hold the same parameters: dense ones, or those of experts."""
        return self.dense if dense else self.experts

    def shard_group(self, dense: bool, split: ShardScope) -> GroupShape:
        """The group over which a state is sharded."""
        return self._spans[dense, split]


def _combine_shapes(spans: list[GroupShape]) -> GroupShape:
    """The shape of a group along several axes."""
    return tuple(prod(column) for column in zip(*spans, strict=True))
