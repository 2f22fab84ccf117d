"""Expert parallelism: the experts of a layer sharded over the ranks of `ep`, tokens sent to them and back."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from danlu.comm.level_groups import LevelGroups
from danlu.ops.operators.token_copies import Reorder, inverse
from danlu.parallel.chunked_dispatch import ChunkedDispatcher
from danlu.parallel.deduplicated_dispatch import DeduplicatedDispatcher
from danlu.parallel.expert_counts import Counts, balanced_send_counts, order_of_arrivals
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
        order_M, counts_L = order_of_arrivals(coming_RL, x_ND.device)
        back_M = inverse(order_M)
        y_MD = Reorder.apply(experts(Reorder.apply(x_MD, order_M, back_M), counts_L), back_M, order_M)
        return all_to_all_single_autograd(y_MD, send, receive, self.group)

    def _exchange_counts(self, x_ND: Tensor, counts_E: Tensor) -> tuple[Counts, Counts]:
        """Copies that this rank sends to, and receives from, every rank, by expert."""
        ranks = self.group.size()
        coming_E = all_to_all_single(counts_E, None, None, self.group)
        if not self.assume_balanced:
            return counts_E.view(ranks, -1).tolist(), coming_E.view(ranks, -1).tolist()
        wait_tensor(coming_E)  # else the buffers of the collective are never freed
        counts = balanced_send_counts(len(x_ND), len(counts_E), ranks, self.group.rank())
        return counts, counts


def apply_ep(layers: Iterable[nn.Module], mesh: DeviceMesh, levels: LevelGroups | None = None, chunks: int = 1) -> None:
    """Keep this rank's experts of every layer (`experts`) and reach the others through its `dispatcher`.

    Parameters stay global tensors of all experts, sharded by expert: checkpoints have experts by global index.
    """
    for layer in layers:
        layer.dispatcher = shard_experts(layer.get_submodule("experts"), mesh, levels, chunks)


def shard_experts(experts: nn.Module, mesh: DeviceMesh, levels: LevelGroups | None, chunks: int) -> nn.Module:
    """Shard parameters that are stacked by expert over the ranks of `ep`; the dispatcher that reaches all of them.

    It sends a token once to every part of the network if it is given the `levels` of `ep`, and tokens in so many
    `chunks`, of which some are under way while others are computed.
    """
    count = 0
    for name, weight in list(experts.named_parameters()):
        count = len(weight)
        sharded = distribute_tensor(weight.detach(), mesh, [Shard(0)])
        experts.register_parameter(name, nn.Parameter(sharded))
    if levels is not None:
        return DeduplicatedDispatcher(levels, count, chunks)
    group = mesh.get_group()
    return AllToAllDispatcher(group) if chunks == 1 else ChunkedDispatcher(group, count, chunks)
