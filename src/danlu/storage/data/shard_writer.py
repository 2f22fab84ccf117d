"""Tokens into shard files of equal length, with sidecar files for checksums and document ends."""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from danlu.storage.data.block_checksums import BlockChecksums
from danlu.storage.data.dataset_index import ShardInfo, TokenDtype, disk_dtype
from danlu.storage.data.shuffle import IntArray
from danlu.storage.data.token_marks import unpack_marks
from danlu.storage.data.tokenizer import TokenIds
from danlu.storage.store.atomic_files import fsync_file

PARTIAL_SUFFIX = ".partial"
"""Suffix of a file until its data set is complete."""

OnShard = Callable[[int], None]
"""Called when a shard is closed, with how many of the tokens being written are in closed shards."""


class ShardWriter:
    """Splits a stream of tokens into files, hashed as they are written; `sync` makes the closed ones durable."""

    def __init__(
        self,
        folder: Path,
        dtype: TokenDtype,
        shard_tokens: int,
        counts: NDArray[np.int64],
        first: int,
        shards: Sequence[ShardInfo],
        marked: bool = False,
    ) -> None:
        """Continue after `shards`, whose tokens are in `counts`; the very first has number `first`.

        If `marked`, what is written are words with marks (`token_marks`).
        """
        self._marked = marked
        self.shards = list(shards)
        self.counts = counts
        self._folder, self._dtype, self._shard_tokens, self._first = folder, disk_dtype(dtype), shard_tokens, first
        self._file: BinaryIO | None = None
        self._synced = len(self.shards)

    def write(self, tokens: TokenIds, ends: IntArray, on_shard: OnShard) -> None:
        """Append tokens, in which documents end before the positions `ends`, across as many shards as they fill."""
        done = 0
        while done < len(tokens):
            file = self._file or self._open_shard()
            remaining = self._shard_tokens - self._held
            piece = tokens[done : done + remaining]
            self._append(file, piece)
            inside = ends[(ends > done) & (ends <= done + len(piece))]
            self._ends.append(inside - done + self._held)
            self._held += len(piece)
            done += len(piece)
            if self._held == self._shard_tokens:
                self._close_shard(file)
                on_shard(done)

    def finish(self) -> None:
        """Close the last shard."""
        if self._file is not None:
            self._close_shard(self._file)

    def sync(self) -> None:
        """Wait until every closed shard is durable."""
        for shard in self.shards[self._synced :]:
            for name in (shard.file, shard.sidecar_name(".crc"), shard.sidecar_name(".ends")):
                fsync_file(self._folder / (name + PARTIAL_SUFFIX))
        self._synced = len(self.shards)

    def abort(self) -> None:
        """Stop; the current shard stays incomplete."""
        if self._file is not None:
            with suppress(OSError):  # a full disk raises a second time; the first error is being reported
                self._file.close()
            self._file = None

    @property
    def _name(self) -> str:
        return f"{self._first + len(self.shards):05d}.bin"

    def _open_shard(self) -> BinaryIO:
        self._file = (self._folder / (self._name + PARTIAL_SUFFIX)).open("wb")
        self._held, self._digest, self._sums = 0, hashlib.sha256(), BlockChecksums()
        self._counted = 0
        self._ends: list[IntArray] = []
        return self._file

    def _append(self, file: BinaryIO, piece: TokenIds) -> None:
        raw = piece.astype(self._dtype).tobytes()
        file.write(raw)
        self._digest.update(raw)
        self._sums.update(raw)
        tokens = piece
        if self._marked:
            tokens, _, counted = unpack_marks(piece)
            self._counted += int(counted.sum())
        self.counts += np.bincount(tokens, minlength=len(self.counts))

    def _close_shard(self, file: BinaryIO) -> None:
        file.close()
        self._file = None
        ends = np.concatenate(self._ends)
        shard = ShardInfo(
            file=self._name,
            tokens=self._held,
            sha256=self._digest.hexdigest(),
            documents=len(ends),
            counted=self._counted if self._marked else None,
            sums=self._write_sidecar(".crc", self._sums.to_bytes()),
            ends=self._write_sidecar(".ends", ends.astype("<i8").tobytes()),
        )
        self.shards.append(shard)

    def _write_sidecar(self, suffix: str, raw: bytes) -> str:
        (self._folder / (self._name.removesuffix(".bin") + suffix + PARTIAL_SUFFIX)).write_bytes(raw)
        return hashlib.sha256(raw).hexdigest()
