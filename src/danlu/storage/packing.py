"""Documents into one run of tokens, in groups: what every builder writes, wherever it tokenises."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from danlu.storage.index import token_dtype
from danlu.storage.order import Ints
from danlu.storage.source import Document, Documents, Place
from danlu.storage.tokenizer import TokenIds, Tokenizer

_BATCH_CHARACTERS = 4 << 20
_BATCH_DOCUMENTS = 4096


class Packed(NamedTuple):
    """Some documents one after the other."""

    places: Sequence[Place]
    tokens: TokenIds
    """Of all of them, each with its end."""
    ends: Ints
    """Where each is over: int64 [documents]."""


Encode = Callable[[Documents], Iterator[Packed]]
"""All documents packed, in their order. Whoever reads them moves `done` and `left_out` of the documents on."""


def batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Documents in groups large enough to be worth a call, small enough to be held."""
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def pack(batch: Sequence[Document], tokenizer: Tokenizer) -> Packed:
    """Tokenise a group of documents."""
    ids = tokenizer.encode_many([document.text for document in batch])
    end = np.array([tokenizer.end_of_text], dtype=token_dtype(tokenizer.vocabulary))
    tokens = np.concatenate([piece for each in ids for piece in (each, end)])
    if (largest := int(tokens.max())) >= tokenizer.vocabulary:
        raise ValueError(
            f"tokenizer {tokenizer.name} gave id {largest}, beyond its vocabulary of {tokenizer.vocabulary}"
        )
    ends = np.fromiter(accumulate(len(each) + 1 for each in ids), dtype=np.int64, count=len(ids))
    return Packed([document.place for document in batch], tokens, ends)


def pack_here(tokenizer: Tokenizer) -> Encode:
    """Tokenise in this process."""
    return lambda documents: (pack(batch, tokenizer) for batch in batches(documents))
