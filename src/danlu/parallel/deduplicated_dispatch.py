"""Expert parallelism that sends a token once to every part of the network that needs it, not once per expert.

A token of `top_k` experts crosses the trunk once for every supernode that one of them lies in, is handed on inside it
once for every host, and there once for every rank. On the way back each part sums what its experts made of the token,
by the router's weights, and returns one row. Of n parts, k experts drawn at random need n · (1 − (1 − 1/n)^k): on a
trunk between two supernodes, 8 experts send a token to 2 instead of 8.

Sums are taken part by part, in another order than in one sum over all experts: results differ in the last bits.

In several chunks, what passes the outermost level hides behind the experts: while they, and the levels inside, have
one chunk of the tokens, the next is on its way, and the answers to the one before are on theirs.
"""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from danlu.comm.level_groups import LevelGroups
from danlu.ops.operators.token_copies import balanced_counts
from danlu.parallel.chunk_transfer import Transform, compute_in_turn, even_sizes
from danlu.torch_compat import all_to_all_single, all_to_all_single_autograd, wait_tensor

_NOT_HERE = -1
"""Instead of an expert that lies in another part of the network."""


class _HandedOn(NamedTuple):
    """What of some rows goes over one level: the rows themselves go by themselves."""

    row_N: Tensor
    """Which rows are sent, sorted by the unit that needs them."""
    send: list[int]
    """Rows to every unit."""
    receive: list[int]
    """Rows from every unit."""
    chosen_MK: Tensor
    """Of the rows that arrive, the experts that lie here."""
    weights_MK: Tensor
    draws: float
    """How many those are, on average."""


