"""The decoder transformer, written for one device. Parallelism is data beside it, in `decoder_parallelism.py`.

Shapes: B sequences, S tokens of each, D width of the hidden states, H heads, K key-value heads, W width of a head.
Where heads or sequence are sharded, the same code runs on the shard.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from danlu.framework.kv_cache import KVCache
from danlu.framework.moe import MoeLayer
from danlu.spec.model import Model, RopeScaling


def rope_frequencies(width: int, theta: float, scaling: RopeScaling | None, device: torch.device) -> Tensor:
    """Rotation of each pair of a head's features from one position to the next, in fp32."""
    pairs = torch.arange(0, width, 2, device=device, dtype=torch.float32)
    # The reciprocal of a power, not a negative power: published models do this, and the last bit differs.
    plain = 1.0 / theta ** (pairs / width)
    if scaling is None:
        return plain
    turns = plain * (scaling.original / math.tau)  # within the original context length
    keep = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
    return plain * keep + plain / scaling.factor * (1 - keep)


def apply_rope(
    x_BSHW: Tensor, theta: float, scaling: RopeScaling | None = None, positions_BS: Tensor | None = None
) -> Tensor:
    """Rotate pairs of features by an angle proportional to the position (rotary embedding), in fp32.

    Positions count from 0 in every sequence unless they are given.
    """
    length, width = x_BSHW.shape[1], x_BSHW.shape[3]
    turn_W = rope_frequencies(width, theta, scaling, x_BSHW.device)
    if positions_BS is None:
        angle = torch.outer(torch.arange(length, device=x_BSHW.device), turn_W)
    else:
        angle = positions_BS[..., None] * turn_W
    cos, sin = angle.cos().unsqueeze(-2), angle.sin().unsqueeze(-2)
    first, second = x_BSHW.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.type_as(x_BSHW)


def _norm(model: Model) -> nn.Module:
    if model.norm == "rms":
        return nn.RMSNorm(model.width, eps=model.norm_epsilon)
    return nn.LayerNorm(model.width, eps=model.norm_epsilon)


class Documents(NamedTuple):
    """Several documents in a sequence, each of which attention sees alone."""

    positions_BS: Tensor
    """Of every token in its document, over the full sequences."""
    mask_B1SS: Tensor
    """Added to the scores: 0 for the earlier tokens of the same document, else -inf."""

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
        if self.theta is not None:
            q_BSHW, k_BSKW = (apply_rope(x, self.theta, self.scaling, positions_BS) for x in (q_BSHW, k_BSKW))
        q, k, v = (x.transpose(1, 2) for x in (q_BSHW, k_BSKW, v_BSKW))
        grouped = q.shape[1] != k.shape[1]
        attended = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=grouped)
        return attended.transpose(1, 2)

    def extend(self, q_BSHW: Tensor, k_BSKW: Tensor, v_BSKW: Tensor, cache: KVCache) -> Tensor:
        """As `forward` at the positions after those in the cache, which are attended to as well; adds these to it."""
        first, new = cache.length, q_BSHW.shape[1]
        if self.theta is not None:
            positions_1S = torch.arange(first, first + new, device=q_BSHW.device)[None]
            q_BSHW, k_BSKW = (apply_rope(x, self.theta, self.scaling, positions_1S) for x in (q_BSHW, k_BSKW))
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


