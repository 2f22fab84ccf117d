"""Chunks of rows to other ranks and their answers back, one under way while another is computed.

A chunk is computed when it has arrived, while the next one is sent and the answers to the one before go back; in the
backward pass the same from the last chunk to the first.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

Transform = Callable[[Tensor, list[int]], Tensor]
"""What experts make of token copies sorted by expert, given how many each has."""


def even_sizes(rows: int, chunks: int) -> list[int]:
    """Rows of every chunk."""
    return [rows * (chunk + 1) // chunks - rows * chunk // chunks for chunk in range(chunks)]


def compute_in_turn(
    group: ProcessGroup,
    send: list[list[int]],
    receive: list[list[int]],
    rows: list[Tensor],
    compute: Callable[[int, Tensor], Tensor],
) -> tuple[Tensor, ...]:
    """What the ranks of a group make of the chunks of rows that they are sent: `compute` is given a chunk, and which.

    `send[c][r]` rows of the c-th chunk go to the r-th rank, and `receive[c][r]` come from it. The list of `rows` is
    emptied: they are kept no longer than they are under way.
    """
    there, back = ChunkTransfer(group, send, receive), ChunkTransfer(group, receive, send)
    there_gradient, back_gradient = ChunkTransfer(group, receive, send), ChunkTransfer(group, send, receive)
    on_their_way = _SendInTurn.apply(there, there_gradient, *rows)
    rows.clear()
    answers = []
    for chunk in range(len(send)):
        arrived = _Arrive.apply(there, there_gradient, chunk, on_their_way[chunk])
        answer = compute(chunk, arrived)
        del arrived
        answers.append(_Depart.apply(back, back_gradient, chunk, answer))
        del answer
    returned: tuple[Tensor, ...] = _ArriveAll.apply(back, back_gradient, *answers)
    return returned


class ChunkTransfer:
    """The all-to-alls of one direction, one a chunk. It keeps no rows longer than they are under way."""

    def __init__(self, group: ProcessGroup, send: list[list[int]], receive: list[list[int]]) -> None:
        self._group, self._send, self._receive = group, send, receive
        self._under_way: dict[int, tuple[dist.Work, Tensor]] = {}
        self._not_begun: dict[int, Tensor] = {}

    def begin(self, chunk: int, x: Tensor) -> None:
        """Begin to send the rows of a chunk."""
        send, receive = self._send[chunk], self._receive[chunk]
        arrived = x.new_empty((sum(receive), *x.shape[1:]))
        work = dist.all_to_all_single(arrived, x.contiguous(), receive, send, group=self._group, async_op=True)
        self._under_way[chunk] = work, arrived

    def begin_in_turn(self, pieces: dict[int, Tensor]) -> None:
        """Begin to send the first chunk; each of the others when the one before has arrived.

        All at once they would share the network, and none would arrive early.
        """
        self._not_begun = pieces
        self._begin_next()

    def arrive(self, chunk: int) -> Tensor:
        """Wait for the rows of a chunk."""
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
# those of the chunk that was computed last come first, and all ranks meet in the same order.


def _nothing(gradient: Tensor) -> Tensor:
    """Instead of a gradient that is under way."""
    return gradient.new_zeros(()).expand_as(gradient)


class _SendInTurn(torch.autograd.Function):
    """Begin to send rows, chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, there: ChunkTransfer, gradient: ChunkTransfer, *copies: Tensor) -> tuple[Tensor, ...]:
        ctx.gradient = gradient
        places = tuple(there.placeholder(chunk, each) for chunk, each in enumerate(copies))
        there.begin_in_turn(dict(enumerate(copies)))
        return places

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(ctx.gradient.arrive(chunk) for chunk in range(len(grads)))


class _Arrive(torch.autograd.Function):
    """The rows of a chunk, as soon as they are here."""

    @staticmethod
    def forward(ctx: Any, there: ChunkTransfer, gradient: ChunkTransfer, chunk: int, place: Tensor) -> Tensor:
        ctx.gradient, ctx.chunk = gradient, chunk
        return there.arrive(chunk)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.gradient.begin(ctx.chunk, grads[0])
        return None, None, None, _nothing(grads[0])


class _Depart(torch.autograd.Function):
    """Begin to send the answers to a chunk back."""

    @staticmethod
    def forward(ctx: Any, back: ChunkTransfer, gradient: ChunkTransfer, chunk: int, y_MD: Tensor) -> Tensor:
        ctx.gradient, ctx.chunk = gradient, chunk
        back.begin(chunk, y_MD)
        return back.placeholder(chunk, y_MD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, ctx.gradient.arrive(ctx.chunk)


class _ArriveAll(torch.autograd.Function):
    """The answers to all chunks."""

    @staticmethod
    def forward(ctx: Any, back: ChunkTransfer, gradient: ChunkTransfer, *places: Tensor) -> tuple[Tensor, ...]:
        ctx.gradient = gradient
        return tuple(back.arrive(chunk) for chunk in range(len(places)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.gradient.begin_in_turn({chunk: grads[chunk] for chunk in reversed(range(len(grads)))})
        return None, None, *(_nothing(each) for each in grads)
