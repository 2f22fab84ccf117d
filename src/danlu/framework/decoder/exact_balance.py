"""Experts for the tokens of a sequence so that each gets the same number, and as little score as possible is given up.

A token's experts then depend on the other tokens of its sequence, later ones among them, so this is for training alone;
sequences do not depend on each other, so that no layout changes the choice.

First prices: an expert's is raised until no more tokens than it can take want it at its price, as in the dual of the
transport problem whose best solution this approximates. Then tokens propose to the experts that are worth most to them
at these prices, and experts keep those to whom they are worth most: no order of ranks or tokens decides, but values.

Shapes: B sequences, S tokens of one, E experts, K experts of a token.
"""

import torch
from torch import Tensor

_PRICE_ROUNDS = 12
"""More hardly change what is given up; whatever prices are, the balance is exact."""


@torch.compiler.disable  # type: ignore[untyped-decorator]  # ends when all tokens have their experts
@torch.no_grad()
def choose_evenly(scores_BSE: Tensor, top_k: int) -> Tensor:
    """K different experts for every token, BSK. Each gets S · K / E tokens of a sequence, rounded up or down."""
    value_BSE, capacity_BE = _priced(scores_BSE, top_k)
    refused_BSE = torch.zeros_like(value_BSE, dtype=torch.bool)
    while True:
        proposed_BSE = _marked(value_BSE.masked_fill(refused_BSE, -torch.inf), top_k) & ~refused_BSE
        too_many_BSE = proposed_BSE & ~_kept(value_BSE.masked_fill(~proposed_BSE, -torch.inf), capacity_BE, top_k)
        if not too_many_BSE.any():
            break
        refused_BSE |= too_many_BSE
    chosen_BSE = proposed_BSE
    for sequence in (chosen_BSE.sum(-1) < top_k).any(-1).nonzero().flatten().tolist():
        _fill(chosen_BSE[sequence], value_BSE[sequence], capacity_BE[sequence], top_k)
    # The best expert first, as top-k has it.
    return scores_BSE.masked_fill(~chosen_BSE, -torch.inf).topk(top_k, dim=-1).indices


def _priced(scores_BSE: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """What an expert is worth to a token beyond its price and the token's other choices; tokens each expert takes."""
    length, experts = scores_BSE.shape[1:]
    capacity, rest = divmod(length * top_k, experts)
    price_B1E = torch.zeros_like(scores_BSE[:, :1])
    for _ in range(_PRICE_ROUNDS if top_k < experts and length > 1 else 0):
        cutoff_BS1 = _between(scores_BSE - price_B1E, top_k, dim=-1)
        price_B1E = _between(scores_BSE - cutoff_BS1, max(1, min(capacity, length - 1)), dim=1)
    value_BSE = scores_BSE - price_B1E
    if top_k < experts:
        value_BSE = value_BSE - _between(value_BSE, top_k, dim=-1)
    # The dearest experts take the tokens that are left over.
    dearest_BE = price_B1E.squeeze(1).argsort(dim=-1, descending=True, stable=True)
    extra_E = (torch.arange(experts, device=scores_BSE.device) < rest).long()
    return value_BSE, torch.full_like(dearest_BE, capacity).scatter_add_(1, dearest_BE, extra_E.expand_as(dearest_BE))


def _between(values: Tensor, count: int, dim: int) -> Tensor:
    """A threshold that the `count` largest exceed, and no others: midway to the next."""
    largest = values.topk(count + 1, dim=dim).values
    return largest.narrow(dim, count - 1, 2).mean(dim, keepdim=True)


def _marked(value_BSE: Tensor, top_k: int) -> Tensor:
    """True at the K largest of every token."""
    best = value_BSE.topk(top_k, dim=-1).indices
    return torch.zeros_like(value_BSE, dtype=torch.bool).scatter_(-1, best, True)


def _kept(value_BSE: Tensor, capacity_BE: Tensor, top_k: int) -> Tensor:
    """True at as many of the largest of every expert as it can take."""
    most = min(value_BSE.shape[1], -(-value_BSE.shape[1] * top_k // value_BSE.shape[2]))
    best_BCE = value_BSE.topk(most, dim=1).indices
    place_C1 = torch.arange(most, device=value_BSE.device).unsqueeze(-1)
    within_BCE = (place_C1 < capacity_BE.unsqueeze(1)).expand_as(best_BCE)
    return torch.zeros_like(value_BSE, dtype=torch.bool).scatter_(1, best_BCE, within_BCE)


def _fill(chosen_SE: Tensor, value_SE: Tensor, capacity_E: Tensor, top_k: int) -> None:
    """Give experts with room to tokens without enough of them, in place.

    Where such a token already has every expert with room, another token takes the room and leaves one of its experts to
    it: the one that costs least.
    """
    lacking = (top_k - chosen_SE.sum(1)).tolist()
    for token in (index for index, count in enumerate(lacking) for _ in range(count)):
        room_E = chosen_SE.sum(0) < capacity_E
        direct_E = room_E & ~chosen_SE[token]
        if direct_E.any():
            chosen_SE[token, value_SE[token].masked_fill(~direct_E, -torch.inf).argmax()] = True
            continue
        taken = int(room_E.nonzero()[0])
        possible_SE = chosen_SE & ~chosen_SE[token] & ~chosen_SE[:, taken : taken + 1]
        gain_SE = value_SE[token] + value_SE[:, taken : taken + 1] - value_SE
        other, left = divmod(int(gain_SE.masked_fill(~possible_SE, -torch.inf).argmax()), chosen_SE.shape[1])
        chosen_SE[other, left], chosen_SE[other, taken], chosen_SE[token, left] = False, True, True
