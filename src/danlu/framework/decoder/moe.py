"""Mixture of experts: a router, dropless dispatch, and three ways to balance the load. Written for one device.

Shapes: T tokens, D width of the hidden states, E experts, N token copies (T × top_k), F hidden width of an expert.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from danlu.framework.decoder.exact_balance import choose_evenly
from danlu.ops.operators.experts import ExpertProducts, GroupedProducts, LoopedProducts
from danlu.ops.operators.gated import gated_product
from danlu.ops.operators.token_copies import CopyTokens, Reorder, balanced_counts, sort_by_expert
from danlu.spec.model import Moe
from danlu.torch_compat import all_gather_single

SendInParts = Callable[[Tensor, Callable[[Tensor, list[int]], Tensor]], Tensor]
"""Makes sums of tokens, by sending parts of them to their experts, which are called for each part."""


class AuxLossInjector(torch.autograd.Function):
    """Give `loss` a gradient of one without returning it.

    The auxiliary loss of a layer inside a pipeline stage cannot be added to the loss at the end of the model;
    attached to the hidden states, its gradient flows as if it had been added there.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        """Return `x` unchanged."""
        ctx.loss_like = (loss.shape, loss.dtype, loss.device)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """Pass the gradient of `x` on, and give the loss a gradient of one."""
        shape, dtype, device = ctx.loss_like
        return grads[0], torch.ones(shape, dtype=dtype, device=device)


