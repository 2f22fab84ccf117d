"""Process groups along the axes of a plan."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from danlu.comm.level_groups import LevelGroups
from danlu.comm.rank_layout import RankLayout, dense_layout, expert_layout
from danlu.comm.world import World
from danlu.spec.cluster import Cluster
from danlu.spec.plan import Plan

GROUP_AXES: tuple[tuple[str, ...], ...] = (
    ("pp",),
    ("cp",),
    ("tp",),
    ("cp", "tp"),  # ranks that hold shards of the same sequences
    ("replicate", "shard", "cp", "tp"),  # ranks that hold the same pipeline stage
)
"""Groups that are used in addition to the meshes of parameters."""

MeshAxes = dict[str, tuple[str, ...]]
DENSE_MESH_AXES: MeshAxes = {"replicate": ("replicate",), "shard": ("shard", "cp"), "tp": ("tp",)}
EXPERT_MESH_AXES: MeshAxes = {"replicate": ("replicate",), "expert_shard": ("expert_shard",), "ep": ("ep",)}
"""Mesh axes of one stage's parameters, each with the plan axes that it combines."""


@dataclass(frozen=True)
class ParallelMesh:
    """The ranks of a run along the axes of its plan, passed to code that needs a group; there is no global one."""

    plan: Plan
    world: World
    fsdp_mesh: DeviceMesh
    """Where dense parameters are sharded: `shard` (with `cp` folded in), after `replicate` if there are replicas."""
    expert_fsdp_mesh: DeviceMesh | None
    """Where an expert's parameters are sharded: `expert_shard`, after `replicate` if there are replicas."""
    tp_mesh: DeviceMesh | None
    """The tensor-parallel ranks; None for one."""
    ep_mesh: DeviceMesh | None
    """The expert-parallel ranks; None for one."""
    coordinates: dict[str, int]
    """This rank's coordinate along every axis."""
    groups: dict[tuple[str, ...], ProcessGroup | None]
    """This rank's group for each of `GROUP_AXES`; None for a group of one."""
    ep_levels: LevelGroups | None = None
    """The ranks of `ep_mesh` by level of the network, if tokens are deduplicated; else None."""

    @property
    def rank(self) -> int:
        """This rank."""
        return self.world.rank

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.world.device

    def size(self, axis: str) -> int:
        """Ranks along an axis."""
        return int(getattr(self.plan.degrees, axis))

    def coordinate(self, axis: str) -> int:
        """This rank's coordinate along an axis."""
        return self.coordinates[axis]

    @property
    def dp_rank(self) -> int:
        """Index of the batch shard this rank reads, of `degrees.dp` shards."""
        return self.coordinate("replicate") * self.size("shard") + self.coordinate("shard")

    def group(self, *axes: str) -> ProcessGroup | None:
        """This rank's group along one or several dense axes (one of `GROUP_AXES`); None for a group of one."""
        return self.groups[axes]

    @property
    def chunked_group(self) -> ProcessGroup | None:
        """Over which the tokens of `ep` are under way, if they go in chunks: of levels, the outermost."""
        if self.ep_levels is not None:
            return self.ep_levels.levels[-1].group
        return self.ep_mesh.get_group() if self.ep_mesh else None

    def any_of_sequence(self, flag: bool) -> bool:
        """Whether the flag is set on any rank that holds shards of the same sequences."""
        raised = torch.tensor(int(flag), device=self.device)
        if group := self.group("cp", "tp"):
            dist.all_reduce(raised, dist.ReduceOp.MAX, group=group)
        return bool(raised)


def build_mesh(plan: Plan, world: World, cluster: Cluster | None, experts: bool) -> ParallelMesh:
    """Create the groups of a plan; every rank calls this once, after it joined its world.

    A rank creates its own groups and no others. All ranks create the same ones in the same order, whether they need
    them or not: torch names such a group after its members and the number of groups created before, and ranks that
    have created fewer would wait for each other forever.
    """
    dense, expert = dense_layout(plan, cluster), expert_layout(plan, cluster)
    make = _GroupBuilder(world)
    groups = make.groups(dense)
    by_dense = make.mesh(dense, DENSE_MESH_AXES, "shard", {"tp": groups["tp",]})
    replicas = {"replicate": by_dense.get_group("replicate") if plan.degrees.replicate > 1 else None}
    by_expert = (
        make.mesh(expert, EXPERT_MESH_AXES, "expert_shard", replicas) if experts or plan.degrees.ep > 1 else None
    )
    ep_levels = None
    if plan.degrees.ep > 1 and plan.token_dispatcher == "deduplicated":
        members = np.sort(expert.ranks_along(world.rank, ("ep",)), axis=None).tolist()
        ep_levels = world.level_groups(members, expert.factors["ep"], "ep")
    return ParallelMesh(
        plan=plan,
        world=world,
        coordinates=expert.coordinates(world.rank) | dense.coordinates(world.rank),
        groups=groups,
        fsdp_mesh=_hsdp_submesh(by_dense, "shard"),
        expert_fsdp_mesh=_hsdp_submesh(by_expert, "expert_shard") if by_expert else None,
        tp_mesh=by_dense["tp"] if plan.degrees.tp > 1 else None,
        ep_mesh=by_expert["ep"] if by_expert and plan.degrees.ep > 1 else None,
        ep_levels=ep_levels,
    )


@dataclass(frozen=True)
class _GroupBuilder:
    """Creates the groups of one rank."""

    world: World

    def groups(self, dense: RankLayout) -> dict[tuple[str, ...], ProcessGroup | None]:
        """This rank's groups of `GROUP_AXES`; axes with the same members share one group."""
        by_members: dict[tuple[int, ...], ProcessGroup | None] = {(self.world.rank,): None}
        groups: dict[tuple[str, ...], ProcessGroup | None] = {}
        for axes in GROUP_AXES:
            members = np.sort(dense.ranks_along(self.world.rank, axes), axis=None).tolist()
            if tuple(members) not in by_members:
                by_members[tuple(members)] = self.world.new_group(members, "·".join(axes))
            groups[axes] = by_members[tuple(members)]
        return groups

    def mesh(
        self, layout: RankLayout, shared: MeshAxes, sharded: str, existing: dict[str, ProcessGroup | None]
    ) -> DeviceMesh:
        """The mesh of the ranks that share this rank's parameters, without axes of one rank other than `sharded`.

        FSDP combines its own mesh with that of `tp` or `ep`, for which torch requires both to be slices of one mesh.
        That need not be a mesh of all ranks, which would create every group of every axis on every rank.
        """
        kept, sizes, groups = [], [], []
        for name, axes in shared.items():
            members = np.sort(layout.ranks_along(self.world.rank, axes), axis=None).tolist()
            if len(members) > 1 or name == sharded:
                kept.append(name)
                sizes.append(len(members))
                groups.append(existing.get(name) or self.world.new_group(members, name))
        ranks = layout.ranks_along(self.world.rank, [axis for name in kept for axis in shared[name]]).reshape(sizes)
        # A group numbers its members in their own order, also where the ranks of two folded axes are interleaved.
        ranks = np.sort(ranks, axis=kept.index(sharded))
        return self.world.device_mesh(groups, torch.from_numpy(ranks), tuple(kept))


def _hsdp_submesh(mesh: DeviceMesh, axis: str) -> DeviceMesh:
    return mesh["replicate", axis] if "replicate" in (mesh.mesh_dim_names or ()) else mesh[axis]
