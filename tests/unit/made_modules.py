"""Modules as users write them, with what one or another axis cannot use."""

from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 16


class Layer(nn.Module):
    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(x))))


class Chain(nn.Module):
    """Nothing unusual: embedding, layers, scores."""

    def __init__(self, layers: int = 4, dropout: float = 0.0, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, 8)
        self.layers = nn.ModuleList(Layer(dropout=dropout) for _ in range(layers))
        self.score = nn.Linear(8, vocabulary)

    def stream(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, tokens: Tensor) -> Any:
        return self.score(self.stream(tokens))


class Tied(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.score.weight = self.token.weight


class LooseParameter(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(8))

    def stream(self, tokens: Tensor) -> Tensor:
        return super().stream(tokens) + self.shift


class SkipsAround(Chain):
    """Every layer is given more than the layer before returned."""

    def stream(self, tokens: Tensor) -> Tensor:
        first = x = self.token(tokens)
        for layer in self.layers:
            x = layer(x + first)
        return x


class SkipsLayer(Chain):
    """Its last layer is never called."""

    def stream(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for layer in self.layers[:-1]:
            x = layer(x)
        return x


class NoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.score = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.score(self.token(tokens))


class Uncountable(Chain):
    """Looks at the values of its tokens."""

    def stream(self, tokens: Tensor) -> Tensor:
        if tokens.max().item() > 10**6:
            raise ValueError("a token that large")
        return super().stream(tokens)


class Pair(Chain):
    """Returns what is neither scores nor has them."""

    def forward(self, tokens: Tensor) -> Any:
        return {"scores": super().forward(tokens)}


class OtherMatrix(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Bilinear(8, 8, VOCABULARY)  # type: ignore[assignment]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.stream(tokens)
        return self.score(x, x)


def not_a_module() -> str:
    return "module"


def mixtral() -> nn.Module:
    """A transformers model whose own plan shares experts in ways that are not known here."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
        max_position_embeddings=32,
    )
    return MixtralForCausalLM(config)
