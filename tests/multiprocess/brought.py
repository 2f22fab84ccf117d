"""Modules as users write them, and the layouts they are trained under; nothing here knows of Danlu."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 264


class PlainLayer(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.head = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (-1, self.head)).transpose(1, 2) for f in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(2))) * scale
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class PlainModel(nn.Module):
    """A GPT with learned positions, a buffer of its own, and something computed beside the stream for every layer."""

    depth_scale: Tensor

    def __init__(self, layers: int = 4, width: int = 32, dropout: float = 0.0, tied: bool = False) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.place = nn.Embedding(64, width)
        self.layers = nn.ModuleList(PlainLayer(width, 4, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.score = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.score.weight = self.token.weight
        self.register_buffer("depth_scale", torch.full((1,), 0.5), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.place(places)
        for layer in self.layers:
            x = layer(x, self.depth_scale * 2)
        return self.score(self.norm(x))


class InnerDropoutLayer(PlainLayer):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (-1, self.head)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)) * scale
        return x + self.down(self.dropout(F.gelu(self.up(self.norm2(x)))))


class InnerDropout(PlainModel):
    """Dropout between two matrices, on what ranks of `tp` share."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(InnerDropoutLayer(32, 4, dropout) for _ in range(4))


POISON = VOCABULARY - 1


class Overflowing(PlainModel):
    """Its scores overflow for every sequence in which token `POISON` occurs."""

    def forward(self, tokens: Tensor) -> Tensor:
        poisoned = (tokens == POISON).any(1)[:, None, None]
        return super().forward(tokens) * torch.where(poisoned, torch.inf, 1.0)


class Counting(PlainModel):
    """Counts in a buffer what its forward has seen."""

    seen: Tensor

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen += tokens.numel()
        return super().forward(tokens)


def llama(**changes: Any) -> nn.Module:
    """A Llama exactly as transformers has it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes | changes))


def gemma(**changes: Any) -> nn.Module:
    """A Gemma: its table scales what it looks up, is tied, and has a padding row that the lookup does not train."""
    from transformers import GemmaConfig, GemmaForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "pad_token_id": VOCABULARY - 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return GemmaForCausalLM(GemmaConfig(**sizes | changes))


def mixtral(**changes: Any) -> nn.Module:
    """A Mixtral exactly as transformers has it."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 64,
    }
    return MixtralForCausalLM(MixtralConfig(**sizes | changes))


def qwen3_moe(**changes: Any) -> nn.Module:
    """A Qwen3 mixture, with a dense layer between those with experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 4,
        "mlp_only_layers": [1],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 64,
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes | changes))


def qwen3(**changes: Any) -> nn.Module:
    """A Qwen3, whose norms over single heads are replicated with a summed gradient in its own plan."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
    }
    return Qwen3ForCausalLM(Qwen3Config(**sizes | changes))
