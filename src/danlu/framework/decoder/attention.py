"""Attention of the decoder, over full sequences or over each document in them.

Shapes: B sequences, S tokens of each, D width of the hidden states, H heads, K key-value heads, W width of a head.
Where heads or sequence are sharded, the same code runs on the shard.
"""

import math
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from danlu.framework.decoder.kv_cache import KVCache
from danlu.framework.decoder.rope import apply_rope
from danlu.spec.model import Model, RopeScaling


class Documents(NamedTuple):
    """Several documents in a sequence, each of which attention sees alone."""

    positions_BS: Tensor
    """Of every token in its document, over the full sequences."""
    mask_B1SS: Tensor | None = None
    """Added to the scores: 0 for earlier tokens of the document, else -inf; None if attention makes its own."""

    @classmethod
    def from_positions(cls, positions_BS: Tensor, dtype: torch.dtype) -> Self:
        """A mask in the dtype of queries and keys, which all layers share: a boolean one would be converted by each."""
        key_S = torch.arange(positions_BS.shape[1], device=positions_BS.device)
        first_BS = key_S - positions_BS
        hidden_BSS = (key_S < first_BS[..., None]) | (key_S > key_S[:, None])
        mask_BSS = torch.zeros(hidden_BSS.shape, dtype=dtype, device=positions_BS.device)
        return cls(positions_BS, mask_BSS.masked_fill_(hidden_BSS, -math.inf)[:, None])


class CoreAttention(nn.Module):
    """Causal attention over full sequences, or over each document in them; context parallelism wraps it."""

    def __init__(self, theta: float | None, scaling: RopeScaling | None = None) -> None:
        super().__init__()
        self.theta = theta
        self.scaling = scaling

    def forward(self, q_BSHW: Tensor, k_BSKW: Tensor, v_BSKW: Tensor, documents: Documents | None = None) -> Tensor:
        """Attend; the result has the shape of `q_BSHW`."""
        positions_BS, mask = (None, None) if documents is None else documents
        q_BSHW, k_BSKW = self.rotate(q_BSHW, k_BSKW, positions_BS)
        q, k, v = (x.transpose(1, 2) for x in (q_BSHW, k_BSKW, v_BSKW))
        grouped = q.shape[1] != k.shape[1]
        attended = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=grouped)
        return attended.transpose(1, 2)

    def rotate(self, q_BSHW: Tensor, k_BSKW: Tensor, positions_BS: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Queries and keys at their positions, which count from 0 unless they are given, if positions are rotary."""
        if self.theta is None:
            return q_BSHW, k_BSKW
        q_BSHW, k_BSKW = (apply_rope(x, self.theta, self.scaling, positions_BS) for x in (q_BSHW, k_BSKW))
        return q_BSHW, k_BSKW

    def extend(self, q_BSHW: Tensor, k_BSKW: Tensor, v_BSKW: Tensor, cache: KVCache) -> Tensor:
        """As `forward` at the positions after those in the cache, which are attended to as well; adds these to it."""
        first, new = cache.length, q_BSHW.shape[1]
        q_BSHW, k_BSKW = self.rotate(q_BSHW, k_BSKW, torch.arange(first, first + new, device=q_BSHW.device)[None])
        k_BSKW, v_BSKW = cache.append(k_BSKW, v_BSKW)
        q, k, v = (x.transpose(1, 2) for x in (q_BSHW, k_BSKW, v_BSKW))
        grouped = q.shape[1] != k.shape[1]
        if first == 0 or new == 1:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=first == 0, enable_gqa=grouped)
        else:  # the i-th new position sees everything cached, and the new ones up to itself
            seen = torch.ones(new, first + new, dtype=torch.bool, device=q.device).tril(first)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=grouped)
        return y.transpose(1, 2)


class Attention(nn.Module):
    """Grouped-query causal self-attention.

    An attention of another kind has the same three methods: what it keeps of earlier positions is its own matter.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.head = model.head_dim
        bias = model.bias or model.qkv_bias
        self.q = nn.Linear(model.width, model.heads * model.head_dim, bias=bias)
        self.k = nn.Linear(model.width, model.num_kv_heads * model.head_dim, bias=bias)
        self.v = nn.Linear(model.width, model.num_kv_heads * model.head_dim, bias=bias)
        self.q_norm = nn.RMSNorm(model.head_dim, eps=model.norm_epsilon) if model.qk_norm else None
        self.k_norm = nn.RMSNorm(model.head_dim, eps=model.norm_epsilon) if model.qk_norm else None
        self.core = CoreAttention(model.rope_theta if model.position == "rope" else None, model.rope_scaling)
        self.o = nn.Linear(model.heads * model.head_dim, model.width, bias=model.bias)

    def forward(self, x_BSD: Tensor, documents: Documents | None = None) -> Tensor:
        """Mix information between positions."""
        return self.o(self.core(*self._project(x_BSD), documents).flatten(2))

    def new_cache(self, sequences: int, length: int) -> KVCache:
        """An empty cache for as many sequences of at most `length` positions."""
        shape = (sequences, length, self.k.out_features // self.head, self.head)
        return KVCache(shape, self.k.weight.dtype, self.k.weight.device)

    def extend(self, x_BSD: Tensor, cache: KVCache) -> Tensor:
        """As `forward` at the positions after those in the cache, to which these are added."""
        return self.o(self.core.extend(*self._project(x_BSD), cache).flatten(2))

    def _project(self, x_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (project(x_BSD).unflatten(-1, (-1, self.head)) for project in (self.q, self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v
