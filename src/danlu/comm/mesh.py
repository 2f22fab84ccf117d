"""Process groups along the axes of a plan."""

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from danlu.comm.layout import EXPERT_AXES, Ranks, dense_ranks, expert_ranks
from danlu.spec.cluster import Cluster
from danlu.spec.plan import DENSE_AXES, Plan


@dataclass(frozen=True)
class Mesh:
    """The ranks of a run along the axes of its plan, passed to whoever needs a group; there is no global one."""

    plan: Plan
    device: torch.device
    rank: int
    dense_ranks: Ranks
    expert_ranks: Ranks
    parameters: DeviceMesh
    """Where dense parameters are sharded: `shard` (with `cp` folded in), behind `replicate` if there are replicas."""
    expert_parameters: DeviceMesh | None
    """Where an expert's parameters are sharded: `expert_shard`, behind `replicate` if there are replicas."""
    tensor: DeviceMesh | None
    """The ranks that share every matrix; None for one."""
    experts: DeviceMesh | None
    """The ranks that share the experts; None for one."""
    _groups: dict[tuple[int, ...], ProcessGroup] = field(default_factory=dict)

    def size(self, axis: str) -> int:
        """Ranks along an axis."""
        return int(getattr(self.plan.degrees, axis))

    def coordinate(self, axis: str) -> int:
        """This rank's place along an axis."""
        ranks, axes = (
            (self.expert_ranks, EXPERT_AXES) if axis in ("ep", "expert_shard") else (self.dense_ranks, DENSE_AXES)
        )
        return int(np.argwhere(ranks == self.rank)[0][axes.index(axis)])

    @property
    def data_index(self) -> int:
        """Which share of the batch this rank reads, of `degrees.data` shares."""
        return self.coordinate("replicate") * self.size("shard") + self.coordinate("shard")

    def group(self, *axes: str) -> ProcessGroup | None:
        """This rank's group along one or several dense axes; None for a group of one.

        Made when first asked for, by its members alone: no rank waits for groups it is not in.
        """
        place = np.argwhere(self.dense_ranks == self.rank)[0]
        index = tuple(slice(None) if axis in axes else int(at) for axis, at in zip(DENSE_AXES, place, strict=True))
        members = tuple(sorted(int(rank) for rank in self.dense_ranks[index].flatten()))
        if len(members) == 1:
            return None
        if len(members) == self.dense_ranks.size:
            return dist.group.WORLD
        if members not in self._groups:
            made = dist.new_group(list(members), use_local_synchronization=True, group_desc="·".join(axes))
            assert made is not None
            self._groups[members] = made
        return self._groups[members]


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
        dense_ranks=dense,
        expert_ranks=expert,
        parameters=_behind_replicas(by_dense, "shard"),
        expert_parameters=_behind_replicas(by_expert, "expert_shard") if by_expert else None,
        tensor=by_dense["tp"] if degrees.tp > 1 else None,
        experts=by_expert["ep"] if by_expert and degrees.ep > 1 else None,
    )


def _behind_replicas(mesh: DeviceMesh, axis: str) -> DeviceMesh:
    return mesh["replicate", axis] if "replicate" in (mesh.mesh_dim_names or ()) else mesh[axis]


def _device_mesh(device: torch.device, ranks: Ranks, axes: tuple[str, ...], always: str) -> DeviceMesh:
    """A mesh without the axes of one rank: at scale, groups that nobody uses are start-up time for nothing."""
    kept = [axis for axis, size in zip(axes, ranks.shape, strict=True) if size > 1 or axis == always]
    shape = [size for axis, size in zip(axes, ranks.shape, strict=True) if axis in kept]
    return DeviceMesh(device.type, torch.from_numpy(ranks.reshape(shape)), mesh_dim_names=tuple(kept))
