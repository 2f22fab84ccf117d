"""One layer of the decoder: attention and a feed-forward network or experts, each after its norm.

Shapes: B sequences, S tokens of each, D width of the hidden states.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from danlu.framework.decoder.attention import Attention, Documents
from danlu.framework.decoder.kv_cache import KVCache
from danlu.framework.decoder.latent_attention import LatentAttention
from danlu.framework.decoder.moe import MoeLayer
from danlu.spec.model import Model


def build_norm(model: Model) -> nn.Module:
    """The norm before a layer's parts and before the head."""
    if model.norm == "rms":
        return nn.RMSNorm(model.width, eps=model.norm_epsilon)
    return nn.LayerNorm(model.width, eps=model.norm_epsilon)


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
        self.attention_norm = build_norm(model)
        self.attention = LatentAttention(model) if model.mla else Attention(model)
        self.mlp_norm = build_norm(model)
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