class Router(nn.Module):
    """Choose `top_k` experts for every token."""

    bias_E: Tensor
    load_E: Tensor

    def __init__(self, width: int, moe: Moe) -> None:
        super().__init__()
        self.moe = moe
        self.gate = nn.Linear(width, moe.experts, bias=moe.bias)
        self.register_buffer("bias_E", torch.zeros(moe.experts))
        # Tokens sent to each expert in this step. Recompute counts a token twice: only the proportions are used.
        self.register_buffer("load_E", torch.zeros(moe.experts), persistent=False)
        self.step_load_E: Tensor
        """The same over all ranks, set once per step with the step metrics."""
        self.sequences_per_step = 1
        """Sequences of the global batch: the auxiliary loss is a mean over them."""
        self.loss_scale = 1.0
        """What gradients are multiplied by, where the loss is scaled for fp16."""
        self.sequence_group: dist.ProcessGroup | None = None
        """Ranks that hold shards of the same sequences, if these are sharded."""
        self.assume_balanced = False
        """Choose without balancing exactly, which needs values that FakeTensors do not have."""

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The chosen experts and their weights, both T × top_k, copies for every expert, and the auxiliary loss."""
        scores_BSE = self.gate(x_BSD).float()
        shares_BSE = scores_BSE.softmax(-1)
        scores_BSE = shares_BSE if self.moe.score == "softmax" else scores_BSE.sigmoid()
        if self.moe.balance == "exact" and self.training:
            chosen = self._choose_evenly(scores_BSE.detach())
        else:
            # The bias changes the choice, never the weight: balancing must not change the gradient.
            chosen = self._limit_groups(scores_BSE.detach() + self.bias_E).topk(self.moe.top_k, dim=-1).indices
        weights = scores_BSE.gather(-1, chosen)
        if self.moe.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        if self.moe.routed_scaling_factor != 1.0:
            weights = weights * self.moe.routed_scaling_factor
        with torch.no_grad():
            counts_BE = torch.zeros_like(shares_BSE[:, 0]).scatter_add_(
                1, chosen.flatten(1), torch.ones_like(weights).flatten(1)
            )
            counts_E = counts_BE.sum(0)
            if self.training:  # held-out data must not count in the balance
                self.load_E += counts_E
        loss = self._auxiliary_loss(shares_BSE, counts_BE)
        return chosen.flatten(0, 1), weights.flatten(0, 1), counts_E.long(), loss

    def _choose_evenly(self, scores_BSE: Tensor) -> Tensor:
        """Experts of which every one gets as many tokens of each sequence, sharded or not."""
        group = self.sequence_group
        if group is not None:
            gathered_RBSE = scores_BSE.new_empty((group.size(), *scores_BSE.shape))
            all_gather_single(gathered_RBSE.view(-1), scores_BSE.contiguous().view(-1), group)
            scores_BSE = gathered_RBSE.transpose(0, 1).flatten(1, 2)
        if self.assume_balanced:
            chosen = scores_BSE.topk(self.moe.top_k, dim=-1).indices
        else:
            chosen = choose_evenly(scores_BSE, self.moe.top_k)
        return chosen if group is None else chosen.chunk(group.size(), dim=1)[group.rank()]

    def _limit_groups(self, scores_BSE: Tensor) -> Tensor:
        """Hide the experts outside the `topk_group` groups whose two best experts have the highest sums of scores."""
        if self.moe.topk_group == self.moe.n_group:
            return scores_BSE
        scores_BSGE = scores_BSE.unflatten(-1, (self.moe.n_group, -1))
        sums_BSG = scores_BSGE.topk(2, dim=-1).values.sum(-1)
        best = sums_BSG.topk(self.moe.topk_group, dim=-1).indices
        hidden_BSG = torch.ones_like(sums_BSG, dtype=torch.bool).scatter_(-1, best, False)
        return scores_BSGE.masked_fill(hidden_BSG[..., None], -math.inf).flatten(-2)

    def _auxiliary_loss(self, shares_BSE: Tensor, counts_BE: Tensor) -> Tensor:
        """Load times mean probability of every expert, per sequence: linear over sequences, so no layout changes it.

        A loss over the tokens of a microbatch (the usual form) differs between layouts.
        """
        if self.moe.balance != "loss":
            return shares_BSE.new_zeros(())
        length = shares_BSE.shape[1]
        if self.sequence_group is not None:
            length *= self.sequence_group.size()
            counts_BE = counts_BE.clone()
            dist.all_reduce(counts_BE, group=self.sequence_group)
        load_BE = counts_BE * (self.moe.experts / (self.moe.top_k * length))
        share_BE = shares_BSE.sum(1) / length
        return (load_BE * share_BE).sum() * (self.moe.balance_rate / self.sequences_per_step * self.loss_scale)

    def pop_load(self) -> Tensor:
        """Tokens this rank sent to each expert since the last call."""
        load_E = self.load_E.clone()
        self.load_E.zero_()
        return load_E

    @torch.no_grad()
    def update_bias(self) -> None:
        """With `balance = "bias"`, raise the bias of experts below the last step's mean load, and lower the others."""
        if self.moe.balance == "bias":
            self.bias_E += self.moe.balance_rate * torch.sign(self.step_load_E.mean() - self.step_load_E)


class Experts(nn.Module):
    """The feed-forward networks of this rank's experts, as stacked matrices."""

    def __init__(self, width: int, moe: Moe, activation: str) -> None:
        super().__init__()
        self.activation = activation
        self.gate = nn.Parameter(torch.empty(moe.experts, width, moe.width)) if activation != "gelu" else None
        self.up = nn.Parameter(torch.empty(moe.experts, width, moe.width))
        self.down = nn.Parameter(torch.empty(moe.experts, moe.width, width))
        hidden_bias, down_bias = (moe.experts, moe.width), (moe.experts, width)
        self.gate_bias = nn.Parameter(torch.empty(hidden_bias)) if moe.bias and self.gate is not None else None
        self.up_bias = nn.Parameter(torch.empty(hidden_bias)) if moe.bias else None
        self.down_bias = nn.Parameter(torch.empty(down_bias)) if moe.bias else None
        self.multiply: Callable[[Tensor, Tensor], Tensor] | None = None
        """The product of an expert's tokens and one of its matrices, where these are quantized."""

    def forward(self, x_ND: Tensor, counts: list[int] | Tensor | SendInParts) -> Tensor:
        """Transform token copies sorted by expert, `counts[e]` of them for the e-th expert held here.

        Instead of counts, a function that is given tokens as they are and what transforms copies, as often as it likes.
        """
        return counts(x_ND, self._transform) if callable(counts) else self._transform(x_ND, counts)

    def _transform(self, x_ND: Tensor, counts: list[int] | Tensor) -> Tensor:
        products: ExpertProducts
        if self.multiply is None:
            products = GroupedProducts(counts, x_ND.device)
        else:
            products = LoopedProducts(counts, self.multiply)
        weights = (self.up, self.gate, self.down, self.up_bias, self.gate_bias, self.down_bias)
        up, gate, down, up_bias, gate_bias, down_bias = (_to_local(each) for each in weights)
        hidden = products(x_ND, up, up_bias)
        if gate is None:
            hidden = F.gelu(hidden)
        else:
            hidden = gated_product(products(x_ND, gate, gate_bias), hidden, self.activation)
        return products(hidden, down, down_bias)


