"""Attention score by score, for what no fused kernel computes: sinks, and scores bounded by a softcap.

Shapes: B sequences, S queries, T keys, H heads, K key-value heads, G heads that share keys, W width of a head.
"""

import torch
from torch import Tensor


def attend_by_scores(
    q_BHSW: Tensor,
    k_BKTW: Tensor,
    v_BKTW: Tensor,
    mask: Tensor,
    *,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """Attend; the result has the shape of `q_BHSW`. The softmax is in fp32, and `mask` is added to its scores.

    All scores of a layer are in memory, and kept for the backward pass (`danlu.ops.attention.score_bytes`).
    """
    heads, groups = q_BHSW.shape[1], k_BKTW.shape[1]
    k_BHTW, v_BHTW = (x if heads == groups else x.repeat_interleave(heads // groups, dim=1) for x in (k_BKTW, v_BKTW))
    scores_BHST = (q_BHSW @ k_BHTW.transpose(-2, -1)).float() * scale
    if softcap is not None:
        scores_BHST = softcap * torch.tanh(scores_BHST / softcap)
    scores_BHST = scores_BHST + mask
    if sinks_H is None:
        shares_BHST = scores_BHST.softmax(-1)
    else:
        sinks_BHS1 = sinks_H.float()[:, None, None].expand(*scores_BHST.shape[:-1], 1)
        shares_BHST = torch.cat((scores_BHST, sinks_BHS1), dim=-1).softmax(-1)[..., :-1]
    return shares_BHST.type_as(v_BHTW) @ v_BHTW
