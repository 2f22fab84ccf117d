"""Expert parallelism in parts: some tokens are on their way to or from their experts while others are computed.

The part that has arrived is computed while the next one is sent and the answers of the one before go back; in the
backward pass the same from the last part to the first. Of n parts only the first one's way to its experts and the last
one's way back are waited for, which is 1/n of all: the rest hides behind the experts, if they take as long.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from danlu.comm.own_collectives import collectives_of
from danlu.ops.operators.token_copies import CopyTokens, Reorder, inverse, sort_by_expert
from danlu.parallel.expert_counts import Counts, balanced_send_counts, order_of_arrivals
from danlu.torch_compat import all_to_all_single, wait_tensor

Transform = Callable[[Tensor, list[int]], Tensor]
"""What experts make of token copies sorted by expert, given how many each has."""


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
        sizes, top_k = _even_sizes(len(x_TD), self.chunks), chosen_TK.shape[1]
        chosen = chosen_TK.split(sizes)
        orders = [sort_by_expert(each) for each in chosen]
        sent, coming = self._exchange_counts(chosen)
        send, receive = _row_sums(sent), _row_sums(coming)
        there, back = _Transfer(self.group, send, receive), _Transfer(self.group, receive, send)
        there_gradient, back_gradient = _Transfer(self.group, receive, send), _Transfer(self.group, send, receive)
        copies = [CopyTokens.apply(x, *order, top_k) for x, order in zip(x_TD.split(sizes), orders, strict=True)]
        on_their_way = _SendInTurn.apply(there, there_gradient, *copies)
        del copies
        answers = []
        for chunk, coming_RL in enumerate(coming):
            x_MD = _Arrive.apply(there, there_gradient, chunk, on_their_way[chunk])
            order_M, counts_L = order_of_arrivals(coming_RL, x_MD.device)
            back_M = inverse(order_M)
            y_MD = Reorder.apply(transform(Reorder.apply(x_MD, order_M, back_M), counts_L), back_M, order_M)
            del x_MD
            answers.append(_Depart.apply(back, back_gradient, chunk, y_MD))
            del y_MD
        arrived = _ArriveAll.apply(back, back_gradient, *answers)
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
        f"`dispatch_chunks` is {chunks}, but all-to-alls of the {group.size()} ranks of `ep`, through the memory of "
        "their host or MPI, return when all tokens are there: parts hide nothing, and every one costs four more calls "
        "and smaller products in a layer's step; set `dispatch_chunks = 1` in the plan"
    )


def _even_sizes(rows: int, chunks: int) -> list[int]:
    return [rows * (chunk + 1) // chunks - rows * chunk // chunks for chunk in range(chunks)]


def _row_sums(counts: Iterable[Counts]) -> list[list[int]]:
    """Copies of every part for, or from, every rank."""
    return [[sum(row) for row in counts_RL] for counts_RL in counts]


class _Transfer:
    """The all-to-alls of one direction, one a part. It keeps no rows longer than they are under way."""

    def __init__(self, group: ProcessGroup, send: list[list[int]], receive: list[list[int]]) -> None:
        self._group, self._send, self._receive = group, send, receive
        self._under_way: dict[int, tuple[dist.Work, Tensor]] = {}
        self._not_begun: dict[int, Tensor] = {}

    def begin(self, chunk: int, x: Tensor) -> None:
        """Begin to send the rows of a part."""
        send, receive = self._send[chunk], self._receive[chunk]
        arrived = x.new_empty((sum(receive), *x.shape[1:]))
        work = dist.all_to_all_single(arrived, x.contiguous(), receive, send, group=self._group, async_op=True)
        self._under_way[chunk] = work, arrived

    def begin_in_turn(self, pieces: dict[int, Tensor]) -> None:
        """Begin to send the first part; each of the others when the one before has arrived.

        All at once they would share the network, and none would arrive early.
        """
        self._not_begun = pieces
        self._begin_next()

    def arrive(self, chunk: int) -> Tensor:
        """Wait for the rows of a part."""
        work, arrived = self._under_way.pop(chunk)
        work.wait()
        self._begin_next()
        return arrived

    def placeholder(self, chunk: int, like: Tensor) -> Tensor:
        """What stands for rows that will arrive, for autograd: of their shape, and without memory."""
        return like.new_zeros(()).expand(sum(self._receive[chunk]), *like.shape[1:])

    def _begin_next(self) -> None:
        if self._not_begun:
            chunk = next(iter(self._not_begun))
            self.begin(chunk, self._not_begun.pop(chunk))


# A function sends with one transfer, and its gradient with another, which the gradients of the functions after it have
# begun. Between them tensors without memory stand for rows under way, so that autograd calls the gradients in order:
# those of the part that was computed last come first, and all ranks meet in the same order.


def _nothing(gradient: Tensor) -> Tensor:
    """Instead of a gradient that is under way."""
    return gradient.new_zeros(()).expand_as(gradient)


class _SendInTurn(torch.autograd.Function):
    """Begin to send copies, part by part."""

    @staticmethod
    def forward(ctx: Any, there: _Transfer, gradient: _Transfer, *copies: Tensor) -> tuple[Tensor, ...]:
        ctx.gradient = gradient
        places = tuple(there.placeholder(chunk, each) for chunk, each in enumerate(copies))
        there.begin_in_turn(dict(enumerate(copies)))
        return places

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(ctx.gradient.arrive(chunk) for chunk in range(len(grads)))


class _Arrive(torch.autograd.Function):
    """The copies of a part, as soon as they are here."""

    @staticmethod
    def forward(ctx: Any, there: _Transfer, gradient: _Transfer, chunk: int, place: Tensor) -> Tensor:
        ctx.gradient, ctx.chunk = gradient, chunk
        return there.arrive(chunk)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.gradient.begin(ctx.chunk, grads[0])
        return None, None, None, _nothing(grads[0])


class _Depart(torch.autograd.Function):
    """Begin to send the answers to a part back."""

    @staticmethod
    def forward(ctx: Any, back: _Transfer, gradient: _Transfer, chunk: int, y_MD: Tensor) -> Tensor:
        ctx.gradient, ctx.chunk = gradient, chunk
        back.begin(chunk, y_MD)
        return back.placeholder(chunk, y_MD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, ctx.gradient.arrive(ctx.chunk)


class _ArriveAll(torch.autograd.Function):
    """The answers to all parts."""

    @staticmethod
    def forward(ctx: Any, back: _Transfer, gradient: _Transfer, *places: Tensor) -> tuple[Tensor, ...]:
        ctx.gradient = gradient
        return tuple(back.arrive(chunk) for chunk in range(len(places)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.gradient.begin_in_turn({chunk: grads[chunk] for chunk in reversed(range(len(grads)))})
        return None, None, *(_nothing(each) for each in grads)