def _to_local(weight: Tensor | None) -> Any:
    """This rank's experts of a weight that may be sharded, or may not be there."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


class LocalDispatcher(nn.Module):
    """Passes token copies to their experts, which are all on this rank; expert parallelism replaces it."""

    assume_balanced = False
    """Take the load as even instead of reading it, since FakeTensors have no values."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # sizes follow the router: every step would recompile
    def forward(
        self, x_ND: Tensor, counts_E: Tensor, experts: Callable[[Tensor, list[int] | Tensor], Tensor]
    ) -> Tensor:
        """Apply the experts to token copies sorted by expert; the result is in the same order."""
        if self.assume_balanced:
            return experts(x_ND, balanced_counts(len(x_ND), len(counts_E)))
        return experts(x_ND, counts_E)


def through_experts(
    x_TD: Tensor,
    chosen_TK: Tensor,
    weights_TK: Tensor,
    top_k: int,
    counts_E: Tensor,
    dispatcher: nn.Module,
    experts: Callable[[Tensor, Any], Tensor],
) -> Tensor:
    """The sum, by their weights, of what its chosen experts make of every token.

    Copies go to them sorted by expert, and come back; or the dispatcher itself takes tokens and returns sums. `top_k`
    is K, as a number that torch.compile need not guard.
    """
    if getattr(dispatcher, "takes_tokens", False):
        summed_TD: Tensor = dispatcher(x_TD, chosen_TK, weights_TK, experts)
        return summed_TD
    order_N, back_N = sort_by_expert(chosen_TK)
    y_ND: Tensor = dispatcher(CopyTokens.apply(x_TD, order_N, back_N, top_k), counts_E, experts)
    return (Reorder.apply(y_ND, back_N, order_N).unflatten(0, (-1, top_k)) * weights_TK.unsqueeze(-1)).sum(1)


class MoeLayer(nn.Module):
    """A feed-forward layer of routed experts, plus shared ones if there are any. No token is dropped."""

    def __init__(self, width: int, moe: Moe, activation: str, shared: nn.Module | None) -> None:
        super().__init__()
        self.top_k = moe.top_k
        self.router = Router(width, moe)
        self.dispatcher: nn.Module = LocalDispatcher()
        self.experts = Experts(width, moe, activation)
        self.shared = shared

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Send every token to its experts and sum their weighted outputs."""
        chosen, weights, counts_E, loss = self.router(x_BSD)
        x_TD, weights = x_BSD.flatten(0, 1), weights.type_as(x_BSD)
        y_TD = through_experts(x_TD, chosen, weights, self.top_k, counts_E, self.dispatcher, self.experts)
        y_BSD = y_TD.view_as(x_BSD)
        if self.shared is not None:
            y_BSD = y_BSD + self.shared(x_BSD)
        return AuxLossInjector.apply(y_BSD.type_as(x_BSD), loss)
