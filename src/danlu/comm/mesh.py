"""Process groups along the axes of a plan."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from danlu.comm.layout import Ranks, dense_ranks, expert_ranks
from danlu.spec.cluster import Cluster
from danlu.spec.placing import EXPERT_AXES
from danlu.spec.plan import DENSE_AXES, Plan

GROUPS: tuple[tuple[str, ...], ...] = (
    ("pp",),
    ("cp",),
    ("tp",),
    ("cp", "tp"),  # ranks that hold parts of the same sequences
    ("replicate", "shard", "cp", "tp"),  # ranks that hold the same pipeline stage
)
"""Groups that somebody asks for, beside the meshes of parameters."""


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
    """Make the groups of a plan; every rank calls this once, after joining."""
    dense, expert = dense_ranks(plan, cluster), expert_ranks(plan, cluster)
    degrees = plan.degrees
    merged = dense.reshape(degrees.pp, degrees.replicate, degrees.shard * degrees.cp, degrees.tp)
    by_dense = _device_mesh(device, merged, ("pp", "replicate", "shard", "tp"), always="shard")
    by_expert = _device_mesh(device, expert, EXPERT_AXES, always="expert_shard") if experts else None
    return Mesh(
        plan=plan,
        device=device,
        rank=rank,
        place=_place(rank, expert, EXPERT_AXES) | _place(rank, dense, DENSE_AXES),
        groups=_groups(rank, dense),
        parameters=_behind_replicas(by_dense, "shard"),
        expert_parameters=_behind_replicas(by_expert, "expert_shard") if by_expert else None,
        tensor=by_dense["tp"] if degrees.tp > 1 else None,
        experts=by_expert["ep"] if by_expert and degrees.ep > 1 else None,
    )


def _place(rank: int, ranks: Ranks, axes: tuple[str, ...]) -> dict[str, int]:
    return dict(zip(axes, (int(at) for at in np.argwhere(ranks == rank)[0]), strict=True))


def _groups(rank: int, dense: Ranks) -> dict[tuple[str, ...], ProcessGroup | None]:
    """Every group of this rank that is not a mesh's, made by its members alone: no rank waits for a group it is not in.

    All ranks make all of `GROUPS` in the same order, whether they need them or not: torch names such a group after
    its members and the number of groups made before, and ranks that have made fewer would wait for each other forever.
    """
    place = _place(rank, dense, DENSE_AXES)
    made: dict[tuple[int, ...], ProcessGroup | None] = {tuple(range(dense.size)): dist.group.WORLD, (rank,): None}
    groups: dict[tuple[str, ...], ProcessGroup | None] = {}
    for axes in GROUPS:
        index = tuple(slice(None) if axis in axes else place[axis] for axis in DENSE_AXES)
        members = tuple(sorted(dense[index].flatten().tolist()))
        if members not in made:
            made[members] = dist.new_group(list(members), use_local_synchronization=True, group_desc="·".join(axes))
        groups[axes] = made[members]
    return groups


def _behind_replicas(mesh: DeviceMesh, axis: str) -> DeviceMesh:
    return mesh["replicate", axis] if "replicate" in (mesh.mesh_dim_names or ()) else mesh[axis]


def _device_mesh(device: torch.device, ranks: Ranks, axes: tuple[str, ...], always: str) -> DeviceMesh:
    """A mesh without the axes of one rank: at scale, groups that nobody uses are start-up time for nothing."""
    kept = [axis for axis, size in zip(axes, ranks.shape, strict=True) if size > 1 or axis == always]
    shape = [size for axis, size in zip(axes, ranks.shape, strict=True) if axis in kept]
    return DeviceMesh(device.type, torch.from_numpy(ranks.reshape(shape)), mesh_dim_names=tuple(kept))
