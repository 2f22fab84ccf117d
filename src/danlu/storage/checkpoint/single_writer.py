"""Write a checkpoint from one process, shard by shard, in the memory of one shard. Nothing here needs torch."""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from danlu.storage.checkpoint.boxes import CHUNK_BYTES, Box, aligned_offsets, numel, split_box
from danlu.storage.checkpoint.commit import CheckpointSaveError, commit, pack_name, step_folder
from danlu.storage.checkpoint.fingerprint import all_finite, as_bits, fingerprint
from danlu.storage.checkpoint.manifest import (
    ITEMSIZE,
    MANIFEST_FILE,
    Chunk,
    Leaf,
    Manifest,
    SafetensorsDtype,
    TensorShard,
    parse_manifest,
)
from danlu.storage.store.base import Store
from danlu.storage.store.checksum import crc32c

_UINT64_RANGE = 2**64
Scalars = Mapping[str, int | float | str | bool | None]


@dataclass(frozen=True)
class SourceShard:
    """A box of a tensor, and a function that loads its bytes, row by row."""

    box: Box
    load: Callable[[], memoryview]


@dataclass(frozen=True)
class SourceTensor:
    """A tensor to write: shards that tile it."""

    name: str
    dtype: SafetensorsDtype
    shape: tuple[int, ...]
    shards: Sequence[SourceShard]


def source_tensor(name: str, dtype: SafetensorsDtype, array: NDArray[np.generic]) -> SourceTensor:
    """A tensor in memory; `array` has its elements or their bits."""
    array = np.array(array, order="C", copy=True)
    box = (0,) * array.ndim, array.shape
    return SourceTensor(name, dtype, array.shape, [SourceShard(box, lambda: memoryview(array.tobytes()))])


def write_checkpoint(
    store: Store,
    step: int,
    tensors: Sequence[SourceTensor],
    scalars: Scalars,
    on_bytes: Callable[[int], None] = lambda done: None,
    layout: Mapping[str, int] | None = None,
) -> Manifest:
    """Write a checkpoint as its only writer; `CheckpointSaveError` if the step exists or a shard has the wrong size."""
    if MANIFEST_FILE in store.list(step_folder(step)):
        raise CheckpointSaveError(
            f"{store.name}/{step_folder(step)} must be new, but exists already; it is not changed"
        )
    attempt = f"{random.SystemRandom().getrandbits(32):08x}"
    writer = _PackWriter(tensors, on_bytes)
    pack = pack_name(attempt, 0)
    if writer.bytes:
        store.write(f"{step_folder(step)}/{pack}", writer.iter_bytes())
    leaf = Leaf(
        step=step,
        attempt=attempt,
        writer=0,
        pack=pack,
        bytes=writer.bytes,
        finite=writer.finite,
        tensors=writer.tensor_shards(),
    )
    root = {"scalars": {"step": step, **scalars}, "layout": dict(layout or {}), "written": time.time()}
    text = commit(store, leaf, writers=1, root=root, timeout=0.0)
    assert text is not None  # the only writer is the one that creates the manifest
    return parse_manifest(text, store.name)


class _PackWriter:
    """The offsets of all chunks in the pack, known before the first byte is read; hashes are computed while writing."""

    def __init__(self, tensors: Sequence[SourceTensor], on_bytes: Callable[[int], None]) -> None:
        self.tensors = sorted(tensors, key=lambda tensor: tensor.name)
        self.on_bytes = on_bytes
        self.finite = True
        self._boxes = [
            (tensor, shard, list(split_box(shard.box, ITEMSIZE[tensor.dtype], CHUNK_BYTES)))
            for tensor in self.tensors
            for shard in tensor.shards
            if numel(shard.box[1])
        ]
        sizes = [numel(size) * ITEMSIZE[tensor.dtype] for tensor, _, boxes in self._boxes for _, size in boxes]
        self._starts = list(aligned_offsets(sizes))
        self.bytes = self._starts[-1] + sizes[-1] if sizes else 0
        self._chunks: dict[str, list[Chunk]] = {}
        self._sums: dict[str, int] = {}

    def iter_bytes(self) -> Iterator[memoryview]:
        """The pack's bytes in order."""
        end, starts = 0, iter(self._starts)
        for tensor, shard, boxes in self._boxes:
            raw, done = shard.load(), 0
            expected = numel(shard.box[1]) * ITEMSIZE[tensor.dtype]
            if raw.nbytes != expected:
                raise CheckpointSaveError(
                    f"{tensor.name}{list(shard.box[0])} must have {expected} bytes, but has {raw.nbytes}"
                )
            for box in boxes:
                at, length = next(starts), numel(box[1]) * ITEMSIZE[tensor.dtype]
                piece = raw[done : done + length]
                if at > end:
                    yield memoryview(bytes(at - end))
                self._add_chunk(tensor, box, at, piece)
                yield piece
                self.on_bytes(length)
                done, end = done + length, at + length

    def tensor_shards(self) -> dict[str, TensorShard]:
        """The leaf's entry of every tensor; only known after the last byte."""
        return {
            tensor.name: TensorShard(
                dtype=tensor.dtype,
                shape=tensor.shape,
                chunks=tuple(self._chunks[tensor.name]),
                fingerprint=self._sums[tensor.name],
            )
            for tensor in self.tensors
            if tensor.name in self._chunks
        }

    def _add_chunk(self, tensor: SourceTensor, box: Box, at: int, piece: memoryview) -> None:
        bits = as_bits(piece, ITEMSIZE[tensor.dtype], box[1])
        self.finite = self.finite and all_finite(bits, tensor.dtype)
        self._sums[tensor.name] = (self._sums.get(tensor.name, 0) + fingerprint(bits, box[0])) % _UINT64_RANGE
        chunk = Chunk(offset=box[0], size=box[1], at=at, crc32c=crc32c(piece))
        self._chunks.setdefault(tensor.name, []).append(chunk)
