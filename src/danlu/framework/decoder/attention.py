"""Attention of the decoder, over full sequences, over each document in them, or over a window.

Shapes: B sequences, S tokens of each, D width of the hidden states, H heads, K key-value heads, W width of a head.
Where heads or sequence are sharded, the same code runs on the shard.
"""

import math
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from danlu.framework.decoder.kv_cache import KVCache
from danlu.framework.decoder.norm import build_norm
from danlu.framework.decoder.rope import apply_rope
from danlu.framework.decoder.score_attention import attend_by_scores
from danlu.ops.operators.masked_attention import masked_attention
from danlu.spec.model import Model, RopeScaling


class Documents(NamedTuple):
    """What every token of a sequence sees: its document alone, its window alone, or both."""

    positions_BS: Tensor | None
    """Of every token in its document, over the full sequences; None if a sequence is one."""
    first_BS: Tensor | None = None
    """The first token that every token sees, in int32; one row if it is the same in all sequences.

    None if attention finds it from the positions.
    """
    mask_B1SS: Tensor | None = None
    """Added to scores that are in memory, in their dtype: 0 for what is seen, else -inf."""

    @classmethod
    def from_positions(cls, positions_BS: Tensor, window: int | None = None) -> Self:
        """Of sequences with several documents."""
        key_S = torch.arange(positions_BS.shape[1], device=positions_BS.device)
        first_BS = key_S - positions_BS
        if window is not None:
            first_BS = torch.maximum(first_BS, key_S - (window - 1))
        return cls(positions_BS, first_BS.to(torch.int32))

    @classmethod
    def causal(cls, length: int, device: torch.device, window: int | None = None) -> Self:
        """Of sequences that are one document each."""
        key_S = torch.arange(length, device=device, dtype=torch.int32)
        first_S = torch.zeros_like(key_S) if window is None else (key_S - (window - 1)).clamp(min=0)
        return cls(None, first_S[None])

    def with_mask(self, dtype: torch.dtype) -> Self:
        """With a mask in the dtype of queries and keys, for all layers that have their scores in memory."""
        assert self.first_BS is not None
        key_S = torch.arange(self.first_BS.shape[1], device=self.first_BS.device)
        hidden_BSS = (key_S < self.first_BS[..., None]) | (key_S > key_S[:, None])
        mask_BSS = torch.zeros(hidden_BSS.shape, dtype=dtype, device=key_S.device)
        return self._replace(mask_B1SS=mask_BSS.masked_fill_(hidden_BSS, -math.inf)[:, None])


