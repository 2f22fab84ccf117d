"""Expert parallelism that sends a token once to every part of the network that needs it, not once per expert.

A token of `top_k` experts crosses the trunk once for every supernode that one of them lies in, is handed on inside it
once for every host, and there once for every rank. On the way back each part sums what its experts made of the token,
by the router's weights, and returns one row. Of n parts, k experts drawn at random need n · (1 − (1 − 1/n)^k): on a
trunk between two supernodes, 8 experts send a token to 2 instead of 8.

Sums are taken part by part, in another order than in one sum over all experts: results differ in the last bits.
"""

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from danlu.comm.level_groups import LevelGroups
from danlu.ops.operators.token_copies import balanced_counts
from danlu.torch_compat import all_to_all_single, all_to_all_single_autograd, wait_tensor

_NOT_HERE = -1
"""Instead of an expert that lies in another part of the network."""


class DeduplicatedDispatcher(nn.Module):
    """Sends tokens to the ranks that hold their experts, level by level from the outermost, and sums on the way back.

    Shapes: T tokens (or rows that were handed on), K experts of a token, D width, N rows that are sent.
    """

    takes_tokens = True
    """Is given tokens and weights, and returns sums, where other dispatchers pass on copies sorted by expert."""

    def __init__(self, over: LevelGroups, experts: int) -> None:
        """`over` are the levels of this rank's `ep` group; `experts` are those of all its ranks."""
        super().__init__()
        self.over = over
        self.experts_held = experts // over.size
        self.assume_balanced = False
        """Take the load as even instead of reading it, since FakeTensors have no values."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # sizes follow the router: every step would recompile
    def forward(
        self, x_TD: Tensor, chosen_TK: Tensor, weights_TK: Tensor, experts: Callable[[Tensor, list[int]], Tensor]
    ) -> Tensor:
        """The sum, by their weights, of what its chosen experts make of every token."""
        return self._through_level(len(self.over.levels), x_TD, chosen_TK, weights_TK, chosen_TK.shape[1], experts)

    def _through_level(
        self,
        depth: int,
        x_TD: Tensor,
        chosen_TK: Tensor,
        weights_TK: Tensor,
        draws: float,
        experts: Callable[[Tensor, list[int]], Tensor],
    ) -> Tensor:
        """Send rows to the units of the `depth`-th level, counted from one, and those within it, and sum their answers.

        `draws`: how many experts of a row lie in the part of the network that the row has reached, on average.
        """
        if depth == 0:
            return self._compute(x_TD, chosen_TK, weights_TK, draws, experts)
        level = self.over.levels[depth - 1]
        stride = prod(inner.size for inner in self.over.levels[: depth - 1])
        unit_TK = chosen_TK // (self.experts_held * stride) % level.size
        unit_TK = torch.where(chosen_TK == _NOT_HERE, _NOT_HERE, unit_TK)
        hit = 1 - (1 - 1 / level.size) ** draws  # the chance that a unit is needed
        row_N, unit_N, send = self._rows_by_unit(unit_TK, level.size, hit)
        receive = self._exchange_counts(send, level.group, x_TD.device)

        def pass_on(tensor: Tensor) -> Tensor:
            return all_to_all_single_autograd(tensor, receive, send, level.group)

        elsewhere_NK = unit_TK[row_N] != unit_N.unsqueeze(-1)
        chosen_NK = all_to_all_single(chosen_TK[row_N].masked_fill(elsewhere_NK, _NOT_HERE), receive, send, level.group)
        y_ND = self._through_level(
            depth - 1,
            pass_on(x_TD[row_N]),
            wait_tensor(chosen_NK),
            pass_on(weights_TK[row_N].masked_fill(elsewhere_NK, 0.0)),
            draws / (level.size * hit),
            experts,
        )
        return _summed(all_to_all_single_autograd(y_ND, send, receive, level.group), row_N, len(x_TD))

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
        experts: Callable[[Tensor, list[int]], Tensor],
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
