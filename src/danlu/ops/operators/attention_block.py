"""Attention of some queries over some keys, with what is needed to merge it with attention over other keys.

With the logarithm of the sum of a query's exponentiated scores (the log-sum-exp), results over disjoint sets of keys
merge into the result over all of them; and given the merged result and log-sum-exp, each set's share of the gradients
is computed alone.

Shapes: B sequences, H heads, K key-value heads (H is a multiple), S queries, T keys, W width of a head; values may have
another width than queries and keys.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from danlu.ops.operators.operator import precise
from danlu.torch_compat import flash_attention, flash_attention_backward


class BlockMask(NamedTuple):
    """What of a block a query may see: everything, unless one of the two says otherwise."""

    causal: bool = False
    """Only the keys up to the query's own index; the block has as many keys as queries."""
    added_B1ST: Tensor | None = None
    """Added to the scores; low but finite for a hidden key: a query that sees none of a block must not become NaN."""


def hidden_score(dtype: torch.dtype) -> float:
    """A score that hides a key: finite, and so low that its weight is exactly 0 beside any visible one."""
    return torch.finfo(dtype).min / 2


def attend(
    q_BHSW: Tensor, k_BKTW: Tensor, v_BKTW: Tensor, mask: BlockMask, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """The result for every query over these keys alone, in the dtype of the queries, and its log-sum-exp.

    Scores are scaled by one over the root of the width, unless `scale` says otherwise.
    """
    k_BHTW, v_BHTW = (_repeat_heads(x, q_BHSW.shape[1]) for x in (k_BKTW, v_BKTW))
    scale, width = _scale(q_BHSW, scale), v_BHTW.shape[-1]
    q, k, v = _same_width(q_BHSW, k_BHTW, v_BHTW)
    found = flash_attention(q, k, v, causal=mask.causal, added=mask.added_B1ST, scale=scale)
    if found is not None:
        return found[0][..., :width], found[1]
    scores_BHST = _scores(q_BHSW, k_BHTW, mask, scale)
    logsumexp_BHS = scores_BHST.logsumexp(-1)
    weights_BHST = (scores_BHST - logsumexp_BHS[..., None]).exp_()
    return (weights_BHST.type_as(v_BHTW) @ v_BHTW).type_as(q_BHSW), logsumexp_BHS


def attend_backward(
    grad_BHSW: Tensor,
    q_BHSW: Tensor,
    k_BKTW: Tensor,
    v_BKTW: Tensor,
    out_BHSW: Tensor,
    logsumexp_BHS: Tensor,
    mask: BlockMask,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values from these keys; result and log-sum-exp are those over all keys."""
    heads, kv_heads = q_BHSW.shape[1], k_BKTW.shape[1]
    k_BHTW, v_BHTW = (_repeat_heads(x, heads) for x in (k_BKTW, v_BKTW))
    scale, widths = _scale(q_BHSW, scale), (q_BHSW.shape[-1], k_BKTW.shape[-1], v_BKTW.shape[-1])
    grad, q, k, v, out = _same_width(grad_BHSW, q_BHSW, k_BHTW, v_BHTW, out_BHSW)
    found = flash_attention_backward(
        grad, q, k, v, out, logsumexp_BHS, causal=mask.causal, added=mask.added_B1ST, scale=scale
    )
    if found is None:
        found = _plain_backward(grad_BHSW, q_BHSW, k_BHTW, v_BHTW, out_BHSW, logsumexp_BHS, mask, scale)
    d_q, d_k, d_v = (gradient[..., :width] for gradient, width in zip(found, widths, strict=True))
    if heads != kv_heads:
        d_k, d_v = (x.unflatten(1, (kv_heads, -1)).sum(2, dtype=precise(x.dtype)) for x in (d_k, d_v))
    return d_q, d_k, d_v


def merge(out_BHSW: Tensor, logsumexp_BHS: Tensor, more_BHSW: Tensor, more_logsumexp_BHS: Tensor) -> None:
    """Add the result over more keys to a result in fp32, in place."""
    both_BHS = torch.logaddexp(logsumexp_BHS, more_logsumexp_BHS)
    out_BHSW.mul_((logsumexp_BHS - both_BHS).exp_()[..., None])
    out_BHSW.add_(more_BHSW * (more_logsumexp_BHS - both_BHS).exp_()[..., None])
    logsumexp_BHS.copy_(both_BHS)


def _scale(q_BHSW: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(q_BHSW.shape[-1]) if scale is None else scale


def _scores(q_BHSW: Tensor, k_BHTW: Tensor, mask: BlockMask, scale: float) -> Tensor:
    scores_BHST = (q_BHSW @ k_BHTW.transpose(-1, -2)).float() * scale
    if mask.added_B1ST is not None:
        scores_BHST = scores_BHST + mask.added_B1ST
    if mask.causal:
        hidden = torch.ones(scores_BHST.shape[-2:], dtype=torch.bool, device=scores_BHST.device).triu_(1)
        scores_BHST = scores_BHST.masked_fill(hidden, hidden_score(torch.float32))
    return scores_BHST


def _plain_backward(
    grad_BHSW: Tensor,
    q_BHSW: Tensor,
    k_BHTW: Tensor,
    v_BHTW: Tensor,
    out_BHSW: Tensor,
    logsumexp_BHS: Tensor,
    mask: BlockMask,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    weights_BHST = (_scores(q_BHSW, k_BHTW, mask, scale) - logsumexp_BHS[..., None]).exp_()
    d_v = weights_BHST.type_as(grad_BHSW).transpose(-1, -2) @ grad_BHSW
    explained_BHS1 = (grad_BHSW.float() * out_BHSW).sum(-1, keepdim=True)
    d_scores = weights_BHST * ((grad_BHSW @ v_BHTW.transpose(-1, -2)).float() - explained_BHS1)
    d_scores = (d_scores * scale).type_as(q_BHSW)
    return d_scores @ k_BHTW, d_scores.transpose(-1, -2) @ q_BHSW, d_v


def _repeat_heads(x_BKTW: Tensor, heads: int) -> Tensor:
    """Keys or values of every head, where several heads share them."""
    return x_BKTW if x_BKTW.shape[1] == heads else x_BKTW.repeat_interleave(heads // x_BKTW.shape[1], dim=1)


def _same_width(*given: Tensor) -> list[Tensor]:
    """Fused kernels want one width of queries, keys and values; zeros change no score and no weighted sum."""
    width = max(x.shape[-1] for x in given)
    return [x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in given]
