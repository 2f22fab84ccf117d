"""One layer of the decoder: attention and a feed-forward network or experts, each after its norm.

Shapes: B sequences, S tokens of each, D width of the hidden states.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from danlu.framework.decoder.attention import Attention, Documents
from danlu.framework.decoder.kv_cache import KVCache
from danlu.framework.decoder.latent_attention import LatentAttention
from danlu.framework.decoder.moe import MoeLayer
from danlu.framework.decoder.norm import build_norm
from danlu.ops.operators.gated import gated_product
from danlu.spec.model import Model


class Mlp(nn.Module):
    """The feed-forward network: SwiGLU, GEGLU or GELU."""

    def __init__(self, width: int, hidden: int, activation: str, bias: bool) -> None:
        super().__init__()
        self.activation = activation
        self.gate = nn.Linear(width, hidden, bias=bias) if activation != "gelu" else None
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Transform every position independently."""
        if self.gate is None:
            return self.down(F.gelu(self.up(x_BSD)))
        return self.down(gated_product(self.gate(x_BSD), self.up(x_BSD), self.activation))


class Block(nn.Module):
    """One pre-norm layer: attention, then a feed-forward network or experts."""

    def __init__(self, model: Model, layer: int) -> None:
        super().__init__()
        self.window = model.layer_window(layer)
        self.attention_norm = build_norm(model)
        self.attention = LatentAttention(model) if model.mla else Attention(model, layer)
        self.mlp_norm = build_norm(model)
        self.mlp: nn.Module
        if model.is_moe_layer(layer):
            assert model.moe is not None
            moe = model.moe
            shared = Mlp(model.width, moe.shared * moe.width, model.activation, bias=False) if moe.shared else None
            self.mlp = MoeLayer(model.width, moe, model.activation, shared)
        else:
            self.mlp = Mlp(model.width, model.mlp_dim, model.activation, model.bias)
        self.attention_post_norm = build_norm(model) if model.post_norms else None
        self.mlp_post_norm = build_norm(model) if model.post_norms else None

    def attention_residual(self, x_BSD: Tensor, documents: Documents | None = None) -> Tensor:
        """Attention with its residual connection."""
        # By name: the hooks of tensor parallelism prepare what has a place.
        y_BSD = self.attention(self.attention_norm(x_BSD), documents=documents)
        return x_BSD + (y_BSD if self.attention_post_norm is None else self.attention_post_norm(y_BSD))

    def mlp_residual(self, x_BSD: Tensor) -> Tensor:
        """The feed-forward network or experts with their residual connection."""
        y_BSD = self.mlp(self.mlp_norm(x_BSD))
        return x_BSD + (y_BSD if self.mlp_post_norm is None else self.mlp_post_norm(y_BSD))

    def forward(self, x_BSD: Tensor, documents: Documents | None = None) -> Tensor:
        """Attention and feed-forward network, each with its residual connection."""
        return self.mlp_residual(self.attention_residual(x_BSD, documents))

    def extend(self, x_BSD: Tensor, cache: KVCache) -> Tensor:
        """As `forward` at the positions after those in the cache, to which these are added."""
        y_BSD = self.attention.extend(self.attention_norm(x_BSD), cache)
        return self.mlp_residual(
            x_BSD + (y_BSD if self.attention_post_norm is None else self.attention_post_norm(y_BSD))
        )
