"""Expert parallelism: the experts of a layer sharded over the ranks of `ep`, tokens sent to them and back."""

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from danlu.comm.level_groups import LevelGroups
from danlu.parallel.deduplicated_dispatch import DeduplicatedDispatcher
from danlu.torch_compat import all_to_all_single, all_to_all_single_autograd, wait_tensor


class AllToAllDispatcher(nn.Module):
    """Sends token copies to the ranks that hold their experts, and the outputs back.

    Shapes: N token copies here, M token copies that reach this rank, L experts held, R ranks of `ep`.
    """

    def __init__(self, group: ProcessGroup, assume_balanced: bool = False) -> None:
        """`assume_balanced`: take the load as even instead of reading it, since FakeTensors have no values."""
        super().__init__()
        self.group = group
        self.assume_balanced = assume_balanced

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # sizes follow the router: every step would recompile
    def forward(self, x_ND: Tensor, counts_E: Tensor, experts: Callable[[Tensor, list[int]], Tensor]) -> Tensor:
        """Apply the experts to token copies sorted by expert; the result is in the same order."""
        sent_RL, coming_RL = self._exchange_counts(x_ND, counts_E)
        send, receive = [sum(row) for row in sent_RL], [sum(row) for row in coming_RL]
        x_MD = all_to_all_single_autograd(x_ND, receive, send, self.group)
        # They arrive sorted by sender, then expert; `experts` needs them sorted by expert.
        repeats = torch.tensor([count for row in coming_RL for count in row], device=x_ND.device)
        experts_held = torch.arange(len(coming_RL[0]), device=x_ND.device).repeat(len(coming_RL))
        order_M = experts_held.repeat_interleave(repeats, output_size=sum(receive)).argsort(stable=True)
        y_MD = experts(x_MD[order_M], [sum(column) for column in zip(*coming_RL, strict=True)])
        back_M = torch.empty_like(order_M).scatter_(0, order_M, torch.arange(len(order_M), device=order_M.device))
        return all_to_all_single_autograd(y_MD[back_M], send, receive, self.group)

    def _exchange_counts(self, x_ND: Tensor, counts_E: Tensor) -> tuple[list[list[int]], list[list[int]]]:
        """Copies that this rank sends to, and receives from, every rank, by expert."""
        ranks = self.group.size()
        coming_E = all_to_all_single(counts_E, None, None, self.group)
        if not self.assume_balanced:
            return counts_E.view(ranks, -1).tolist(), coming_E.view(ranks, -1).tolist()
        wait_tensor(coming_E)  # else the buffers of the collective are never freed
        counts = balanced_send_counts(len(x_ND), len(counts_E), ranks, self.group.rank())
        return counts, counts


def balanced_send_counts(copies: int, experts: int, ranks: int, rank: int) -> list[list[int]]:
    """Copies that a rank sends to every rank, by expert, at even load; it receives the same.

    Also where there are fewer copies than experts: each sender starts its round of the experts where the previous one
    ended, so that every rank receives as many copies as it sends.
    """
    held = experts // ranks
    first_R = (rank + np.arange(ranks)) * held
    ends_RL = (first_R[:, None] + np.arange(held + 1)) * copies // experts
    counts: list[list[int]] = np.diff(ends_RL).tolist()
    return counts


def apply_ep(layers: Iterable[nn.Module], mesh: DeviceMesh, levels: LevelGroups | None) -> None:
    """Keep this rank's experts of every layer (`experts`) and reach the others through its `dispatcher`.

    Parameters stay global tensors of all experts, sharded by expert: checkpoints have experts by global index.
    """
    for layer in layers:
        layer.dispatcher = shard_experts(layer.get_submodule("experts"), mesh, levels)


def shard_experts(experts: nn.Module, mesh: DeviceMesh, levels: LevelGroups | None) -> nn.Module:
    """Shard parameters that are stacked by expert over the ranks of `ep`; the dispatcher that reaches all of them.

    It sends a token once to every part of the network if it is given the `levels` of `ep`.
    """
    count = 0
    for name, weight in list(experts.named_parameters()):
        count = len(weight)
        sharded = distribute_tensor(weight.detach(), mesh, [Shard(0)])
        experts.register_parameter(name, nn.Parameter(sharded))
    return AllToAllDispatcher(mesh.get_group()) if levels is None else DeduplicatedDispatcher(levels, count)
