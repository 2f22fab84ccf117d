"""The decoder transformer, written for one device. Parallelism is data beside it, in `parallelism.py`.

Shapes: B sequences, S tokens of each, D width of the hidden states.
"""

from collections.abc import Iterable, Iterator
from typing import cast

import torch
from torch import Tensor, nn

from danlu.framework.decoder.attention import Documents
from danlu.framework.decoder.block import Block
from danlu.framework.decoder.mtp import MtpLosses, MtpModule
from danlu.framework.decoder.norm import build_norm
from danlu.parallel.loss import linear_cross_entropy_sum
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

    def forward(self, tokens_BS: Tensor, positions: Tensor | None = None, tokens_alone: bool = False) -> Tensor:
        """Look up every token, and its position if positions are learned; `positions` are those of full sequences."""
        x_BSD = self._look_up(tokens_BS)
        if self.position is None or tokens_alone:
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


class EmbedCopy(Embed):
    """The token embedding of the first pipeline stage, on the last one, where multi-token prediction reads it.

    The first stage owns the parameter: it sends its values here before a step, and gets the gradient after it
    (`parallel.embedding_copy`).
    """

    def __init__(self, model: Model) -> None:
        super().__init__(model.model_copy(update={"position": "rope"}))


class Score(nn.Linear):
    """The output projection; with targets, the sum of their cross-entropy, from some of the logits at a time."""

    chunks = 1
    """Parts of the vocabulary whose logits are computed one after another; 1: targets are not taken."""

    def forward(self, x_BSD: Tensor, targets_BS: Tensor | None = None) -> Tensor:
        """Logits, or a loss."""
        if targets_BS is None:
            return super().forward(x_BSD)
        return linear_cross_entropy_sum(x_BSD, self.weight, targets_BS, None, self.chunks)


class Head(nn.Module):
    """The final norm and the output projection, whose logits may be capped."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.norm = build_norm(model)
        self.score = Score(model.width, model.vocabulary, bias=False)
        self.softcap = model.logit_softcap

    def forward(
        self, x_BSD: Tensor, normed: bool = False, with_normed: bool = False, targets_BS: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Logits over the vocabulary at every position; `with_normed`, also the hidden states after the norm.

        With targets, the sum of their cross-entropy instead.
        """
        if not normed:
            x_BSD = self.norm(x_BSD)
        if targets_BS is not None:
            loss: Tensor = self.score(x_BSD, targets_BS)
            return loss
        logits_BSV: Tensor = self.score(x_BSD)
        if self.softcap is not None:
            logits_BSV = self.softcap * torch.tanh(logits_BSV / self.softcap)
        return (logits_BSV, x_BSD) if with_normed else logits_BSV


class Decoder(nn.Module):
    """A decoder, or the consecutive layers thereof of one pipeline stage.

    Parameters have their global names (`blocks.7.…`) whatever the stage, so that checkpoints do
    not depend on the layout.
    """

    def __init__(
        self, model: Model, layers: Iterable[int] | None = None, first: bool = True, last: bool = True
    ) -> None:
        super().__init__()
        self.first, self.model_layers = first, model.layers
        self.embed = Embed(model) if first else EmbedCopy(model) if last and model.mtp else None
        self.blocks = nn.ModuleDict(
            {str(layer): Block(model, layer) for layer in (range(model.layers) if layers is None else layers)}
        )
        self.head = Head(model) if last else None
        self.window, self.masks_all = model.window, model.materializes_scores
        self.sequence_ranks = 1
        """Ranks over which hidden states are sharded by sequence: of `cp` and `tp`."""
        self.finds_documents = True
        """Find what every token sees for all layers; off where attention does so itself, for its part of a sequence."""
        self.mtp: nn.ModuleList | None = None
        self.mtp_losses: MtpLosses | None = None
        if model.mtp and last:
            self.mtp = nn.ModuleList(MtpModule(model) for _ in range(model.mtp.depth))
            self.mtp_losses = MtpLosses(model.mtp)
        self.tied = model.tied
        self.tie_weights()

    def tie_weights(self) -> None:
        """Tie the head to the embedding, if the model is tied; call it again after parameters were replaced."""
        if self.tied and self.embed is not None and self.head is not None:
            self.head.score.weight = self.embed.token.weight

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        tokens_ahead: Tensor | None = None,
        targets_ahead: Tensor | None = None,
        targets: Tensor | None = None,
    ) -> Tensor:
        """Tokens (or hidden states of the previous stage) to logits (or hidden states for the next stage).

        With `positions`, of every token of the full sequences in its document, documents do not see each other. With
        tokens and targets ahead (`TokensAhead`), the modules of multi-token prediction add their losses. With `targets`
        the head returns the sum of their cross-entropy instead of logits.
        """
        if self.first:
            assert self.embed is not None
            x = self.embed(x, positions)
        local, documents = self._visible(x, positions)
        for block in self.blocks.values():
            x = block(x, documents if block.window is None else local)
        if self.head is None:
            return x
        if tokens_ahead is None or targets_ahead is None or self.mtp_losses is None:
            return self.head(x, targets_BS=targets)
        logits, hidden = self.head(x, with_normed=True)
        ahead = self._logits_ahead(hidden, tokens_ahead, local, documents)
        return self.mtp_losses.inject(logits, ahead, targets_ahead)

    def _logits_ahead(
        self, x_BSD: Tensor, tokens_BKS: Tensor, local: Documents | None, documents: Documents | None
    ) -> Iterator[Tensor]:
        """Logits of every module of multi-token prediction, one after another."""
        assert self.embed is not None
        assert self.head is not None
        assert self.mtp is not None
        for number, module in enumerate(self.mtp):
            embedded_BSD = self.embed(tokens_BKS[:, number], tokens_alone=True)
            window = cast(MtpModule, module).block.window
            x_BSD = module(x_BSD, embedded_BSD, documents if window is None else local)
            yield self.head(x_BSD, normed=True)

    def _visible(self, x_BSD: Tensor, positions: Tensor | None) -> tuple[Documents | None, Documents | None]:
        """What layers with a window see, and the others."""
        length = x_BSD.shape[1] * self.sequence_ranks

        def documents(window: int | None) -> Documents | None:
            if positions is not None and not self.finds_documents:
                return Documents(positions)
            if positions is None and window is None and not self.masks_all:
                return None
            if positions is None:
                found = Documents.causal(length, x_BSD.device, window)
            else:
                found = Documents.from_positions(positions, window)
            return found.with_mask(x_BSD.dtype) if self.masks_all else found

        if self.window is None or self.window >= length:
            return (everything := documents(None)), everything
        all_local = all(block.window is not None for block in self.blocks.values())
        return documents(self.window), None if all_local else documents(None)
