"""Causal attention of which every query has a first key: that of its document, or of its window.

No mask is in memory, and what no query sees is not computed. What it costs is in `ops/attention.py`.

Shapes: B sequences, S tokens of each, H heads of queries, G heads of keys and values (H a multiple of G), W width of a
head. `first_BS` never falls along a sequence, and is never beyond the query itself; one row serves all sequences.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from danlu.ops.attention import BACKWARD_PRODUCTS, causal_pairs, core_flops
from danlu.ops.operators.attention_block import BlockMask, attend, attend_backward, hidden_score
from danlu.ops.operators.operator import ROUNDING, Implementation, Operator, define_operator, precise


def reference(q_BSHW: Tensor, k_BSGW: Tensor, v_BSGW: Tensor, first_BS: Tensor, scale: float) -> Tensor:
    """All scores, of which those that a query does not see count for nothing."""
    sharing = q_BSHW.shape[2] // k_BSGW.shape[2]
    k_BSHW, v_BSHW = (x.repeat_interleave(sharing, dim=2) for x in (k_BSGW, v_BSGW))
    place_S = torch.arange(q_BSHW.shape[1], device=q_BSHW.device)
    hidden_BST = (place_S < first_BS[..., None]) | (place_S > place_S[:, None])
    scores_BHST = torch.einsum("bshw,bthw->bhst", q_BSHW, k_BSHW).to(precise(q_BSHW.dtype)) * scale
    shares_BHST = scores_BHST.masked_fill(hidden_BST[:, None], -torch.inf).softmax(-1).type_as(v_BSHW)
    return torch.einsum("bhst,bthw->bshw", shares_BHST, v_BSHW)


MASKED_ATTENTION = Operator(
    "masked_attention",
    reference,
    # Shares are rounded before they are multiplied: below fp32 one rounding more than elsewhere, and sums of many.
    ROUNDING | {torch.float32: 2.0**-17, torch.float16: 2.0**-8, torch.bfloat16: 2.0**-5},
    settings=((0.125,), (0.125,)),
)


def masked_attention(
    q_BSHW: Tensor, k_BSGW: Tensor, v_BSGW: Tensor, first_BS: Tensor, scale: float, window: int | None = None
) -> Tensor:
    """Attend from every query to the keys from its first one to itself; the result has the shape of the queries.

    `window`, if `first_BS` has one, is for counting FLOPs.
    """
    y_BSHW, _ = torch.ops.danlu.masked_attention(q_BSHW, k_BSGW, v_BSGW, first_BS, scale, window or 0)
    return y_BSHW


def _forward(
    q_BSHW: Tensor, k_BSGW: Tensor, v_BSGW: Tensor, first_BS: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """The result, and the logsumexp of every query's scores, (B, H, S)."""
    return MASKED_ATTENTION.implementation(q_BSHW).forward(q_BSHW, k_BSGW, v_BSGW, first_BS, scale)


