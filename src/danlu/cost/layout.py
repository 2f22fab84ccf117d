"""A plan as the arithmetic sees it, and where its axes lie on the levels of the network."""

from math import prod
from typing import NamedTuple

from danlu.cost.collectives import Network, Span
from danlu.cost.memory import Replicas
from danlu.cost.software import Split
from danlu.spec.cluster import Cluster
from danlu.spec.plan import LOOPED_SCHEDULES, Axis, Plan, Schedule

_AXES: tuple[Axis, ...] = ("tp", "cp", "shard", "replicate", "pp")
"""Axes of the mesh from the innermost outwards, as ranks are placed."""


class Layout(NamedTuple):
    """A plan as the arithmetic sees it; made by `layout_of`, or by a search."""

    pp: int = 1
    replicate: int = 1
    shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    microbatches: int = 1
    schedule: Schedule = "1f1b"
    stages_per_rank: int = 1
    stage_layers: tuple[int, ...] = ()
    reshards: bool = False
    spans: tuple[tuple[str, Span], ...] = ()
    """Where a group lies on the levels, for those that do not simply follow in order: an axis by its name; `shard×cp`
    and `expert_shard` the ranks that one copy of dense and of expert states is split over, `data×cp` and `expert_data`
    all that hold the same ones.
    """

    @property
    def data(self) -> int:
        """Ranks that read different sequences."""
        return self.replicate * self.shard

    @property
    def world(self) -> int:
        """All ranks."""
        return self.pp * self.replicate * self.shard * self.cp * self.tp


def layout_of(plan: Plan, cluster: Cluster) -> Layout:
    """The numbers of a plan, with its mapping laid out on the levels of the cluster."""
    degrees = plan.degrees
    names = [level.name for level in cluster.levels]
    spans = tuple(
        (axis, tuple(levels.get(name, 1) for name in names)) for axis, levels in sorted(plan.mapping.items()) if levels
    )
    looped = plan.pipeline.schedule in LOOPED_SCHEDULES
    return Layout(
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
        reshards=plan.reshards,
        spans=spans,
    )


class Places:
    """Where the groups of a layout lie: for every one its members on each level."""

    def __init__(self, layout: Layout, network: Network, expert_tp: int) -> None:
        given = dict(layout.spans)
        self.stride: dict[Axis, int] = {}
        stride = 1
        for axis in _AXES:
            self.stride[axis] = stride
            stride *= getattr(layout, axis)
        span, across = network.span, layout.ep * expert_tp
        self.tp = given.get("tp") or span(layout.tp, 1)
        self.cp = given.get("cp") or span(layout.cp, layout.tp)
        self.ep = given.get("ep") or span(layout.ep, expert_tp)
        self.expert_tp = span(expert_tp, 1)
        self.pp = given.get("pp") or span(layout.pp, self.stride["pp"])
        self.replicate = given.get("replicate") or span(layout.replicate, self.stride["replicate"])
        stage = layout.data * layout.cp * layout.tp
        self.dense = Replicas(layout.cp * layout.data, layout.cp * layout.shard)
        self.experts = Replicas(max(1, stage // across), max(1, stage // layout.replicate // across))
        axes = [given[axis] for axis in ("cp", "shard") if axis in given]
        group = _joined(axes) if axes else span(self.dense.group, layout.tp)
        every = _joined([group, self.replicate]) if axes else span(self.dense.all, layout.tp)
        self._spans = {
            (True, "group"): given.get("shard×cp") or group,
            (True, "all"): given.get("data×cp") or every,
            (False, "group"): given.get("expert_shard") or span(self.experts.group, across),
            (False, "all"): given.get("expert_data") or span(self.experts.all, across),
        }

    def hop(self, rank: int) -> int:
        """The level that lies between a rank of a pipeline and the next one."""
        level, inside = 0, 1
        for index, ranks in enumerate(self.pp):
            if ranks > 1 and (rank + 1) % inside == 0:
                level = index
            inside *= ranks
        return level

    def replicas(self, dense: bool) -> Replicas:
        """Ranks that hold the same parameters: dense ones, or those of experts."""
        return self.dense if dense else self.experts

    def over(self, dense: bool, split: Split) -> Span:
        """Where the ranks lie over which a state is split."""
        return self._spans[dense, split]


def _joined(spans: list[Span]) -> Span:
    """One span of several axes."""
    return tuple(prod(column) for column in zip(*spans, strict=True))
