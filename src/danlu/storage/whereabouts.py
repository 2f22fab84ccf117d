"""Which documents the samples of a step hold: from a cursor back to the text."""

from collections.abc import Callable
from typing import Any

from danlu.spec.description import Description, Many
from danlu.storage.order import Ints
from danlu.storage.tokens import TokenShards
from danlu.storage.training_data import TrainingData

_TOKENS_SHOWN = 64
Decode = Callable[[Any], str]


class DocumentPart(Description):
    """What a sample holds of one document."""

    document: int | None
    """Number of the document in its data set; None where an older data set does not say."""
    tokens: tuple[int, int]
    """First token and the one behind the last, counted over all shards of the data set."""
    text: str
    """How it begins; empty where the tokenizer is not at hand."""


class ShardPart(Description):
    """Where in a file tokens of a sample lie."""

    file: str
    bytes: tuple[int, int]


class LocatedSample(Description):
    """One sample of a run, found."""

    index: int
    """Number of the sample in the run."""
    source: int
    where: str
    """Folder or address of its data set."""
    epoch: int
    sample: int
    """Number of the sample in the data set."""
    shards: Many[ShardPart]
    documents: Many[DocumentPart]


def locate(data: TrainingData, indices: Ints, decode: Decode | None) -> list[LocatedSample]:
    """Find the samples at these indices of a run."""
    return [
        _located(data.sources[place.source], data, index, place.source, place.place, place.number, decode)
        for index, place in zip(indices.tolist(), data.places(indices), strict=True)
    ]


def _located(
    shards: TokenShards, data: TrainingData, index: int, source: int, place: int, number: int, decode: Decode | None
) -> LocatedSample:
    start, count = number * data.length, data.length + 1
    return LocatedSample(
        index=index,
        source=source,
        where=shards.where,
        epoch=data.epoch(source, place),
        sample=number,
        shards=tuple(
            ShardPart(file=shards.index.shards[span.shard].file, bytes=(span.offset, span.offset + span.length))
            for span in shards.spans(start, count)
        ),
        documents=tuple(
            DocumentPart(
                document=part.document,
                tokens=(part.start, part.start + part.tokens),
                text=decode(shards.read(part.start, min(part.tokens, _TOKENS_SHOWN))) if decode else "",
            )
            for part in shards.parts(start, count)
        ),
    )