def _backward(
    gradient_BSHW: Tensor,
    q_BSHW: Tensor,
    k_BSGW: Tensor,
    v_BSGW: Tensor,
    y_BSHW: Tensor,
    logsumexp_BHS: Tensor,
    first_BS: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values."""
    tensors = gradient_BSHW, q_BSHW, k_BSGW, v_BSGW, y_BSHW, logsumexp_BHS, first_BS
    return MASKED_ATTENTION.implementation(q_BSHW).backward(*tensors, scale)


def _forward_fake(q_BSHW: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    sequences, length, heads, _width = q_BSHW.shape
    return q_BSHW.new_empty(q_BSHW.shape), q_BSHW.new_empty(sequences, heads, length, dtype=precise(q_BSHW.dtype))


def _backward_fake(
    gradient_BSHW: Tensor, q_BSHW: Tensor, k_BSGW: Tensor, v_BSGW: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    return q_BSHW.new_empty(q_BSHW.shape), k_BSGW.new_empty(k_BSGW.shape), v_BSGW.new_empty(v_BSGW.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, gradient_BSHW: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q_BSHW, k_BSGW, v_BSGW, first_BS, *outputs = ctx.saved_tensors
    gradients = torch.ops.danlu.masked_attention_backward(
        gradient_BSHW, q_BSHW, k_BSGW, v_BSGW, *outputs, first_BS, ctx.scale, ctx.window
    )
    return *gradients, None, None, None


define_operator(
    "masked_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor first, float scale, int window) -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
    _save,
    _differentiate,
)
define_operator(
    "masked_attention_backward",
    "(Tensor gradient, Tensor q, Tensor k, Tensor v, Tensor y, Tensor logsumexp, Tensor first, float scale, int window)"
    " -> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)


@register_flop_formula(torch.ops.danlu.masked_attention)
def _forward_flops(q_shape: list[int], k: Any, v: Any, first: Any, scale: float, window: int, **_: object) -> int:
    """Where documents end is not known before a run: none ends, which no batch exceeds."""
    sequences, length, heads, width = q_shape
    return int(core_flops(sequences * heads, causal_pairs(length, length, window), width, width))


@register_flop_formula(torch.ops.danlu.masked_attention_backward)
def _backward_flops(gradient_shape: list[int], *rest: Any, **_: object) -> int:
    sequences, length, heads, width = gradient_shape
    pairs = causal_pairs(length, length, rest[-1])
    return int(core_flops(sequences * heads, pairs, width, width, BACKWARD_PRODUCTS))


class Piece(NamedTuple):
    """Queries in a row, and the keys that they see among them."""

    queries: slice
    keys: slice
    causal: bool
    """Every query sees all keys up to itself: no mask is needed."""


_LONG, _ROWS = 64, 128
"""A document of so many tokens is a piece of its own; others share pieces of so many queries."""


def pieces(first_S: "np.ndarray[Any, np.dtype[np.int64]]") -> Iterator[Piece]:
    """Cut one sequence so that little is computed that no query sees.

    A document of some length is a causal square. Rows of a window, and short documents in a row, are taken together
    with the keys that any of them sees: a quarter as many rows as keys, at least 128.
    """
    length = len(first_S)
    ends = np.searchsorted(first_S, np.arange(length), "right")  # of the queries whose first key is this one or before
    starts_long = np.flatnonzero((first_S == np.arange(length)) & (ends - np.arange(length) >= _LONG))
    begin = 0
    while begin < length:
        first, end = int(first_S[begin]), int(ends[begin])
        causal = first == begin and end - begin >= _LONG
        if not causal:
            end = min(begin + max(_ROWS, (begin - first) // 4), length)
            following = np.searchsorted(starts_long, begin, "right")
            if following < len(starts_long):
                end = min(end, int(starts_long[following]))
        yield Piece(slice(begin, end), slice(first, end), causal)
        begin = end


def _rows(first_BS: Tensor, sequences: int) -> Iterator[tuple[slice, "np.ndarray[Any, np.dtype[np.int64]]"]]:
    """Sequences that are cut alike, and where their queries begin to see: read by the host."""
    found = first_BS.cpu().numpy().astype(np.int64)
    for row, first_S in enumerate(found):
        yield slice(0, sequences) if len(found) == 1 else slice(row, row + 1), first_S


def _block_mask(first_S: "np.ndarray[Any, np.dtype[np.int64]]", piece: Piece, like: Tensor) -> BlockMask:
    if piece.causal:
        return BlockMask(causal=True)
    query_S = np.arange(piece.queries.start, piece.queries.stop)[:, None]
    key_T = np.arange(piece.keys.start, piece.keys.stop)
    hidden_ST = torch.from_numpy((key_T < first_S[piece.queries, None]) | (key_T > query_S)).to(like.device)
    added_ST = torch.zeros(hidden_ST.shape, dtype=like.dtype, device=like.device)
    return BlockMask(added_B1ST=added_ST.masked_fill_(hidden_ST, hidden_score(like.dtype))[None, None])


def _torch_forward(
    q_BSHW: Tensor, k_BSGW: Tensor, v_BSGW: Tensor, first_BS: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    sequences, length, heads, _ = q_BSHW.shape
    y_BSHW = q_BSHW.new_empty(q_BSHW.shape)
    logsumexp_BHS = q_BSHW.new_empty(sequences, heads, length, dtype=precise(q_BSHW.dtype))
    for rows, first_S in _rows(first_BS, sequences):
        for piece in pieces(first_S):
            q = q_BSHW[rows, piece.queries].transpose(1, 2)
            k, v = (x[rows, piece.keys].transpose(1, 2) for x in (k_BSGW, v_BSGW))
            y, logsumexp = attend(q, k, v, _block_mask(first_S, piece, q), scale)
            y_BSHW[rows, piece.queries] = y.transpose(1, 2)
            logsumexp_BHS[rows, :, piece.queries] = logsumexp
    return y_BSHW, logsumexp_BHS


def _torch_backward(
    gradient_BSHW: Tensor,
    q_BSHW: Tensor,
    k_BSGW: Tensor,
    v_BSGW: Tensor,
    y_BSHW: Tensor,
    logsumexp_BHS: Tensor,
    first_BS: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys that several pieces see have the sum of what these add, in fp32."""
    sequences = len(q_BSHW)
    cuts = [(rows, first_S, list(pieces(first_S))) for rows, first_S in _rows(first_BS, sequences)]
    apart = all(piece.keys.start == piece.queries.start for _, _, each in cuts for piece in each)
    summed = k_BSGW.dtype if apart else precise(k_BSGW.dtype)
    d_q_BSHW = q_BSHW.new_empty(q_BSHW.shape)
    d_k_BSGW, d_v_BSGW = (x.new_zeros(x.shape, dtype=summed) for x in (k_BSGW, v_BSGW))
    for rows, first_S, each in cuts:
        for piece in each:
            of_queries = (x[rows, piece.queries].transpose(1, 2) for x in (gradient_BSHW, q_BSHW, y_BSHW))
            gradient, q, y = of_queries
            k, v = (x[rows, piece.keys].transpose(1, 2) for x in (k_BSGW, v_BSGW))
            logsumexp = logsumexp_BHS[rows, :, piece.queries]
            mask = _block_mask(first_S, piece, q)
            d_q, d_k, d_v = attend_backward(gradient, q, k, v, y, logsumexp, mask, scale)
            d_q_BSHW[rows, piece.queries] = d_q.transpose(1, 2)
            d_k_BSGW[rows, piece.keys] += d_k.transpose(1, 2)
            d_v_BSGW[rows, piece.keys] += d_v.transpose(1, 2)
    return d_q_BSHW, d_k_BSGW.type_as(k_BSGW), d_v_BSGW.type_as(v_BSGW)


MASKED_ATTENTION.implementations.append(
    Implementation("torch", _torch_forward, _torch_backward, "torch's fused kernel over each document or part of one")
)
