"""Tokens into shard files of equal length, with their checksums and document ends beside them."""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from danlu.storage.blocks import BlockSums
from danlu.storage.durable import sync_file
from danlu.storage.index import Shard, TokenDtype, on_disk
from danlu.storage.order import Ints
from danlu.storage.tokenizer import TokenIds

PARTIAL = ".partial"
"""What a file's name ends with until the data set it belongs to is complete."""

OnShard = Callable[[int], None]
"""Called when a shard is closed, with how many of the tokens being written are in closed shards."""


class ShardWriter:
    """Cuts a stream of tokens into files, hashed as they are written; `sync` puts those that are closed on disk."""

    def __init__(
        self,
        folder: Path,
        dtype: TokenDtype,
        shard_tokens: int,
        counts: NDArray[np.int64],
        first: int,
        shards: Sequence[Shard],
    ) -> None:
        """Go on behind `shards`, whose tokens are in `counts`; the first of all has number `first`."""
        self.shards = list(shards)
        self.counts = counts
        self._folder, self._dtype, self._shard_tokens, self._first = folder, on_disk(dtype), shard_tokens, first
        self._file: BinaryIO | None = None
        self._synced = len(self.shards)

    def write(self, tokens: TokenIds, ends: Ints, on_shard: OnShard) -> None:
        """Append tokens, of which documents end before the places `ends`, across as many shards as they fill."""
        done = 0
        while done < len(tokens):
            file = self._file or self._begin()
            room = self._shard_tokens - self._held
            piece = tokens[done : done + room]
            self._put(file, piece)
            inside = ends[(ends > done) & (ends <= done + len(piece))]
            self._ends.append(inside - done + self._held)
            self._held += len(piece)
            done += len(piece)
            if self._held == self._shard_tokens:
                self._close(file)
                on_shard(done)

    def finish(self) -> None:
        """Close the last shard."""
        if self._file is not None:
            self._close(self._file)

    def sync(self) -> None:
        """Wait until every closed shard is on disk."""
        for shard in self.shards[self._synced :]:
            for name in (shard.file, shard.beside(".crc"), shard.beside(".ends")):
                sync_file(self._folder / (name + PARTIAL))
        self._synced = len(self.shards)

    def abandon(self) -> None:
        """Leave the shard under way as it is."""
        if self._file is not None:
            with suppress(OSError):  # a full disk says so a second time; the first is on its way to the user
                self._file.close()
            self._file = None

    @property
    def _name(self) -> str:
        return f"{self._first + len(self.shards):05d}.bin"

    def _begin(self) -> BinaryIO:
        self._file = (self._folder / (self._name + PARTIAL)).open("wb")
        self._held, self._digest, self._sums = 0, hashlib.sha256(), BlockSums()
        self._ends: list[Ints] = []
        return self._file

    def _put(self, file: BinaryIO, piece: TokenIds) -> None:
        raw = piece.astype(self._dtype).tobytes()
        file.write(raw)
        self._digest.update(raw)
        self._sums.update(raw)
        self.counts += np.bincount(piece, minlength=len(self.counts))

    def _close(self, file: BinaryIO) -> None:
        file.close()
        self._file = None
        ends = np.concatenate(self._ends)
        shard = Shard(
            file=self._name,
            tokens=self._held,
            sha256=self._digest.hexdigest(),
            documents=len(ends),
            sums=self._beside(".crc", self._sums.table()),
            ends=self._beside(".ends", ends.astype("<i8").tobytes()),
        )
        self.shards.append(shard)

    def _beside(self, suffix: str, raw: bytes) -> str:
        (self._folder / (self._name.removesuffix(".bin") + suffix + PARTIAL)).write_bytes(raw)
        return hashlib.sha256(raw).hexdigest()
