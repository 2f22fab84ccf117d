"""Fill tensors of any layout from a checkpoint of any other, and verify that they hold what was saved."""

import threading
from collections import Counter
from collections.abc import Mapping, Sequence

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

from danlu.storage.checkpoint.boxes import Box, numel
from danlu.storage.checkpoint.fingerprint import as_bits, fingerprint
from danlu.storage.checkpoint.local_shards import SAFETENSORS_NAMES, LocalShard, local_bytes, local_tensor
from danlu.storage.checkpoint.manifest import ITEMSIZE, CorruptCheckpointError, Manifest
from danlu.storage.checkpoint.reader import CheckpointReader, StoredChunk
from danlu.storage.store.checksum import copy_with_crc32c, crc32c

_TORCH_DTYPES = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}
_UINT64_RANGE = 2**64


class TensorMismatchError(ValueError):
    """A checkpoint does not have the requested tensors; the message names them."""


def fill_tensors(
    reader: CheckpointReader, tensors: Mapping[str, Tensor], shards: Sequence[LocalShard]
) -> dict[str, int]:
    """Fill this rank's shards of `tensors` in place; every chunk is verified before this returns.

    Returns the fingerprints of the filled tensors, of the shards that this rank would write.
    """
    _check_tensors(reader.manifest, tensors)
    wanted: dict[str, list[Box]] = {}
    for shard in shards:
        wanted.setdefault(shard.name, []).append(shard.box)
    chunks = reader.find_chunks(wanted)
    filler = _TensorFiller(tensors, shards, chunks, _read_items(reader.manifest, tensors, chunks))
    reader.read_chunks(chunks, filler.consume)
    return filler.fingerprints


class _TensorFiller:
    """Copies every chunk to its targets: a chunk may serve several boxes, and a box needs several chunks.

    A tensor's fingerprint is computed when its last chunk is copied, while others are still being read.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        shards: Sequence[LocalShard],
        chunks: Sequence[StoredChunk],
        items: Mapping[tuple[str, tuple[int, ...]], Sequence[ReadItem]],
    ) -> None:
        self.fingerprints: dict[str, int] = {}
        self._tensors = tensors
        self._items = items
        self._mine: dict[str, list[LocalShard]] = {}
        for shard in shards:
            if shard.replica_id == 0:
                self._mine.setdefault(shard.name, []).append(shard)
        self._remaining = Counter(stored.name for stored in chunks)
        self._lock = threading.Lock()

    def consume(self, stored: StoredChunk, content: memoryview) -> int:
        """Copy a chunk to its targets; called again with other bytes if these are corrupt."""
        crc = self._copy_chunk(stored, content)
        if crc == stored.chunk.crc32c:
            with self._lock:
                self._remaining[stored.name] -= 1
                complete = not self._remaining[stored.name]
            if complete and stored.name in self._mine:
                self.fingerprints[stored.name] = _fingerprint_of(self._tensors[stored.name], self._mine[stored.name])
        return crc

    def _copy_chunk(self, stored: StoredChunk, content: memoryview) -> int:
        items = self._items.get((stored.name, stored.chunk.offset), ())
        local = local_tensor(self._tensors[stored.name])
        if len(items) == 1 and (target := _contiguous_target(items[0], stored, local)) is not None:
            return copy_with_crc32c(content, target.numpy().data)
        crc = crc32c(content)
        if crc == stored.chunk.crc32c and items:
            source = torch.frombuffer(content, dtype=local.dtype).reshape(stored.chunk.size)
            for item in items:
                _narrow(local, item.dest_offsets, item.lengths).copy_(
                    _narrow(source, item.storage_offsets, item.lengths)
                )
        return crc


def _fingerprint_of(tensor: Tensor, shards: Sequence[LocalShard]) -> int:
    """Fingerprint of the shards of a tensor."""
    raw = local_bytes(tensor).cpu().numpy().data
    return (
        sum(fingerprint(as_bits(raw, ITEMSIZE[each.dtype], each.box[1]), each.box[0]) for each in shards)
        % _UINT64_RANGE
    )


def _check_tensors(manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
    wrong = []
    for name, tensor in tensors.items():
        saved = manifest.tensors.get(name)
        if saved is None:
            wrong.append(f"{name} is not in it")
        elif (saved.dtype, saved.shape) != (SAFETENSORS_NAMES.get(tensor.dtype), tuple(tensor.shape)):
            wrong.append(
                f"{name} is {saved.dtype} {list(saved.shape)} in it, but {tensor.dtype} {list(tensor.shape)} here"
            )
    if wrong:
        more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise TensorMismatchError(
            f"the checkpoint of step {manifest.step} does not match: " + "; ".join(wrong[:5]) + more
        )


def _read_items(
    manifest: Manifest, tensors: Mapping[str, Tensor], chunks: Sequence[StoredChunk]
) -> dict[tuple[str, tuple[int, ...]], list[ReadItem]]:
    """PyTorch's planner decides which part of which chunk is copied where."""
    by_name: dict[str, list[ChunkStorageMetadata]] = {name: [] for name in tensors}
    for stored in chunks:
        by_name[stored.name].append(
            ChunkStorageMetadata(torch.Size(stored.chunk.offset), torch.Size(stored.chunk.size))
        )
    metadata = Metadata(
        {
            name: TensorStorageMetadata(
                TensorProperties(dtype=_TORCH_DTYPES[manifest.tensors[name].dtype]),
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
        needed[item.storage_index.fqn] += numel(tuple(item.lengths))
    for name, elements in needed.items():
        if elements != (held := local_tensor(tensors[name]).numel()):
            raise CorruptCheckpointError(f"{name}: {held} elements are needed, but the chunks hold {elements} of them")
    return items


def _narrow(tensor: Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    for dim, (start, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor


def _contiguous_target(item: ReadItem, stored: StoredChunk, local: Tensor) -> Tensor | None:
    """The target of an entire chunk, if it is contiguous in CPU memory."""
    if local.device.type != "cpu" or tuple(item.lengths) != stored.chunk.size:
        return None
    target = _narrow(local, item.dest_offsets, item.lengths)
    return target.reshape(-1).view(torch.uint8) if target.is_contiguous() else None
