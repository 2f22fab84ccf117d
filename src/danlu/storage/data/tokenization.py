"""Documents into one stream of tokens, in batches: the same for local and Ray builds."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from danlu.storage.data.dataset_index import token_dtype
from danlu.storage.data.documents import DocumentPosition, DocumentStream, SourceDocument
from danlu.storage.data.shuffle import IntArray
from danlu.storage.data.tokenizer import TokenIds, Tokenizer

_BATCH_CHARACTERS = 4 << 20
_BATCH_DOCUMENTS = 4096


class TokenizedBatch(NamedTuple):
    """The tokens of several documents, concatenated."""

    locations: Sequence[DocumentPosition]
    tokens: TokenIds
    """Of all documents, each with its end-of-text token; of conversations words with marks (`token_marks`)."""
    ends: IntArray
    """Position after each document: int64 [documents]."""


TokenizeFn = Callable[[DocumentStream], Iterator[TokenizedBatch]]
"""All documents, tokenized in order. The function that reads them updates their `bytes_done` and `skipped`."""


def batch_documents(documents: Iterable[SourceDocument]) -> Iterator[list[SourceDocument]]:
    """Documents in batches large enough to be worth a call, small enough for memory."""
    batch: list[SourceDocument] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text.text)
        if characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def tokenize_batch(batch: Sequence[SourceDocument], tokenizer: Tokenizer) -> TokenizedBatch:
    """Tokenize a batch of documents."""
    positions = [document.position for document in batch]
    if batch[0].text.answers is not None:
        words = tokenizer.encode_chats([document.text for document in batch])
        ends = np.fromiter(accumulate(map(len, words)), dtype=np.int64, count=len(words))
        return TokenizedBatch(positions, np.concatenate(words), ends)
    ids = tokenizer.encode_batch([document.text.text for document in batch])
    end = np.array([tokenizer.end_of_text], dtype=token_dtype(tokenizer.vocabulary))
    tokens = np.concatenate([piece for each in ids for piece in (each, end)])
    if (largest := int(tokens.max())) >= tokenizer.vocabulary:
        raise ValueError(
            f"tokenizer {tokenizer.name} gave id {largest}, beyond its vocabulary of {tokenizer.vocabulary}"
        )
    ends = np.fromiter(accumulate(len(each) + 1 for each in ids), dtype=np.int64, count=len(ids))
    return TokenizedBatch(positions, tokens, ends)


def local_tokenize_fn(tokenizer: Tokenizer) -> TokenizeFn:
    """Tokenize in this process."""
    return lambda documents: (tokenize_batch(batch, tokenizer) for batch in batch_documents(documents))
