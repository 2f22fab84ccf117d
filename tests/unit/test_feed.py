"""Every rank reads its part of the batch, and together they read all of it once."""

import numpy as np
import pytest
import torch
from made_meshes import place_of
from numpy.typing import NDArray

from danlu.framework.batch_loader import BatchLoader
from danlu.spec.recipe import BatchConfig

BATCH = BatchConfig(sequences=8, length=6)
VOCABULARY = 100_000


class Numbered:
    """Samples that say who they are: token t of sample i is 100 · i + t."""

    def read_samples(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return indices[:, None] * 100 + np.arange(BATCH.length + 1)


def rows(cursor: int) -> torch.Tensor:
    return torch.arange(cursor, cursor + 8)[:, None] * 100 + torch.arange(7)


def test_one_rank_reads_the_batch_and_targets_are_one_place_further() -> None:
    batch = BatchLoader(Numbered(), BATCH, VOCABULARY, place_of(0)).at(24)
    tokens, targets = batch.tokens, batch.targets
    assert torch.equal(tokens, rows(24)[:, :-1])
    assert torch.equal(targets, rows(24)[:, 1:])
    assert tokens.dtype == targets.dtype == torch.int64
    assert tokens.is_contiguous() and targets.is_contiguous()


def test_data_ranks_in_order_make_up_the_batch() -> None:
    pieces = [
        BatchLoader(Numbered(), BATCH, VOCABULARY, place_of(rank, replicate=2, shard=2)).at(16) for rank in range(4)
    ]
    assert torch.equal(torch.cat([piece.tokens for piece in pieces]), rows(16)[:, :-1])
    assert torch.equal(torch.cat([piece.targets for piece in pieces]), rows(16)[:, 1:])


def test_context_ranks_in_order_make_up_every_sequence() -> None:
    pieces = [BatchLoader(Numbered(), BATCH, VOCABULARY, place_of(rank, cp=3)).at(0) for rank in range(3)]
    assert torch.equal(torch.cat([piece.tokens for piece in pieces], dim=1), rows(0)[:, :-1])
    assert torch.equal(torch.cat([piece.targets for piece in pieces], dim=1), rows(0)[:, 1:])
    end, start = pieces[0].targets[0, -1], pieces[1].tokens[0, 0]
    assert end == start, "the last target of a part is the first token of the next"


def test_ranks_that_share_a_matrix_or_a_pipeline_read_the_same() -> None:
    seen = [
        BatchLoader(Numbered(), BATCH, VOCABULARY, place_of(rank, pp=2, shard=2, tp=2)).at(8).tokens
        for rank in range(8)
    ]
    for rank, other in ((0, 1), (2, 3), (0, 4), (2, 6), (1, 5)):
        assert torch.equal(seen[rank], seen[other])
    assert not torch.equal(seen[0], seen[2])


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="`sequences` must divide by the 3 data ranks, but is 8"):
        BatchLoader(Numbered(), BATCH, VOCABULARY, place_of(0, shard=3)).at(0)


def test_a_token_beyond_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="token ids must be below 700, but a sample of the batch at 0 has id 706"):
        BatchLoader(Numbered(), BATCH, 700, place_of(0)).at(0)
