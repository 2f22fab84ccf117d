"""Expert parallelism: the experts of a layer spread over the ranks of `ep`, token copies sent with all-to-all."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor


class ExpertExchange(nn.Module):
    """Bring token copies to the ranks that hold their experts, and the answers back.

    Shapes: N token copies here, M token copies that reach this rank, L experts held, R ranks of `ep`.
    """

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        self.group = group

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # sizes follow the router: every step would compile anew
    def forward(self, x_ND: Tensor, counts_E: Tensor, experts: nn.Module) -> Tensor:
        """Token copies sorted by expert through their experts, back in the same order."""
        ranks = self.group.size()
        coming_RL = all_to_all_single(counts_E, None, None, self.group).view(ranks, -1)
        send, receive = counts_E.view(ranks, -1).sum(1).tolist(), coming_RL.sum(1).tolist()
        x_MD = all_to_all_single_autograd(x_ND, receive, send, self.group)
        # They come sorted by sender, then expert; experts want them sorted by expert.
        held = coming_RL.shape[1]
        expert_M = torch.arange(held, device=x_ND.device).repeat(ranks).repeat_interleave(coming_RL.flatten())
        order_M = expert_M.argsort(stable=True)
        y_MD = experts(x_MD[order_M], coming_RL.sum(0).tolist())
        back_M = torch.empty_like(order_M).scatter_(0, order_M, torch.arange(len(order_M), device=order_M.device))
        return all_to_all_single_autograd(y_MD[back_M], send, receive, self.group)


def apply_ep(layers: Iterable[nn.Module], mesh: DeviceMesh) -> None:
    """Keep this rank's experts of every layer (`experts`) and route through `exchange` to the others.

    Parameters stay global tensors of all experts, sharded by expert: checkpoints know experts by global number.
    """
    for layer in layers:
        experts = layer.get_submodule("experts")
        for name, weight in list(experts.named_parameters()):
            sharded = distribute_tensor(weight.detach(), mesh, [Shard(0)])
            experts.register_parameter(name, nn.Parameter(sharded))
        layer.exchange = ExpertExchange(mesh.get_group())