class CoreAttention(nn.Module):
    """Causal attention over full sequences, documents or windows; context parallelism wraps it."""

    def __init__(
        self,
        theta: float | None,
        scaling: RopeScaling | None = None,
        *,
        window: int | None = None,
        scale: float | None = None,
        by_scores: bool = False,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        self.theta, self.scaling, self.window = theta, scaling, window
        self.scale, self.by_scores, self.softcap = scale, by_scores, softcap

    @classmethod
    def of_layer(cls, model: Model, layer: int) -> Self:
        """That of layer number `layer`: with or without a window, which may have positions of its own."""
        window, local = model.layer_window(layer), model.local_rope_theta
        theta, scaling = (model.rope_theta, model.rope_scaling) if window is None or local is None else (local, None)
        return cls(
            theta if model.position == "rope" else None,
            scaling,
            window=window,
            scale=None if model.query_scalar is None else model.query_scalar**-0.5,
            by_scores=model.materializes_scores,
            softcap=model.score_softcap,
        )

    def forward(
        self,
        q_BSHW: Tensor,
        k_BSKW: Tensor,
        v_BSKW: Tensor,
        documents: Documents | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Attend; the result has the shape of `q_BSHW`."""
        positions_BS, first_BS, mask = (None, None, None) if documents is None else documents
        q_BSHW, k_BSKW = self.rotate(q_BSHW, k_BSKW, positions_BS)
        if first_BS is None or self.by_scores:
            return self._attend(q_BSHW, k_BSKW, v_BSKW, mask, sinks_H)
        scale = q_BSHW.shape[-1] ** -0.5 if self.scale is None else self.scale
        return masked_attention(q_BSHW, k_BSKW, v_BSKW, first_BS, scale, self.window)

    def extend(
        self, q_BSHW: Tensor, k_BSKW: Tensor, v_BSKW: Tensor, cache: KVCache, sinks_H: Tensor | None = None
    ) -> Tensor:
        """As `forward` at the positions after those in the cache, which are attended to as well; adds these to it."""
        first, new = cache.length, q_BSHW.shape[1]
        q_BSHW, k_BSKW = self.rotate(q_BSHW, k_BSKW, torch.arange(first, first + new, device=q_BSHW.device)[None])
        k_BSKW, v_BSKW = cache.append(k_BSKW, v_BSKW)
        if self.window is not None:  # the oldest key that the first new position sees
            oldest = max(0, first + 1 - self.window)
            k_BSKW, v_BSKW, first = k_BSKW[:, oldest:], v_BSKW[:, oldest:], first - oldest
        windowed = self.window is not None and first + new > self.window
        if (first == 0 or new == 1) and not windowed and not self.by_scores:
            return self._attend(q_BSHW, k_BSKW, v_BSKW, None, None, causal=first == 0)
        # The i-th new position sees everything before it in its window, and itself.
        key_T = torch.arange(first + new, device=q_BSHW.device)
        query_S = key_T[first:, None]
        hidden_ST = key_T > query_S
        if self.window is not None:
            hidden_ST |= key_T <= query_S - self.window
        mask_ST = torch.zeros(hidden_ST.shape, dtype=q_BSHW.dtype, device=q_BSHW.device)
        return self._attend(q_BSHW, k_BSKW, v_BSKW, mask_ST.masked_fill_(hidden_ST, -math.inf), sinks_H)

    def rotate(self, q_BSHW: Tensor, k_BSKW: Tensor, positions_BS: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Queries and keys at their positions, which count from 0 unless they are given, if positions are rotary."""
        if self.theta is None:
            return q_BSHW, k_BSKW
        theta, scaling = self.theta, self.scaling
        q_BSHW, k_BSKW = (apply_rope(x, theta, scaling, positions_BS) for x in (q_BSHW, k_BSKW))
        return q_BSHW, k_BSKW

    def _attend(
        self,
        q_BSHW: Tensor,
        k_BSKW: Tensor,
        v_BSKW: Tensor,
        mask: Tensor | None,
        sinks_H: Tensor | None,
        causal: bool = True,
    ) -> Tensor:
        """By a fused kernel if it computes this; without a mask all earlier positions are seen."""
        q, k, v = (x.transpose(1, 2) for x in (q_BSHW, k_BSKW, v_BSKW))
        if self.by_scores:
            assert mask is not None
            scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
            attended = attend_by_scores(q, k, v, mask, scale=scale, softcap=self.softcap, sinks_H=sinks_H)
        else:
            attended = F.scaled_dot_product_attention(
                q,
                k,
                v,
                mask,
                is_causal=causal and mask is None,
                scale=self.scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        return attended.transpose(1, 2)


class Sinks(nn.Module):
    """A learned logit per head."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads))

    def forward(self) -> Tensor:
        """The logits; those of this rank's heads if heads are sharded."""
        return self.weight


class Attention(nn.Module):
    """Grouped-query causal self-attention.

    An attention of another kind has the same three methods: what it keeps of earlier positions is its own matter.
    """

    def __init__(self, model: Model, layer: int = 0) -> None:
        super().__init__()
        self.head = model.head_dim
        bias = model.bias or model.qkv_bias
        self.q = nn.Linear(model.width, model.heads * model.head_dim, bias=bias)
        self.k = nn.Linear(model.width, model.num_kv_heads * model.head_dim, bias=bias)
        self.v = nn.Linear(model.width, model.num_kv_heads * model.head_dim, bias=bias)
        self.q_norm = build_norm(model, model.head_dim) if model.qk_norm else None
        self.k_norm = build_norm(model, model.head_dim) if model.qk_norm else None
        self.sinks = Sinks(model.heads) if model.sinks else None
        self.core = CoreAttention.of_layer(model, layer)
        self.o = nn.Linear(model.heads * model.head_dim, model.width, bias=model.bias)

    def forward(self, x_BSD: Tensor, documents: Documents | None = None) -> Tensor:
        """Mix information between positions."""
        return self.o(self.core(*self._project(x_BSD), documents, *self._sinks()).flatten(2))

    def new_cache(self, sequences: int, length: int) -> KVCache:
        """An empty cache for as many sequences of at most `length` positions."""
        shape = (sequences, length, self.k.out_features // self.head, self.head)
        return KVCache(shape, self.k.weight.dtype, self.k.weight.device)

    def extend(self, x_BSD: Tensor, cache: KVCache) -> Tensor:
        """As `forward` at the positions after those in the cache, to which these are added."""
        return self.o(self.core.extend(*self._project(x_BSD), cache, *self._sinks()).flatten(2))

    def _sinks(self) -> tuple[Tensor, ...]:
        """What the core takes in addition, if there are sinks: the seam has one argument less without them."""
        return () if self.sinks is None else (self.sinks(),)

    def _project(self, x_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (project(x_BSD).unflatten(-1, (-1, self.head)) for project in (self.q, self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v
