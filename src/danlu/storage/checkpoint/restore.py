"""Fill tensors of any layout from a checkpoint of any other, and prove that they hold what was saved."""

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.tensor import DTensor

from danlu.storage.checkpoint.boxes import Box, volume
from danlu.storage.checkpoint.fingerprint import as_bits, fingerprint
from danlu.storage.checkpoint.manifest import ITEMSIZE, Damaged, Manifest
from danlu.storage.checkpoint.pieces import DTYPES, Piece, local_bytes
from danlu.storage.checkpoint.reader import Reader, Stored
from danlu.storage.hashing import copy_and_hash, crc32c

_TORCH = {name: dtype for dtype, name in DTYPES.items()}
_WORD = 2**64


class WrongTensors(ValueError):  # noqa: N818 - it is what was asked for
    """A checkpoint does not have what is to be filled; the message names the tensors."""


def fill(
    reader: Reader, tensors: Mapping[str, Tensor], pieces: Sequence[Piece], on_bytes: Callable[[int], None]
) -> dict[str, int]:
    """Fill what this rank holds of `tensors`, in place; every chunk is checked before this returns.

    Returns the fingerprints of what the tensors then hold, as far as they are this rank's to write.
    """
    _check(reader.manifest, tensors)
    wanted: dict[str, list[Box]] = {}
    for piece in pieces:
        wanted.setdefault(piece.name, []).append(piece.box)
    chunks = reader.find(wanted)
    filling = _Filling(tensors, pieces, chunks, _read_items(reader.manifest, tensors, chunks))
    reader.fetch(chunks, filling.take, on_bytes)
    return filling.sums


class _Filling:
    """Where every chunk goes: a chunk may serve several boxes, and a box needs several chunks.

    A tensor's fingerprint is taken when its last chunk is in place, while others are still being read.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        pieces: Sequence[Piece],
        chunks: Sequence[Stored],
        items: Mapping[tuple[str, tuple[int, ...]], Sequence[ReadItem]],
    ) -> None:
        self.sums: dict[str, int] = {}
        self._tensors = tensors
        self._items = items
        self._mine: dict[str, list[Piece]] = {}
        for piece in pieces:
            if piece.replica == 0:
                self._mine.setdefault(piece.name, []).append(piece)
        self._to_come = Counter(stored.name for stored in chunks)
        self._lock = threading.Lock()

    def take(self, stored: Stored, content: memoryview) -> int:
        """Put a chunk in its place; called again with other bytes if these are damaged."""
        crc = self._put(stored, content)
        if crc == stored.chunk.crc32c:
            with self._lock:
                self._to_come[stored.name] -= 1
                complete = not self._to_come[stored.name]
            if complete and stored.name in self._mine:
                self.sums[stored.name] = _sum_of(self._tensors[stored.name], self._mine[stored.name])
        return crc

    def _put(self, stored: Stored, content: memoryview) -> int:
        items = self._items.get((stored.name, stored.chunk.offset), ())
        local = _local(self._tensors[stored.name])
        if len(items) == 1 and (whole := _whole_target(items[0], stored, local)) is not None:
            return copy_and_hash(content, whole.numpy().data)
        crc = crc32c(content)
        if crc == stored.chunk.crc32c and items:
            source = torch.frombuffer(content, dtype=local.dtype).reshape(stored.chunk.size)
            for item in items:
                _narrowed(local, item.dest_offsets, item.lengths).copy_(
                    _narrowed(source, item.storage_offsets, item.lengths)
                )
        return crc


def _sum_of(tensor: Tensor, pieces: Sequence[Piece]) -> int:
    """Fingerprint of the pieces of a tensor."""
    raw = local_bytes(tensor).cpu().numpy().data
    return sum(fingerprint(as_bits(raw, ITEMSIZE[each.dtype], each.box[1]), each.box[0]) for each in pieces) % _WORD


def _check(manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
    wrong = []
    for name, tensor in tensors.items():
        saved = manifest.tensors.get(name)
        if saved is None:
            wrong.append(f"{name} is not in it")
        elif (saved.dtype, saved.shape) != (DTYPES.get(tensor.dtype), tuple(tensor.shape)):
            wrong.append(
                f"{name} is {saved.dtype} {list(saved.shape)} in it, but {tensor.dtype} {list(tensor.shape)} here"
            )
    if wrong:
        more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise WrongTensors(f"the checkpoint of step {manifest.step} does not fit: " + "; ".join(wrong[:5]) + more)


def _read_items(
    manifest: Manifest, tensors: Mapping[str, Tensor], chunks: Sequence[Stored]
) -> dict[tuple[str, tuple[int, ...]], list[ReadItem]]:
    """PyTorch's planner says which part of which chunk goes where."""
    by_name: dict[str, list[ChunkStorageMetadata]] = {name: [] for name in tensors}
    for stored in chunks:
        by_name[stored.name].append(
            ChunkStorageMetadata(torch.Size(stored.chunk.offset), torch.Size(stored.chunk.size))
        )
    metadata = Metadata(
        {
            name: TensorStorageMetadata(
                TensorProperties(dtype=_TORCH[manifest.tensors[name].dtype]),
                torch.Size(manifest.tensors[name].shape),
                found,
            )
            for name, found in by_name.items()
        }
    )
    items: dict[tuple[str, tuple[int, ...]], list[ReadItem]] = {}
    needed = dict.fromkeys(tensors, 0)
    for item in create_default_local_load_plan(dict(tensors), metadata).items:
        assert item.storage_index.offset is not None
        items.setdefault((item.storage_index.fqn, tuple(item.storage_index.offset)), []).append(item)
        needed[item.storage_index.fqn] += volume(tuple(item.lengths))
    for name, elements in needed.items():
        if elements != (held := _local(tensors[name]).numel()):
            raise Damaged(
                f"{name}: {held} elements are to be filled, but the chunks that are there hold {elements} of them"
            )
    return items


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _narrowed(tensor: Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    for dim, (start, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor


def _whole_target(item: ReadItem, stored: Stored, local: Tensor) -> Tensor | None:
    """The bytes a whole chunk goes to, where they lie together in this processor's memory."""
    if local.device.type != "cpu" or tuple(item.lengths) != stored.chunk.size:
        return None
    target = _narrowed(local, item.dest_offsets, item.lengths)
    return target.reshape(-1).view(torch.uint8) if target.is_contiguous() else None
