"""Replicas of a state are equal, bit for bit: a vote over their checksums names the one whose memory or chip erred.

A checksum is of the state and of the gradients that led to it.
"""

from collections import Counter

import torch
import torch.distributed as dist

from danlu.comm.mesh import ParallelMesh
from danlu.comm.world import ranks_of
from danlu.torch_compat import all_gather_single


class ReplicaVote:
    """This rank among those that hold the same shards."""

    def __init__(self, mesh: ParallelMesh) -> None:
        """For a mesh whose plan has replicas."""
        self._group, self._device = mesh.fsdp_mesh.get_group("replicate"), mesh.device
        self._rank, self._ranks = mesh.rank, ranks_of(self._group)

    def check(self, checksum: int, step: int) -> str:
        """What is wrong with this rank's state after a step; empty if nothing is. Called by all replicas together."""
        bounds = torch.tensor([checksum, -checksum], dtype=torch.int64, device=self._device)
        dist.all_reduce(bounds, dist.ReduceOp.MAX, group=self._group)
        highest, lowest = bounds.tolist()
        if highest == -lowest:
            return ""
        everyone = torch.empty(len(self._ranks), dtype=torch.int64, device=self._device)
        all_gather_single(everyone, bounds.new_tensor([checksum]), group=self._group)
        return describe_vote(dict(zip(self._ranks, everyone.tolist(), strict=True)), self._rank, step)


def describe_vote(checksums: dict[int, int], rank: int, step: int) -> str:
    """What a rank is to be blamed for, given the checksums of it and its replicas; empty for who is in the majority."""
    right, votes = Counter(checksums.values()).most_common(1)[0]
    remedy = "if replicas are on chips of different kinds, set `resilience.vote` to false"
    if 2 * votes <= len(checksums):
        ranks = ", ".join(map(str, sorted(checksums)))
        found = f"the states of ranks {ranks} must be equal after step {step}, but are not"
        return f"{found}, and none has a majority; {remedy}"
    if checksums[rank] == right:
        return ""
    others = ", ".join(str(each) for each in sorted(checksums) if checksums[each] == right)
    return (
        f"the state of rank {rank} after step {step} is not that of its replicas, ranks {others}: memory or arithmetic "
        f"of its host erred; {remedy}"
    )
