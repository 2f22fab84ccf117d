"""Process groups along the axes of a plan."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from danlu.comm.layout import EXPERT_AXES, dense_ranks, expert_ranks
from danlu.spec.cluster import Cluster
from danlu.spec.plan import DENSE_AXES, Plan


@dataclass(frozen=True)
class Mesh:
    """The ranks of a run along the axes of its plan, passed to whoever needs a group; there is no global one.

    Axes of degree 1 have no groups: at 100,000 ranks the groups of an axis nobody uses are start-up
    time for nothing. `shard` and `expert_shard` always exist, so that parameters always have a mesh.
    """

    plan: Plan
    device: torch.device
    dense: DeviceMesh
    expert: DeviceMesh | None
    rank: int

    def size(self, axis: str) -> int:
        """Ranks along an axis."""
        return int(getattr(self.plan.degrees, axis))

    def coordinate(self, axis: str) -> int:
        """This rank's place along an axis."""
        mesh = self.expert if axis in ("ep", "expert_shard") else self.dense
        if mesh is None or axis not in (mesh.mesh_dim_names or ()):
            return 0
        return mesh.get_local_rank(axis)

    def group(self, axis: str) -> ProcessGroup | None:
        """This rank's group along an axis; None where the axis has one rank."""
        if self.size(axis) == 1:
            return None
        mesh = self.expert if axis in ("ep", "expert_shard") else self.dense
        assert mesh is not None
        return mesh.get_group(axis)

    def axis(self, axis: str) -> DeviceMesh:
        """The mesh of one axis, for DTensor placements."""
        mesh = self.expert if axis in ("ep", "expert_shard") else self.dense
        assert mesh is not None
        return mesh[axis]

    @cached_property
    def data_index(self) -> int:
        """Which share of the batch this rank reads, of `degrees.data` shares."""
        return self.coordinate("replicate") * self.size("shard") + self.coordinate("shard")

    @cached_property
    def sequence_group(self) -> ProcessGroup | None:
        """The ranks that hold parts of the same sequences (`cp` and `tp` together)."""
        return self._joined("cp", "tp")

    @cached_property
    def stage_group(self) -> ProcessGroup | None:
        """The ranks that hold the same pipeline stage."""
        return self._joined("replicate", "shard", "cp", "tp")

    @cached_property
    def parameters(self) -> DeviceMesh:
        """The mesh dense parameters are sharded over: `shard` and `cp` as one axis, `replicate` before it."""
        sharded = "shard"
        if self.size("cp") > 1:
            sharded = "shard_cp"
            self.dense["shard", "cp"]._flatten(sharded)
        return self.dense["replicate", sharded] if self.size("replicate") > 1 else self.dense[sharded]

    @cached_property
    def expert_parameters(self) -> DeviceMesh:
        """The mesh an expert's parameters are sharded over."""
        assert self.expert is not None
        return self.expert["replicate", "expert_shard"] if self.size("replicate") > 1 else self.expert["expert_shard"]

    def _joined(self, *axes: str) -> ProcessGroup | None:
        present = tuple(axis for axis in axes if axis in (self.dense.mesh_dim_names or ()))
        if not present:
            return None
        mesh = self.dense[present] if len(present) == 1 else self.dense[present]._flatten("_".join(present))
        return mesh.get_group() if mesh.size() > 1 else None


def build_mesh(plan: Plan, device: torch.device, rank: int, cluster: Cluster | None, experts: bool) -> Mesh:
    """Make the groups of a plan; every rank calls this once, after joining."""
    dense = _device_mesh(device, dense_ranks(plan, cluster), DENSE_AXES, always="shard")
    expert = _device_mesh(device, expert_ranks(plan, cluster), EXPERT_AXES, always="expert_shard") if experts else None
    return Mesh(plan=plan, device=device, dense=dense, expert=expert, rank=rank)


def _device_mesh(device: torch.device, ranks: "object", axes: tuple[str, ...], always: str) -> DeviceMesh:
    array = torch.as_tensor(ranks)
    kept = [axis for axis, size in zip(axes, array.shape, strict=True) if size > 1 or axis == always]
    shape = [size for axis, size in zip(axes, array.shape, strict=True) if axis in kept]
    return DeviceMesh(device.type, array.reshape(shape), mesh_dim_names=tuple(kept))
