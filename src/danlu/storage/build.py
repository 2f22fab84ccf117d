"""Text into token shards, in one pass and in the memory of one batch of documents."""

import fcntl
import hashlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from danlu.spec import Problem, SpecError
from danlu.spec.problem import problem_at
from danlu.storage.durable import sync_folder, write_durably
from danlu.storage.source import PYTHON_STDLIB, Documents, source_name
from danlu.storage.tokenizer import TokenIds, Tokenizer
from danlu.storage.tokens import INDEX, Index, OnProgress, Shard, TokenDtype, no_progress, on_disk, token_dtype

SHARD_TOKENS = 1 << 27
"""A quarter of a GiB in two bytes a token."""

_PARTIAL = ".partial"
_BATCH_CHARACTERS = 4 << 20
_BATCH_DOCUMENTS = 4096


@dataclass(frozen=True)
class Built:
    """What a build made, and what it left out."""

    index: Index
    seconds: float
    left_out: Mapping[str, int]
    """Documents and files that are not in the shards, by reason."""
    examples: tuple[Problem, ...]
    """The first few bad ones."""


def build(
    sources: Sequence[str],
    folder: Path,
    tokenizer: Tokenizer,
    on_progress: OnProgress = no_progress,
    *,
    field: str = "text",
    shard_tokens: int = SHARD_TOKENS,
    skip_bad: bool = False,
    force: bool = False,
) -> Built:
    """Write the token shards of `sources` to `folder`; the same sources give the same bytes.

    A source is a file, a folder, or `python-stdlib`. Paths are taken as they are: a caller that
    read them from a recipe resolves them first. Nothing counts as a data set before the last byte is on disk.
    """
    started = time.monotonic()
    if shard_tokens < 1:
        raise ValueError(f"`shard_tokens` must be 1 or more, but is {shard_tokens} instead")
    _refuse_own_output(sources, folder)
    documents = Documents(sources, field=field, skip_bad=skip_bad)
    folder.mkdir(parents=True, exist_ok=True)
    with _alone_in(folder), _ShardWriter(folder, token_dtype(tokenizer.vocabulary), shard_tokens) as writer:
        _refuse_to_replace(folder, force)
        counts = np.zeros(tokenizer.vocabulary, dtype=np.int64)
        number = 0
        for batch in _batches(documents):
            tokens = _encoded(batch, tokenizer)
            counts += np.bincount(tokens, minlength=tokenizer.vocabulary)
            writer.write(tokens)
            number += len(batch)
            on_progress(documents.done, documents.bytes)
        if not number:
            raise SpecError([_empty(sources, documents)])
        index = Index(
            tokenizer=tokenizer.name,
            vocabulary=tokenizer.vocabulary,
            end_of_text=tokenizer.end_of_text,
            dtype=token_dtype(tokenizer.vocabulary),
            tokens=int(counts.sum()),
            documents=number,
            unigram_loss=entropy(counts),
            sources=tuple(source_name(source) for source in sources),
            shards=tuple(writer.finish()),
        )
        _commit(folder, index)
    return Built(index, time.monotonic() - started, dict(documents.left_out), tuple(documents.examples))


def entropy(counts: NDArray[np.int64]) -> float:
    """Entropy in nats of the distribution these counts describe."""
    share = counts[counts > 0] / counts.sum()
    return max(0.0, float(-(share * np.log(share)).sum()))


def _refuse_own_output(sources: Sequence[str], folder: Path) -> None:
    inside = [
        source
        for source in sources
        if source != PYTHON_STDLIB and folder.resolve().is_relative_to(Path(source).resolve())
    ]
    if inside:
        message = f"lies inside its own source {inside[0]}, so that the next build would read the shards as text"
        raise SpecError([problem_at(folder, 1, "output", message, "choose a folder outside it")])


def _empty(sources: Sequence[str], documents: Documents) -> Problem:
    left_out = ", ".join(f"{count} {reason}" for reason, count in sorted(documents.left_out.items())) or "none"
    return problem_at(Path(" ".join(sources)), 1, "source", f"holds no document (left out: {left_out})")