class Mlp(nn.Module):
    """The feed-forward network: SwiGLU or GELU."""

    def __init__(self, width: int, hidden: int, activation: str, bias: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=bias) if activation == "swiglu" else None
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Transform every position independently."""
        if self.gate is None:
            return self.down(F.gelu(self.up(x_BSD)))
        return self.down(F.silu(self.gate(x_BSD)) * self.up(x_BSD))


class Block(nn.Module):
    """One pre-norm layer: attention, then a feed-forward network or experts."""

    def __init__(self, model: Model, layer: int) -> None:
        super().__init__()
        self.attention_norm = _norm(model)
        self.attention = Attention(model)
        self.mlp_norm = _norm(model)
        self.mlp: nn.Module
        if model.is_moe_layer(layer):
            assert model.moe is not None
            moe = model.moe
            shared = Mlp(model.width, moe.shared * moe.width, model.activation, bias=False) if moe.shared else None
            self.mlp = MoeLayer(model.width, moe, model.activation, shared)
        else:
            self.mlp = Mlp(model.width, model.mlp_dim, model.activation, model.bias)

    def attention_residual(self, x_BSD: Tensor, documents: Documents | None = None) -> Tensor:
        """Attention with its residual connection."""
        # By name: the hooks of tensor parallelism prepare what has a place.
        return x_BSD + self.attention(self.attention_norm(x_BSD), documents=documents)

    def forward(self, x_BSD: Tensor, documents: Documents | None = None) -> Tensor:
        """Attention and feed-forward network, each with its residual connection."""
        x_BSD = self.attention_residual(x_BSD, documents)
        return x_BSD + self.mlp(self.mlp_norm(x_BSD))

    def extend(self, x_BSD: Tensor, cache: KVCache) -> Tensor:
        """As `forward` at the positions after those in the cache, to which these are added."""
        x_BSD = x_BSD + self.attention.extend(self.attention_norm(x_BSD), cache)
        return x_BSD + self.mlp(self.mlp_norm(x_BSD))


class Embed(nn.Module):
    """Tokens to vectors."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.token = nn.Embedding(model.vocabulary, model.width)
        self.position = nn.Embedding(model.sequence, model.width) if model.position == "learned" else None
        self.cp_rank = 0
        """Index of this rank's shard of the sequence."""

    def forward(self, tokens_BS: Tensor, positions: Tensor | None = None) -> Tensor:
        """Look up every token, and its position if positions are learned; `positions` are those of full sequences."""
        x_BSD = self.token(tokens_BS)
        if self.position is None:
            return x_BSD
        length = tokens_BS.shape[1]
        first, last = self.cp_rank * length, (self.cp_rank + 1) * length
        if positions is None:
            return x_BSD + self.position(torch.arange(first, last, device=tokens_BS.device)[None])
        return x_BSD + self.position(positions[:, first:last])

    def extend(self, tokens_BS: Tensor, first: int) -> Tensor:
        """As `forward` at the positions from `first` on."""
        x_BSD = self.token(tokens_BS)
        if self.position is None:
            return x_BSD
        positions_1S = torch.arange(first, first + tokens_BS.shape[1], device=tokens_BS.device)[None]
        return x_BSD + self.position(positions_1S)


class Head(nn.Module):
    """The final norm and the output projection."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.norm = _norm(model)
        self.score = nn.Linear(model.width, model.vocabulary, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Logits over the vocabulary at every position."""
        return self.score(self.norm(x_BSD))


class Decoder(nn.Module):
    """A decoder, or the consecutive layers thereof of one pipeline stage.

    Parameters have their global names (`blocks.7.…`) whatever the stage, so that checkpoints do
    not depend on the layout.
    """

    def __init__(
        self, model: Model, layers: Iterable[int] | None = None, first: bool = True, last: bool = True
    ) -> None:
        super().__init__()
        self.embed = Embed(model) if first else None
        self.blocks = nn.ModuleDict(
            {str(layer): Block(model, layer) for layer in (range(model.layers) if layers is None else layers)}
        )
        self.head = Head(model) if last else None
        self.tied = model.tied
        self.tie_weights()

    def tie_weights(self) -> None:
        """Tie the head to the embedding, if the model is tied; call it again after parameters were replaced."""
        if self.tied and self.embed is not None and self.head is not None:
            self.head.score.weight = self.embed.token.weight

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Tokens (or hidden states of the previous stage) to logits (or hidden states for the next stage).

        With `positions`, of every token of the full sequences in its document, documents do not see each other.
        """
        if self.embed is not None:
            x = self.embed(x, positions)
        documents = None if positions is None else Documents.from_positions(positions, x.dtype)
        for block in self.blocks.values():
            x = block(x, documents)
        return x if self.head is None else self.head(x)
