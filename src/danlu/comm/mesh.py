"""Process groups along the axes of a plan."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from danlu.comm.layout import Layout, dense_layout, expert_layout
from danlu.spec.cluster import Cluster
from danlu.spec.plan import Plan

GROUPS: tuple[tuple[str, ...], ...] = (
    ("pp",),
    ("cp",),
    ("tp",),
    ("cp", "tp"),  # ranks that hold parts of the same sequences
    ("replicate", "shard", "cp", "tp"),  # ranks that hold the same pipeline stage
)
"""Groups that somebody asks for, beside the meshes of parameters."""

Shared = dict[str, tuple[str, ...]]
SHARED_DENSE: Shared = {"replicate": ("replicate",), "shard": ("shard", "cp"), "tp": ("tp",)}
SHARED_EXPERT: Shared = {"replicate": ("replicate",), "expert_shard": ("expert_shard",), "ep": ("ep",)}
"""The axes along which one stage's parameters are spread, and of which axes of the plan each is made."""


@dataclass(frozen=True)
class Mesh:
    """The ranks of a run along the axes of its plan, passed to whoever needs a group; there is no global one."""

    plan: Plan
    device: torch.device
    rank: int
    parameters: DeviceMesh
    """Where dense parameters are sharded: `shard` (with `cp` folded in), behind `replicate` if there are replicas."""
    expert_parameters: DeviceMesh | None
    """Where an expert's parameters are sharded: `expert_shard`, behind `replicate` if there are replicas."""
    tensor: DeviceMesh | None
    """The ranks that share every matrix; None for one."""
    experts: DeviceMesh | None
    """The ranks that share the experts; None for one."""
    place: dict[str, int]
    """This rank's coordinate along every axis."""
    groups: dict[tuple[str, ...], ProcessGroup | None]
    """This rank's group along the axes that somebody asks for; None for a group of one."""

    def size(self, axis: str) -> int:
        """Ranks along an axis."""
        return int(getattr(self.plan.degrees, axis))

    def coordinate(self, axis: str) -> int:
        """This rank's place along an axis."""
        return self.place[axis]

    @property
    def data_index(self) -> int:
        """Which share of the batch this rank reads, of `degrees.data` shares."""
        return self.coordinate("replicate") * self.size("shard") + self.coordinate("shard")

    def group(self, *axes: str) -> ProcessGroup | None:
        """This rank's group along one or several dense axes (one of `GROUPS`); None for a group of one."""
        return self.groups[axes]


def build_mesh(plan: Plan, device: torch.device, rank: int, cluster: Cluster | None, experts: bool) -> Mesh:
    """Make the groups of a plan; every rank calls this once, after joining.

    A rank makes its own groups and no others. All ranks make the same ones in the same order, whether they need them
    or not: torch names such a group after its members and the number of groups made before, and ranks that have made
    fewer would wait for each other forever.
    """
    dense, expert = dense_layout(plan, cluster), expert_layout(plan, cluster)
    make = _Maker(device, rank, plan.degrees.world)
    groups = make.groups(dense)
    by_dense = make.mesh(dense, SHARED_DENSE, "shard", {"tp": groups["tp",]})
    replicas = {"replicate": by_dense.get_group("replicate") if plan.degrees.replicate > 1 else None}
    by_expert = make.mesh(expert, SHARED_EXPERT, "expert_shard", replicas) if experts else None
    return Mesh(
        plan=plan,
        device=device,
        rank=rank,
        place=expert.place(rank) | dense.place(rank),
        groups=groups,
        parameters=_behind_replicas(by_dense, "shard"),
        expert_parameters=_behind_replicas(by_expert, "expert_shard") if by_expert else None,
        tensor=by_dense["tp"] if plan.degrees.tp > 1 else None,
        experts=by_expert["ep"] if by_expert and plan.degrees.ep > 1 else None,
    )


@dataclass(frozen=True)
class _Maker:
    """Makes the groups of one rank of a world."""

    device: torch.device
    rank: int
    world: int

    def group(self, members: list[int], name: str) -> ProcessGroup | None:
        """The group of all ranks, or a new one made by its members alone: no rank waits for a group it is not in."""
        if len(members) == self.world:
            return dist.group.WORLD
        return dist.new_group(members, use_local_synchronization=True, group_desc=name)

    def groups(self, dense: Layout) -> dict[tuple[str, ...], ProcessGroup | None]:
        """This rank's `GROUPS`; those with the same members are one."""
        made: dict[tuple[int, ...], ProcessGroup | None] = {(self.rank,): None}
        groups: dict[tuple[str, ...], ProcessGroup | None] = {}
        for axes in GROUPS:
            members = np.sort(dense.along(self.rank, axes), axis=None).tolist()
            if tuple(members) not in made:
                made[tuple(members)] = self.group(members, "·".join(axes))
            groups[axes] = made[tuple(members)]
        return groups

    def mesh(self, layout: Layout, shared: Shared, sharded: str, made: dict[str, ProcessGroup | None]) -> DeviceMesh:
        """The mesh of the ranks that share this rank's parameters, without axes of one rank other than `sharded`.

        FSDP takes its own mesh and that of `tp` or `ep` together, for which torch wants both to be slices of one. That
        need not be a mesh of the whole world, which would make every group of every axis on every rank.
        """
        kept, sizes, groups = [], [], []
        for name, axes in shared.items():
            members = np.sort(layout.along(self.rank, axes), axis=None).tolist()
            if len(members) > 1 or name == sharded:
                kept.append(name)
                sizes.append(len(members))
                groups.append(made.get(name) or self.group(members, name))
        ranks = layout.along(self.rank, [axis for name in kept for axis in shared[name]]).reshape(sizes)
        # A group numbers its members in their own order, also where the ranks of two folded axes are interleaved.
        ranks = np.sort(ranks, axis=kept.index(sharded))
        return DeviceMesh.from_group(
            [group for group in groups if group is not None],
            self.device.type,
            torch.from_numpy(ranks),
            mesh_dim_names=tuple(kept),
        )


def _behind_replicas(mesh: DeviceMesh, axis: str) -> DeviceMesh:
    return mesh["replicate", axis] if "replicate" in (mesh.mesh_dim_names or ()) else mesh[axis]
