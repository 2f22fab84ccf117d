"""The decoder transformer, written for one device. Parallelism is data beside it, in `parallelism.py`.

Shapes: B sequences, S tokens of each, D width of the hidden states.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from danlu.framework.decoder.attention import Documents
from danlu.framework.decoder.block import Block
from danlu.framework.decoder.norm import build_norm
from danlu.parallel.sequence_shard import SequenceShard
from danlu.spec.model import Model


class Embed(nn.Module):
    """Tokens to vectors."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.token = nn.Embedding(model.vocabulary, model.width)
        self.position = nn.Embedding(model.sequence, model.width) if model.position == "learned" else None
        self.scale = model.width**0.5 if model.scaled_embedding else None
        self.shard = SequenceShard()
        """This rank's positions of a sequence."""

    def forward(self, tokens_BS: Tensor, positions: Tensor | None = None) -> Tensor:
        """Look up every token, and its position if positions are learned; `positions` are those of full sequences."""
        x_BSD = self._look_up(tokens_BS)
        if self.position is None:
            return x_BSD
        if positions is None:
            return x_BSD + self.position(self.shard.positions(tokens_BS.shape[1], tokens_BS.device)[None])
        return x_BSD + self.position(self.shard.take(positions))

    def extend(self, tokens_BS: Tensor, first: int) -> Tensor:
        """As `forward` at the positions from `first` on."""
        x_BSD = self._look_up(tokens_BS)
        if self.position is None:
            return x_BSD
        positions_1S = torch.arange(first, first + tokens_BS.shape[1], device=tokens_BS.device)[None]
        return x_BSD + self.position(positions_1S)

    def _look_up(self, tokens_BS: Tensor) -> Tensor:
        x_BSD: Tensor = self.token(tokens_BS)
        return x_BSD if self.scale is None else x_BSD * self.scale


class Head(nn.Module):
    """The final norm and the output projection, whose logits may be capped."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.norm = build_norm(model)
        self.score = nn.Linear(model.width, model.vocabulary, bias=False)
        self.softcap = model.logit_softcap

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Logits over the vocabulary at every position."""
        logits_BSV: Tensor = self.score(self.norm(x_BSD))
        return logits_BSV if self.softcap is None else self.softcap * torch.tanh(logits_BSV / self.softcap)


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
        self.window, self.masks_all = model.window, model.materializes_scores
        self.sequence_ranks = 1
        """Ranks over which hidden states are sharded by sequence: of `cp` and `tp`."""
        self.mask_documents = True
        """Make the mask of documents for all layers; off where attention makes its own, block by block."""
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
        local, documents = self._masks(x, positions)
        for block in self.blocks.values():
            x = block(x, documents if block.window is None else local)
        return x if self.head is None else self.head(x)

    def _masks(self, x_BSD: Tensor, positions: Tensor | None) -> tuple[Documents | None, Documents | None]:
        """What layers with a window see, and the others; one mask for all layers of a kind."""
        length, dtype = x_BSD.shape[1] * self.sequence_ranks, x_BSD.dtype

        def mask(window: int | None) -> Documents | None:
            if positions is not None:
                return (
                    Documents.from_positions(positions, dtype, window) if self.mask_documents else Documents(positions)
                )
            if window is None and not self.masks_all:
                return None
            return Documents.causal(length, dtype, x_BSD.device, window)

        if self.window is None or self.window >= length:
            return (documents := mask(None)), documents
        all_local = all(block.window is not None for block in self.blocks.values())
        return mask(self.window), None if all_local else mask(None)
