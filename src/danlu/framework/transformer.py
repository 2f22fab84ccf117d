"""The decoder transformer, written for one device. Parallelism is data beside it, in `decoder_parallelism.py`.

Shapes: B sequences, S tokens of each, D width of the hidden states, H heads, K key-value heads, W width of a head.
Where heads or sequence are sharded, the same code runs on the shard.
"""

import math
from collections.abc import Iterable

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


def apply_rope(x_BSHW: Tensor, theta: float, scaling: RopeScaling | None = None, start: int = 0) -> Tensor:
    """Rotate pairs of features by an angle proportional to the position (rotary embedding), in fp32.

    `start` is the position of the first vector.
    """
    length, width = x_BSHW.shape[1], x_BSHW.shape[3]
    turn_W = rope_frequencies(width, theta, scaling, x_BSHW.device)
    angle_SW = torch.outer(torch.arange(start, start + length, device=x_BSHW.device), turn_W)
    cos, sin = angle_SW.cos()[:, None], angle_SW.sin()[:, None]
    first, second = x_BSHW.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.type_as(x_BSHW)


def _norm(model: Model) -> nn.Module:
    if model.norm == "rms":
        return nn.RMSNorm(model.width, eps=model.norm_epsilon)
    return nn.LayerNorm(model.width, eps=model.norm_epsilon)


class CoreAttention(nn.Module):
    """Causal attention over full sequences; context parallelism wraps it."""

    def __init__(self, theta: float | None, scaling: RopeScaling | None = None) -> None:
        super().__init__()
        self.theta = theta
        self.scaling = scaling

    def forward(self, q_BSHW: Tensor, k_BSKW: Tensor, v_BSKW: Tensor) -> Tensor:
        """Attend; the result has the shape of `q_BSHW`."""
        if self.theta is not None:
            q_BSHW, k_BSKW = (apply_rope(x, self.theta, self.scaling) for x in (q_BSHW, k_BSKW))
        q, k, v = (x.transpose(1, 2) for x in (q_BSHW, k_BSKW, v_BSKW))
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)

    def extend(self, q_BSHW: Tensor, k_BSKW: Tensor, v_BSKW: Tensor, cache: KVCache) -> Tensor:
        """As `forward` at the positions after those in the cache, which are attended to as well; adds these to it."""
        first, new = cache.length, q_BSHW.shape[1]
        if self.theta is not None:
            q_BSHW, k_BSKW = (apply_rope(x, self.theta, self.scaling, first) for x in (q_BSHW, k_BSKW))
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

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Mix information between positions."""
        return self.o(self.core(*self._project(x_BSD)).flatten(2))

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

    def attention_residual(self, x_BSD: Tensor) -> Tensor:
        """Attention with its residual connection."""
        return x_BSD + self.attention(self.attention_norm(x_BSD))

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Attention and feed-forward network, each with its residual connection."""
        x_BSD = self.attention_residual(x_BSD)
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

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Look up every token, and its position if positions are learned."""
        x_BSD = self.token(tokens_BS)
        if self.position is None:
            return x_BSD
        length = tokens_BS.shape[1]
        positions_1S = torch.arange(self.cp_rank * length, (self.cp_rank + 1) * length, device=tokens_BS.device)[None]
        return x_BSD + self.position(positions_1S)

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

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (or hidden states of the previous stage) to logits (or hidden states for the next stage)."""
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)
