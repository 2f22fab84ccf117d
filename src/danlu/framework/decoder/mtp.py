"""Multi-token prediction: modules after the last layer, each of which predicts a token further ahead (DeepSeek-V3).

Shapes: B sequences, S tokens of each, D width of the hidden states, V vocabulary, K modules.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from danlu.framework.decoder.attention import Documents
from danlu.framework.decoder.block import Block
from danlu.framework.decoder.moe import AuxLossInjector
from danlu.framework.decoder.norm import build_norm
from danlu.parallel.loss import cross_entropy_sum
from danlu.spec.model import Model, Mtp


class MtpModule(nn.Module):
    """One module: joins what the module before it knew of a position with the next token, and thinks one layer more."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.embed_norm = build_norm(model)
        self.hidden_norm = build_norm(model)
        self.project = nn.Linear(2 * model.width, model.width, bias=False)
        self.block = Block(model, model.layers - 1)
        self.norm = build_norm(model)

    def forward(self, hidden_BSD: Tensor, embedded_BSD: Tensor, documents: Documents | None = None) -> Tensor:
        """Hidden states for the shared output matrix, from those of one token less and that token's embedding."""
        joined = torch.cat((self.embed_norm(embedded_BSD), self.hidden_norm(hidden_BSD)), dim=-1)
        return self.norm(self.block(self.project(joined), documents))


class MtpLosses:
    """The losses of a step's microbatches by module."""

    def __init__(self, mtp: Mtp) -> None:
        self.weight, self.depth = mtp.weight / mtp.depth, mtp.depth
        self.group: ProcessGroup | None = None
        """Ranks that the vocabulary of the logits is sharded over."""
        self.counted_K: Tensor
        """Targets of the global batch that count, by module; set before every step."""
        self.loss_scale = 1.0
        """What gradients are multiplied by, where the loss is scaled for fp16."""
        self._totals: dict[int, Tensor] = {}

    def inject(self, logits_BSV: Tensor, ahead: Iterable[Tensor], targets_BKS: Tensor) -> Tensor:
        """Return the main `logits_BSV`, through which the gradient of the losses of the logits `ahead` flows.

        It goes in there because that is where a pipeline's schedule begins its backward pass.
        """
        total = logits_BSV.new_zeros((), dtype=torch.float32)
        for module, logits in enumerate(ahead):
            loss = cross_entropy_sum(logits, targets_BKS[:, module], self.group)
            loss = loss / self.counted_K[module].clamp(min=1)
            self._totals[module] = self._totals.get(module, torch.zeros_like(loss)) + loss.detach()
            total = total + loss * (self.weight * self.loss_scale)
        return AuxLossInjector.apply(logits_BSV, total)

    def pop(self, device: torch.device) -> Tensor:
        """This rank's share of every module's mean loss since the last call; zero on ranks without the last stage."""
        zero = torch.zeros((), device=device)
        totals_K = torch.stack([self._totals.get(module, zero) for module in range(self.depth)])
        self._totals.clear()
        return totals_K
