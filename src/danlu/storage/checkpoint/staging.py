"""Copy a rank's shards of the state into host memory, and hash every chunk of the tensors on the way."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from danlu.storage.checkpoint.boxes import CHUNK_BYTES, Box, aligned_offsets, numel, split_box
from danlu.storage.checkpoint.local_shards import LocalShard, local_bytes
from danlu.storage.checkpoint.manifest import ITEMSIZE, Chunk
from danlu.storage.store.checksum import copy_with_crc32c, crc32c


@dataclass(frozen=True)
class PackEntry:
    """One shard in the pack: its chunks in order, and their offsets."""

    shard: LocalShard
    boxes: Sequence[Box]
    offsets: Sequence[int]


@dataclass(frozen=True)
class PackPlan:
    """The layout of a rank's pack."""

    entries: Sequence[PackEntry]
    bytes: int
    gaps: Sequence[tuple[int, int]]
    """Start and end of the padding between chunks; filled with zeros."""

    @classmethod
    def from_shards(cls, shards: Sequence[LocalShard]) -> "PackPlan":
        """Lay out the shards that this rank writes, in the order of their names."""
        mine = sorted((shard for shard in shards if shard.replica_id == 0), key=lambda shard: (shard.name, shard.box))
        boxes = [list(split_box(shard.box, ITEMSIZE[shard.dtype], CHUNK_BYTES)) for shard in mine]
        sizes = [
            numel(size) * ITEMSIZE[shard.dtype] for shard, each in zip(mine, boxes, strict=True) for _, size in each
        ]
        starts = list(aligned_offsets(sizes))
        ends = [start + size for start, size in zip(starts, sizes, strict=True)]
        gaps = [(end, start) for end, start in zip(ends, starts[1:], strict=False) if end < start]
        entries, done = [], 0
        for shard, each in zip(mine, boxes, strict=True):
            entries.append(PackEntry(shard, each, starts[done : done + len(each)]))
            done += len(each)
        return cls(entries, ends[-1] if ends else 0, gaps)


def snapshot(plan: PackPlan, tensors: Mapping[str, Tensor], into: memoryview) -> list[list[Chunk]]:
    """Copy the plan's tensors into memory and return the chunks of every entry, with their hashes."""
    for start, end in plan.gaps:
        into[start:end] = bytes(end - start)
    return [_snapshot_shard(entry, tensors[entry.shard.name], into) for entry in plan.entries]


def _snapshot_shard(entry: PackEntry, tensor: Tensor, into: memoryview) -> list[Chunk]:
    source, done, chunks = local_bytes(tensor), 0, []
    for box, at in zip(entry.boxes, entry.offsets, strict=True):
        length = numel(box[1]) * ITEMSIZE[entry.shard.dtype]
        target = into[at : at + length]
        crc = copy_to_host(source[done : done + length], target)
        chunks.append(Chunk(offset=box[0], size=box[1], at=at, crc32c=crc))
        done += length
    if done != source.numel():
        raise RuntimeError(f"{entry.shard.name}: {source.numel()} bytes in the tensor, but the pack plan has {done}")
    return chunks


def copy_to_host(part: Tensor, target: memoryview) -> int:
    """Copy bytes of a tensor into host memory, and return their crc32c."""
    if part.device.type == "cpu":
        return copy_with_crc32c(part.numpy().data, target)
    torch.frombuffer(target, dtype=torch.uint8).copy_(part)
    return crc32c(target)  # this is the first memory where the CPU sees the bytes