def _batches(documents: Documents) -> Iterator[list[str]]:
    """Documents in groups large enough to be worth a call, small enough to be held."""
    batch: list[str] = []
    characters = 0
    for text in documents:
        batch.append(text)
        characters += len(text)
        if characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encoded(batch: list[str], tokenizer: Tokenizer) -> TokenIds:
    """The documents of a batch one after the other, each with its end."""
    end = np.array([tokenizer.end_of_text], dtype=token_dtype(tokenizer.vocabulary))
    pieces = [piece for ids in tokenizer.encode_many(batch) for piece in (ids, end)]
    tokens = np.concatenate(pieces)
    if (largest := int(tokens.max())) >= tokenizer.vocabulary:
        raise ValueError(
            f"tokenizer {tokenizer.name} gave id {largest}, beyond its vocabulary of {tokenizer.vocabulary}"
        )
    return tokens


class _ShardWriter:
    """Cuts a stream of tokens into files of equal length, hashed as they are written and synced as they are closed.

    The files carry the suffix `.partial` until the commit, so that a build that fails leaves what was there before.
    """

    def __init__(self, folder: Path, dtype: TokenDtype, shard_tokens: int) -> None:
        self._folder = folder
        self._dtype = on_disk(dtype)
        self._shard_tokens = shard_tokens
        self._shards: list[Shard] = []
        self._file: BinaryIO | None = None

    def __enter__(self) -> Self:
        self._remove_partial()  # of a build that was killed
        return self

    def __exit__(self, *failure: object) -> None:
        if self._file is not None:
            self._file.close()
        self._remove_partial()

    def write(self, tokens: TokenIds) -> None:
        """Append tokens, across as many shards as they fill."""
        while len(tokens):
            if self._file is None:
                self._file = (self._folder / (self._name + _PARTIAL)).open("xb")
                self._held, self._digest = 0, hashlib.sha256()
            piece, tokens = np.split(tokens, [self._shard_tokens - self._held])
            raw = piece.astype(self._dtype).tobytes()
            self._file.write(raw)
            self._digest.update(raw)
            self._held += len(piece)
            if self._held == self._shard_tokens:
                self._close(self._file)

    def finish(self) -> list[Shard]:
        """Close the last shard and list them all."""
        if self._file is not None:
            self._close(self._file)
        return self._shards

    @property
    def _name(self) -> str:
        return f"{len(self._shards):05d}.bin"

    def _close(self, file: BinaryIO) -> None:
        file.flush()
        os.fsync(file.fileno())
        file.close()
        self._shards.append(Shard(file=self._name, tokens=self._held, sha256=self._digest.hexdigest()))
        self._file = None

    def _remove_partial(self) -> None:
        for left in self._folder.glob(f"*{_PARTIAL}"):
            left.unlink()


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold the folder against a second build; the lock falls with the process, so that a killed build leaves none."""
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = "is being written by another build"
            raise SpecError(
                [problem_at(folder, 1, "output", message, "wait for it, or choose another folder")]
            ) from None
        except OSError as error:
            message = f"cannot be locked against a second build: {error.strerror}"
            suggestion = "build on a file system with locks, and copy the folder"
            raise SpecError([problem_at(folder, 1, "output", message, suggestion)]) from None
        yield


def _refuse_to_replace(folder: Path, force: bool) -> None:
    if (folder / INDEX).exists() and not force:
        message = "already holds a data set"
        raise SpecError([problem_at(folder, 1, "output", message, "choose another folder, or --force to replace it")])


def _commit(folder: Path, index: Index) -> None:
    """Put shards and index in place; at no moment does an index stand beside shards that are not its own.

    Old files are unlinked rather than overwritten: a process that still has one mapped keeps it.
    """
    (folder / INDEX).unlink(missing_ok=True)
    sync_folder(folder)
    for old in folder.glob("[0-9][0-9][0-9][0-9][0-9]*.bin"):
        old.unlink()
    for shard in index.shards:
        (folder / (shard.file + _PARTIAL)).rename(folder / shard.file)
    partial = folder / (INDEX + _PARTIAL)
    write_durably(partial, index.model_dump_json(indent=2) + "\n")
    sync_folder(folder)
    partial.rename(folder / INDEX)
    sync_folder(folder)
