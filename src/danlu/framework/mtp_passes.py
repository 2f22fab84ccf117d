"""Forward and backward of a step with multi-token prediction."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from danlu.comm.mesh import ParallelMesh
from danlu.framework.batch_ramp import Passes
from danlu.framework.decoder.decoder import Decoder
from danlu.framework.decoder.mtp import MtpLosses
from danlu.framework.step_metrics import all_reduce_counts
from danlu.parallel.batch import Batch
from danlu.parallel.embedding_copy import EmbeddingCopy
from danlu.spec.model import Mtp


class MtpPasses:
    """Passes of a batch whose result is a vector: this rank's share of the mean loss, then of every module's."""

    def __init__(
        self,
        passes: Passes,
        mtp: Mtp,
        stage_modules: Iterable[nn.Module],
        mesh: ParallelMesh,
        sequences: int,
        length: int,
    ) -> None:
        """`sequences` of `length` tokens are the global batch."""
        self.passes, self._mesh, self._depth = passes, mesh, mtp.depth
        decoders = [module for module in stage_modules if isinstance(module, Decoder)]
        self._losses: MtpLosses | None = next((each.mtp_losses for each in decoders if each.mtp_losses), None)
        self._copy = _embedding_copy(decoders, mesh)
        # A sequence of n tokens and the next one has n - k targets for the module that predicts k tokens further.
        existing = [max(1, sequences * (length - 1 - module)) for module in range(mtp.depth)]
        self._existing_K = torch.tensor(existing, device=mesh.device)

    def __call__(self, batch: Batch, counted: Tensor | None = None) -> Tensor:
        """Forward and backward of all microbatches."""
        assert batch.ahead is not None, "the batches of a model with multi-token prediction must have tokens ahead"
        counted_K = self._existing_K
        if batch.ahead.counted is not None:
            counted_K = all_reduce_counts(batch.ahead.counted, self._mesh)
        if self._losses is not None:
            self._losses.counted_K = counted_K
        if self._copy is not None:
            self._copy.send_values()
        loss = self.passes(batch, counted)
        if self._copy is not None:
            self._copy.return_gradient()
        if self._losses is None:
            return torch.cat((loss[None], torch.zeros(self._depth, device=loss.device)))
        return torch.cat((loss[None], self._losses.pop(loss.device)))


def _embedding_copy(decoders: Sequence[Decoder], mesh: ParallelMesh) -> EmbeddingCopy | None:
    """What this rank shares of the embedding, if the pipeline's first stage is not its last."""
    plan, group = mesh.plan, mesh.group("pp")
    if group is None:
        return None
    tables = {each.first: each.embed.token.weight for each in decoders if each.embed is not None}
    if not tables:
        return None
    ranks = (plan.rank_of_stage(0), plan.rank_of_stage(plan.num_stages - 1))
    return EmbeddingCopy(tables.get(True), tables.get(False), *ranks, group)
