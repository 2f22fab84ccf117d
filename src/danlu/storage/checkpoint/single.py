"""Write a checkpoint from one process, box by box, in the memory of one box. Nothing here needs torch."""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from danlu.storage.checkpoint.boxes import Box, cut, laid_out, volume
from danlu.storage.checkpoint.commit import SaveFailed, commit, folder_of, pack_name
from danlu.storage.checkpoint.fingerprint import all_finite, as_bits, fingerprint
from danlu.storage.checkpoint.manifest import ITEMSIZE, MANIFEST, Chunk, Dtype, Held, Leaf, Manifest, open_manifest
from danlu.storage.hashing import crc32c
from danlu.storage.store import Store

CHUNK_BYTES = 16 << 20
_WORD = 2**64
Scalars = Mapping[str, int | float | str | bool | None]


@dataclass(frozen=True)
class Part:
    """A box of a tensor, and how to get its bytes, row by row, when their turn comes."""

    box: Box
    load: Callable[[], memoryview]


@dataclass(frozen=True)
class Whole:
    """A tensor to be written: parts that tile it."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    parts: Sequence[Part]


def tensor_of(name: str, dtype: Dtype, array: NDArray[np.generic]) -> Whole:
    """A tensor that is in memory; `array` has its elements or their bits."""
    array = np.array(array, order="C", copy=True)
    box = (0,) * array.ndim, array.shape
    return Whole(name, dtype, array.shape, [Part(box, lambda: memoryview(array.tobytes()))])


def write_single(
    store: Store,
    step: int,
    tensors: Sequence[Whole],
    scalars: Scalars,
    on_bytes: Callable[[int], None] = lambda done: None,
    layout: Mapping[str, int] | None = None,
) -> Manifest:
    """Write a checkpoint as its only writer; `SaveFailed` if there is one of this step, or a part is not as it says."""
    if MANIFEST in store.list(folder_of(step)):
        raise SaveFailed(f"{store.name}/{folder_of(step)} must be new, but exists already; it is left as it is")
    attempt = f"{random.SystemRandom().getrandbits(32):08x}"
    writing = _Writing(tensors, on_bytes)
    pack = pack_name(attempt, 0)
    if writing.bytes:
        store.write(f"{folder_of(step)}/{pack}", writing.content())
    leaf = Leaf(
        step=step,
        attempt=attempt,
        writer=0,
        pack=pack,
        bytes=writing.bytes,
        finite=writing.finite,
        tensors=writing.held(),
    )
    root = {"scalars": {"step": step, **scalars}, "layout": dict(layout or {}), "written": time.time()}
    text = commit(store, leaf, writers=1, root=root, patience=0.0)
    assert text is not None  # the only writer is the one that creates the manifest
    return open_manifest(text, store.name)


class _Writing:
    """The places of all chunks in the pack, known before the first byte is read; hashes come with the bytes."""

    def __init__(self, tensors: Sequence[Whole], on_bytes: Callable[[int], None]) -> None:
        self.tensors = sorted(tensors, key=lambda tensor: tensor.name)
        self.on_bytes = on_bytes
        self.finite = True
        self._boxes = [
            (tensor, part, list(cut(part.box, ITEMSIZE[tensor.dtype], CHUNK_BYTES)))
            for tensor in self.tensors
            for part in tensor.parts
            if volume(part.box[1])
        ]
        sizes = [volume(size) * ITEMSIZE[tensor.dtype] for tensor, _, boxes in self._boxes for _, size in boxes]
        self._starts = list(laid_out(sizes))
        self.bytes = self._starts[-1] + sizes[-1] if sizes else 0
        self._chunks: dict[str, list[Chunk]] = {}
        self._sums: dict[str, int] = {}

    def content(self) -> Iterator[memoryview]:
        """The pack's bytes in order."""
        end, starts = 0, iter(self._starts)
        for tensor, part, boxes in self._boxes:
            raw, done = part.load(), 0
            expected = volume(part.box[1]) * ITEMSIZE[tensor.dtype]
            if raw.nbytes != expected:
                raise SaveFailed(f"{tensor.name}{list(part.box[0])} must have {expected} bytes, but has {raw.nbytes}")
            for box in boxes:
                at, length = next(starts), volume(box[1]) * ITEMSIZE[tensor.dtype]
                piece = raw[done : done + length]
                if at > end:
                    yield memoryview(bytes(at - end))
                self._weigh(tensor, box, at, piece)
                yield piece
                self.on_bytes(length)
                done, end = done + length, at + length

    def held(self) -> dict[str, Held]:
        """What the leaf says of every tensor; only known after the last byte."""
        return {
            tensor.name: Held(
                dtype=tensor.dtype,
                shape=tensor.shape,
                chunks=tuple(self._chunks[tensor.name]),
                fingerprint=self._sums[tensor.name],
            )
            for tensor in self.tensors
            if tensor.name in self._chunks
        }

    def _weigh(self, tensor: Whole, box: Box, at: int, piece: memoryview) -> None:
        bits = as_bits(piece, ITEMSIZE[tensor.dtype], box[1])
        self.finite = self.finite and all_finite(bits, tensor.dtype)
        self._sums[tensor.name] = (self._sums.get(tensor.name, 0) + fingerprint(bits, box[0])) % _WORD
        chunk = Chunk(offset=box[0], size=box[1], at=at, crc32c=crc32c(piece))
        self._chunks.setdefault(tensor.name, []).append(chunk)
