"""Expert parallelism in parts: some tokens are on their way to or from their experts while others are computed.

The part that has arrived is computed while the next one is sent and the answers of the one before go back; in the
backward pass the same from the last part to the first. Of n parts only the first one's way to its experts and the last
one's way back are waited for, which is 1/n of all: the rest hides behind the experts, if they take as long.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from danlu.comm.own_collectives import collectives_of
from danlu.ops.operators.token_copies import CopyTokens, Reorder, inverse, sort_by_expert
from danlu.parallel.chunk_transfer import Transform, compute_in_turn, even_sizes
from danlu.parallel.expert_counts import Counts, balanced_send_counts, order_of_arrivals
from danlu.torch_compat import all_to_all_single, wait_tensor


class ChunkedDispatcher(nn.Module):
    """Sends token copies to the ranks that hold their experts, and the outputs back, in `chunks` parts of the tokens.

    Shapes: T tokens, K experts of a token, D width, N copies of a part's tokens here, M copies that reach this rank, C
    parts, E experts, R ranks of `ep`, L experts held.
    """

    takes_tokens = True
    """Is given tokens and weights, and returns sums, where other dispatchers pass on copies sorted by expert."""

    def __init__(self, group: ProcessGroup, experts: int, chunks: int) -> None:
        """`experts` are those of all ranks of the group."""
        super().__init__()
        self.group, self.num_experts, self.chunks = group, experts, chunks
        self.assume_balanced = False
        """Take the load as even instead of reading it, since FakeTensors have no values."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # sizes follow the router: every step would recompile
    def forward(
        self, x_TD: Tensor, chosen_TK: Tensor, weights_TK: Tensor, experts: Callable[[Tensor, Any], Tensor]
    ) -> Tensor:
        """The sum, by their weights, of what its chosen experts make of every token.

        The experts are called once, and hand what transforms copies back to this dispatcher: FSDP gathers their
        parameters, and reduces the gradients, once for all parts.
        """
        return experts(x_TD, partial(self._in_parts, chosen_TK, weights_TK))

    def _in_parts(self, chosen_TK: Tensor, weights_TK: Tensor, x_TD: Tensor, transform: Transform) -> Tensor:
        sizes, top_k = even_sizes(len(x_TD), self.chunks), chosen_TK.shape[1]
        chosen = chosen_TK.split(sizes)
        orders = [sort_by_expert(each) for each in chosen]
        sent, coming = self._exchange_counts(chosen)
        send, receive = _row_sums(sent), _row_sums(coming)
        copies = [CopyTokens.apply(x, *order, top_k) for x, order in zip(x_TD.split(sizes), orders, strict=True)]

        def compute(chunk: int, x_MD: Tensor) -> Tensor:
            order_M, counts_L = order_of_arrivals(coming[chunk], x_MD.device)
            back_M = inverse(order_M)
            y_MD: Tensor = Reorder.apply(transform(Reorder.apply(x_MD, order_M, back_M), counts_L), back_M, order_M)
            return y_MD

        arrived = compute_in_turn(self.group, send, receive, copies, compute)
        copies_TKD = [
            Reorder.apply(y_ND, back_N, order_N).unflatten(0, (-1, top_k))
            for y_ND, (order_N, back_N) in zip(arrived, orders, strict=True)
        ]
        weights = weights_TK.split(sizes)
        return torch.cat([(y * weight.unsqueeze(-1)).sum(1) for y, weight in zip(copies_TKD, weights, strict=True)])

    def _exchange_counts(self, chosen: Iterable[Tensor]) -> tuple[list[Counts], list[Counts]]:
        """Of every part, the copies that this rank sends to, and receives from, every rank, by expert."""
        ranks = self.group.size()
        counts_CE = torch.stack([self._counts(each.flatten()) for each in chosen])
        sent_RCL = counts_CE.unflatten(1, (ranks, -1)).transpose(0, 1).contiguous()
        coming_RCL = all_to_all_single(sent_RCL, None, None, self.group)
        if not self.assume_balanced:
            sent, coming = sent_RCL.transpose(0, 1).tolist(), coming_RCL.transpose(0, 1).tolist()
            return sent, coming
        wait_tensor(coming_RCL)  # else the buffers of the collective are never freed
        counts = [balanced_send_counts(each.numel(), self.num_experts, ranks, self.group.rank()) for each in chosen]
        return counts, counts

    def _counts(self, chosen_N: Tensor) -> Tensor:
        """Copies for every expert."""
        return chosen_N.new_zeros(self.num_experts).scatter_add_(0, chosen_N, torch.ones_like(chosen_N))


def why_nothing_is_hidden(group: ProcessGroup, chunks: int) -> str | None:
    """What to warn of where an all-to-all of the group returns when its rows are there: parts only cost then."""
    own = collectives_of(group)
    if chunks == 1 or own is None or not own.answers("all_to_all", 0):
        return None
    return (
        f"`dispatch_chunks` is {chunks}, but all-to-alls of {group.size()} ranks of `ep`, through the memory of "
        "their host or MPI, return when all tokens are there: parts hide nothing, and every one costs four more calls "
        "and smaller products in a layer's step; set `dispatch_chunks = 1` in the plan"
    )


def _row_sums(counts: Iterable[Counts]) -> list[list[int]]:
    """Copies of every part for, or from, every rank."""
    return [[sum(row) for row in counts_RL] for counts_RL in counts]