class DeduplicatedDispatcher(nn.Module):
    """Sends tokens to the ranks that hold their experts, level by level from the outermost, and sums on the way back.

    Shapes: T tokens (or rows that were handed on), K experts of a token, D width, N rows that are sent.
    """

    takes_tokens = True
    """Is given tokens and weights, and returns sums, where other dispatchers pass on copies sorted by expert."""

    def __init__(self, over: LevelGroups, experts: int, chunks: int = 1) -> None:
        """`over` are the levels of this rank's `ep` group; `experts` are those of all its ranks."""
        super().__init__()
        self.over, self.chunks = over, chunks
        self.experts_held = experts // over.size
        self.assume_balanced = False
        """Take the load as even instead of reading it, since FakeTensors have no values."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # sizes follow the router: every step would recompile
    def forward(
        self, x_TD: Tensor, chosen_TK: Tensor, weights_TK: Tensor, experts: Callable[[Tensor, Any], Tensor]
    ) -> Tensor:
        """The sum, by their weights, of what its chosen experts make of every token.

        With several chunks the experts are called once, and hand back what transforms copies: FSDP gathers their
        parameters once for all chunks.
        """
        if self.chunks > 1:
            return experts(x_TD, partial(self._in_chunks, chosen_TK, weights_TK))
        return self._through_level(len(self.over.levels), x_TD, chosen_TK, weights_TK, chosen_TK.shape[1], experts)

    def _in_chunks(self, chosen_TK: Tensor, weights_TK: Tensor, x_TD: Tensor, transform: Transform) -> Tensor:
        """Send the tokens over the outermost level chunk by chunk, and through those inside it as they arrive."""
        depth, sizes, top_k = len(self.over.levels), even_sizes(len(x_TD), self.chunks), chosen_TK.shape[1]
        handed = [
            self._hand_on(depth, chosen, weights, top_k)
            for chosen, weights in zip(chosen_TK.split(sizes), weights_TK.split(sizes), strict=True)
        ]
        rows = [x[each.row_N] for x, each in zip(x_TD.split(sizes), handed, strict=True)]

        def compute(chunk: int, x_MD: Tensor) -> Tensor:
            here = handed[chunk]
            return self._through_level(depth - 1, x_MD, here.chosen_MK, here.weights_MK, here.draws, transform)

        send, receive = [each.send for each in handed], [each.receive for each in handed]
        answers = compute_in_turn(self.over.levels[-1].group, send, receive, rows, compute)
        return torch.cat([_summed(y, each.row_N, size) for y, each, size in zip(answers, handed, sizes, strict=True)])

    def _through_level(
        self, depth: int, x_TD: Tensor, chosen_TK: Tensor, weights_TK: Tensor, draws: float, experts: Transform
    ) -> Tensor:
        """Send rows to the units of the `depth`-th level, counted from one, and those within it, and sum their answers.

        `draws`: how many experts of a row lie in the part of the network that the row has reached, on average.
        """
        if depth == 0:
            return self._compute(x_TD, chosen_TK, weights_TK, draws, experts)
        there, group = self._hand_on(depth, chosen_TK, weights_TK, draws), self.over.levels[depth - 1].group
        x_MD = all_to_all_single_autograd(x_TD[there.row_N], there.receive, there.send, group)
        y_MD = self._through_level(depth - 1, x_MD, there.chosen_MK, there.weights_MK, there.draws, experts)
        return _summed(all_to_all_single_autograd(y_MD, there.send, there.receive, group), there.row_N, len(x_TD))

    def _hand_on(self, depth: int, chosen_TK: Tensor, weights_TK: Tensor, draws: float) -> _HandedOn:
        """Find the rows that every unit of a level needs, and tell it which experts they are for."""
        level = self.over.levels[depth - 1]
        stride = prod(inner.size for inner in self.over.levels[: depth - 1])
        unit_TK = chosen_TK // (self.experts_held * stride) % level.size
        unit_TK = torch.where(chosen_TK == _NOT_HERE, _NOT_HERE, unit_TK)
        hit = 1 - (1 - 1 / level.size) ** draws  # the chance that a unit is needed
        row_N, unit_N, send = self._rows_by_unit(unit_TK, level.size, hit)
        receive = self._exchange_counts(send, level.group, chosen_TK.device)
        elsewhere_NK = unit_TK[row_N] != unit_N.unsqueeze(-1)
        chosen_NK = chosen_TK[row_N].masked_fill(elsewhere_NK, _NOT_HERE)
        weights_NK = weights_TK[row_N].masked_fill(elsewhere_NK, 0.0)
        chosen_MK = all_to_all_single(chosen_NK, receive, send, level.group)
        weights_MK = all_to_all_single_autograd(weights_NK, receive, send, level.group)
        return _HandedOn(row_N, send, receive, wait_tensor(chosen_MK), weights_MK, draws / (level.size * hit))

    def _rows_by_unit(self, unit_TK: Tensor, units: int, hit: float) -> tuple[Tensor, Tensor, list[int]]:
        """The rows that every unit needs, sorted by unit; the unit of each; how many each needs."""
        if self.assume_balanced:
            count = round(hit * len(unit_TK))
            row_N = torch.arange(count * units, device=unit_TK.device) % max(1, len(unit_TK))
            return row_N, torch.zeros_like(row_N), [count] * units
        numbers = torch.arange(units, device=unit_TK.device)
        needed_UT = (unit_TK.unsqueeze(0) == numbers.view(-1, 1, 1)).any(-1)
        unit_N, row_N = needed_UT.nonzero(as_tuple=True)
        return row_N, unit_N, needed_UT.sum(1).tolist()

    def _exchange_counts(self, send: list[int], group: ProcessGroup, device: torch.device) -> list[int]:
        """Rows that every unit of a level sends here."""
        counts = all_to_all_single(torch.tensor(send, device=device), None, None, group)
        wait_tensor(counts)  # else the buffers of the collective are never freed
        return send if self.assume_balanced else counts.tolist()

    def _compute(
        self,
        x_TD: Tensor,
        chosen_TK: Tensor,
        weights_TK: Tensor,
        draws: float,
        experts: Transform,
    ) -> Tensor:
        """The sum of what this rank's experts make of rows that each need at least one of them."""
        if self.assume_balanced:
            copies = round(draws * len(x_TD))
            row_N = torch.arange(copies, device=x_TD.device) % max(1, len(x_TD))
            slot_N = torch.zeros_like(row_N)
            counts = balanced_counts(copies, self.experts_held)
        else:
            row_N, slot_N = (chosen_TK != _NOT_HERE).nonzero(as_tuple=True)
            held_N = chosen_TK[row_N, slot_N] - self.over.index * self.experts_held
            order_N = held_N.argsort(stable=True)
            row_N, slot_N = row_N[order_N], slot_N[order_N]
            counts = held_N.bincount(minlength=self.experts_held).tolist()
        y_ND = experts(x_TD[row_N], counts)
        return _summed(y_ND * weights_TK[row_N, slot_N].unsqueeze(-1).type_as(y_ND), row_N, len(x_TD))


def _summed(y_ND: Tensor, row_N: Tensor, rows: int) -> Tensor:
    """The sum of all that belongs to each row."""
    # not index_add, whose order of summation is left to chance on accelerators
    return y_ND.new_zeros((rows, y_ND.shape[1])).index_put((row_N,), y_ND, accumulate=True)
