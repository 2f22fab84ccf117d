"""Which documents the samples of a step contain: from a cursor back to the text."""

from collections.abc import Callable
from typing import Any

from danlu.spec.description import SpecModel, TupleOf
from danlu.storage.data.mixture_dataset import MixtureDataset
from danlu.storage.data.shuffle import IntArray
from danlu.storage.data.token_shards import TokenShards

_EXCERPT_TOKENS = 64
Decode = Callable[[Any], str]


class DocumentExcerpt(SpecModel):
    """The part of one document in a sample."""

    document: int | None
    """Number of the document in its data set; None if an older data set does not record it."""
    tokens: tuple[int, int]
    """First token and the one after the last, counted over all shards of the data set."""
    text: str
    """How it begins; empty if the tokenizer is not available."""


class ShardByteRange(SpecModel):
    """Byte range of a sample's tokens in a file."""

    file: str
    bytes: tuple[int, int]


class SampleProvenance(SpecModel):
    """Where one sample of a run comes from."""

    index: int
    """Number of the sample in the run."""
    source: int
    where: str
    """Folder or address of its data set."""
    epoch: int
    sample: int
    """Number of the sample in the data set."""
    shards: TupleOf[ShardByteRange]
    documents: TupleOf[DocumentExcerpt]


def trace_samples(data: MixtureDataset, indices: IntArray, decode: Decode | None) -> list[SampleProvenance]:
    """Find the documents of the samples at these indices of a run."""
    return [
        _trace_sample(
            data.sources[found.source], data, index, found.source, found.source_index, found.sample_id, decode
        )
        for index, found in zip(indices.tolist(), data.locate(indices), strict=True)
    ]


def _trace_sample(
    shards: TokenShards,
    data: MixtureDataset,
    index: int,
    source: int,
    source_index: int,
    number: int,
    decode: Decode | None,
) -> SampleProvenance:
    start, count = number * data.length, data.length + 1
    return SampleProvenance(
        index=index,
        source=source,
        where=shards.location,
        epoch=data.epoch_of(source, source_index),
        sample=number,
        shards=tuple(
            ShardByteRange(file=shards.index.shards[span.shard].file, bytes=(span.offset, span.offset + span.length))
            for span in shards.shard_slices(start, count)
        ),
        documents=tuple(
            DocumentExcerpt(
                document=document.document,
                tokens=(document.start, document.start + document.tokens),
                text=decode(shards.read(document.start, min(document.tokens, _EXCERPT_TOKENS))) if decode else "",
            )
            for document in shards.document_spans(start, count)
        ),
    )
