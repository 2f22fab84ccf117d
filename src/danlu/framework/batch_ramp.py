"""A batch that grows over the run, microbatch by microbatch."""

from collections.abc import Callable, Iterable

from torch import Tensor, nn

from danlu.framework.decoder.moe import Router
from danlu.framework.layer_seeds import LayerSeeds
from danlu.parallel.batch import Batch
from danlu.spec.plan import Plan
from danlu.spec.recipe import BatchConfig

Passes = Callable[[Batch, Tensor | None], Tensor]
"""Forward and backward of one batch; the `ForwardBackward` of a run."""


class RampedPasses:
    """Forward and backward of batches of any size of the ramp: so many microbatches of the full batch's size.

    Without a pipeline, whose messages have one size, a batch may also be a single smaller one.

    The rows of a batch say how large it is, so that a run that resumes needs no state for this.
    """

    def __init__(
        self,
        batch: BatchConfig,
        plan: Plan,
        make_passes: Callable[[int, int], Passes],
        stage_modules: Iterable[nn.Module],
        layer_seeds: Iterable[LayerSeeds],
    ) -> None:
        """`make_passes` gets the microbatches of a rank, and the tokens of the global batch."""
        self.length, self.data_ranks = batch.length, plan.degrees.dp
        self.rows = batch.sequences // plan.degrees.dp // plan.microbatches
        self._make = make_passes
        self._routers = [each for module in stage_modules for each in module.modules() if isinstance(each, Router)]
        self._layer_seeds = list(layer_seeds)
        self._batch_rows = 0
        self._passes: Passes | None = None

    def __call__(self, batch: Batch, counted: Tensor | None = None) -> Tensor:
        """Forward and backward of all microbatches; the sum of their losses."""
        if len(batch.tokens) != self._batch_rows:
            self._begin_stage(len(batch.tokens))
        assert self._passes is not None
        return self._passes(batch, counted)

    def _begin_stage(self, rows: int) -> None:
        sequences, microbatches = rows * self.data_ranks, max(1, rows // self.rows)
        self._batch_rows = rows
        self._passes = self._make(microbatches, sequences * self.length)
        for router in self._routers:
            router.sequences_per_step = sequences
        for seeds in self._layer_seeds:
            seeds.microbatches = microbatches
