"""One rank's rows and columns of the global batch, prefetched while earlier steps run."""

import threading
from concurrent.futures import Future
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from danlu.chips.accelerator import copy_to_device
from danlu.comm.mesh import ParallelMesh
from danlu.parallel.batch import IGNORE_INDEX, Batch
from danlu.parallel.sequence_shard import sequence_shard
from danlu.spec.recipe import BatchConfig
from danlu.storage.data.shuffle import IntArray
from danlu.storage.data.token_marks import unpack_marks
from danlu.storage.data.token_shards import rank_sample_indices

PREFETCH_BATCHES = 2
"""Batches read ahead: one is ready while the next is being read."""


class SampleSource(Protocol):
    """Training samples by index; the order is a pure function of the index, so a cursor is one integer."""

    def read_samples(self, indices: IntArray) -> IntArray:
        """Samples as rows of `length + 1` tokens; called from several threads."""
        ...


@runtime_checkable
class MarkedSampleSource(SampleSource, Protocol):
    """Samples whose tokens are marked: which of them end a document, and which of them the loss counts."""

    def read_words(self, indices: IntArray) -> IntArray:
        """Samples as rows of `length + 1` words, each a token with its marks (`storage.data.token_marks`)."""
        ...


class BatchSource(Protocol):
    """This rank's share of every batch; `BatchLoader` implements it."""

    def at(self, cursor: int) -> Batch:
        """The batch that starts at sample `cursor`."""
        ...


class BatchLoader:
    """Reads this rank's rows of every batch, and this rank's positions of every row, onto its device."""

    def __init__(
        self,
        samples: SampleSource,
        batch: BatchConfig,
        vocabulary: int,
        mesh: ParallelMesh,
        prefetch: int = PREFETCH_BATCHES,
        *,
        document_mask: bool = False,
        loss_mask: bool = False,
    ) -> None:
        """`prefetch` batches are read in the background; an error there is raised when its batch is requested.

        With `loss_mask` the loss counts what the marks of the samples say; with `document_mask` also no prediction of
        a document's first token, and batches have the positions of tokens in their documents.
        """
        self.samples, self.document_mask = samples, document_mask
        self.marked: MarkedSampleSource | None = None
        if document_mask or loss_mask:
            if not isinstance(samples, MarkedSampleSource):
                raise TypeError(f"a mask needs samples with marks, but {type(samples).__name__} has no `read_words`")
            self.marked = samples
        self.vocabulary = vocabulary
        self.device = mesh.device
        self.batch = batch
        self.data_shard = (mesh.dp_rank, mesh.plan.degrees.dp)
        self.columns = sequence_shard(mesh).ranges(batch.length)
        self.prefetch = prefetch
        self._pending: dict[int, Future[Batch]] = {}

    def at(self, cursor: int) -> Batch:
        """The batch that starts at sample `cursor`; its targets are its tokens shifted by one."""
        pending = self._pending.pop(cursor, None)
        batch = self._load(cursor) if pending is None else pending.result()
        wanted = [cursor := cursor + self.batch.sequences_at(cursor) for _ in range(self.prefetch)]
        self._pending = {
            start: self._pending[start] if start in self._pending else self._begin(start) for start in wanted
        }
        return batch

    def drop_prefetched(self) -> None:
        """Drop prefetched batches, because the order of the samples is about to change."""
        for pending in self._pending.values():
            pending.exception()  # waits; an error here will be raised again when the batch is read
        self._pending.clear()

    def _load(self, cursor: int) -> Batch:
        """Read a batch and begin its copy to the device."""
        indices = rank_sample_indices(cursor, self.batch.sequences_at(cursor), *self.data_shard)
        if self.marked is None:
            tokens = self.samples.read_samples(indices)
            return self._batch(cursor, tokens, tokens[:, 1:])
        tokens, ends, counted = unpack_marks(self.marked.read_words(indices))
        excluded = ~counted[:, 1:]
        if self.document_mask:
            excluded |= ends[:, :-1]  # the last token of a document does not predict the next document
        targets = np.where(excluded, IGNORE_INDEX, tokens[:, 1:])
        return self._batch(cursor, tokens, targets, document_positions(ends[:, :-1]) if self.document_mask else None)

    def _batch(self, cursor: int, tokens: IntArray, targets: IntArray, positions: IntArray | None = None) -> Batch:
        """This rank's columns, on its device; positions of all columns."""
        if (highest := int(tokens.max())) >= self.vocabulary:  # a sharded embedding would return zeros for it
            raise ValueError(
                f"token ids must be below {self.vocabulary}, but a sample of the batch at {cursor} has id {highest}"
            )
        targets = self._held(targets)
        return Batch(
            self._on_device(self._held(tokens)),
            self._on_device(targets),
            None if positions is None else self._on_device(positions),
            None if self.marked is None else int((targets != IGNORE_INDEX).sum()),
        )

    def _held(self, array: IntArray) -> IntArray:
        """This rank's columns."""
        pieces = [array[:, piece] for piece in self.columns]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=1)

    def _on_device(self, array: IntArray) -> torch.Tensor:
        return copy_to_device(torch.from_numpy(np.ascontiguousarray(array)), self.device)

    def _begin(self, cursor: int) -> Future[Batch]:
        """Load a batch in a daemon thread, which does not delay the end of the process."""
        pending: Future[Batch] = Future()

        def load() -> None:
            try:
                pending.set_result(self._load(cursor))
            except BaseException as error:
                pending.set_exception(error)

        threading.Thread(target=load, name=f"batch {cursor}", daemon=True).start()
        return pending


def document_positions(ends: NDArray[np.bool_]) -> IntArray:
    """Every token's position in its document, by rows: 0 after a token that `ends` one, and in the first column."""
    columns = np.arange(ends.shape[1])
    starts = np.zeros(ends.shape, dtype=np.int64)
    starts[:, 1:] = np.where(ends[:, :-1], columns[1:], 0)
    positions: IntArray = columns - np.maximum.accumulate(starts, axis=1)
    return positions
