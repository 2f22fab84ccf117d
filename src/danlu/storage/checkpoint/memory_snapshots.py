"""The newest states of one rank in its host's memory: they outlive its process, and whoever takes its place reads them.

Two buffers a rank, filled in turns, so that one is whole whenever a process dies. All ranks take their snapshots in the
same order, so numbers agree; the newest that every rank has whole is the one to go back to. A snapshot has the bytes of
this rank's shards as they are, for a world of the same layout: reading one at another layout is a checkpoint's work.
Where its host is lost too, another may have it: a replica of the same shards, or a copy that was sent there.
"""

import fcntl
import json
import mmap
import os
import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from danlu.comm.world import World
from danlu.storage.checkpoint.boxes import aligned_offsets
from danlu.storage.checkpoint.local_shards import local_shards, local_tensor
from danlu.storage.checkpoint.peer_snapshots import PeerSnapshots
from danlu.storage.store.checksum import crc32c
from danlu.torch_compat import foreach_copy_

SLOTS = 2
_MAGIC = b"DANLUSN1"
_HEADER = struct.Struct("<8sqqqII16s")
"""Magic, number from 1 (0 while it is being filled), bytes of tensors and of scalars, their checksums, what tensors."""
_TENSORS_AT = 4096
_SCALAR_BYTES = 1 << 18
_WINDOW = 1024
"""Numbers below the newest of all ranks among which one is looked for that every rank can have."""


class SnapshotError(RuntimeError):
    """A snapshot cannot be taken or read; the message says why."""


@dataclass(frozen=True)
class _Header:
    number: int
    tensor_bytes: int
    scalar_bytes: int
    tensor_crc: int
    scalar_crc: int
    signature: bytes


class RankSnapshots:
    """The snapshots of one rank: `take` after every step, `restore` in the next process or the next world."""

    def __init__(self, folder: Path, rank: int, tensors: Mapping[str, Tensor], slots: int = SLOTS) -> None:
        """For tensors such as these; what an earlier process of this rank left is kept if it fits them.

        Two more `slots` are needed if snapshots are to be `kept` while they are copied to another host. Raises
        `OSError` if this host has no memory for them.
        """
        local = [local_tensor(tensor) for tensor in tensors.values()]
        sizes = [tensor.numel() * tensor.element_size() for tensor in local]
        self._names, self._sizes = list(tensors), sizes
        self._offsets = list(aligned_offsets(sizes))
        self._bytes = self._offsets[-1] + sizes[-1] if sizes else 0
        self._folder = folder
        self.signature = _signature(tensors)
        """What state this is a part of: ranks with the same one are replicas of each other."""
        self.kept: tuple[int, ...] = ()
        """Numbers of snapshots that no new one takes the place of."""
        size = _TENSORS_AT + self._bytes + _SCALAR_BYTES
        self._slots = [_Slot(folder / f"{rank:06d}-{number}", size) for number in range(slots)]
        self._views = [
            [_view(slot, at, tensor) for at, tensor in zip(self._offsets, local, strict=True)] for slot in self._slots
        ]
        self.taken = 0
        """Number of the newest snapshot of the run, as far as this rank knows."""
        self.fetch_error = ""
        """Why a snapshot in another host's memory could not be restored, with that host; empty if none was needed."""

    def take(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> None:
        """Copy the state; when this returns, it outlives this process."""
        number = self.taken + 1
        free = self._oldest_slot()
        slot, views = self._slots[free], self._views[free]
        slot.write_header(_Header(0, 0, 0, 0, 0, b""))
        with torch.no_grad():  # else each shard of a DTensor becomes a node of a graph, which takes a third of the time
            foreach_copy_(views, [local_tensor(tensor) for tensor in tensors.values()])
        text = json.dumps(dict(scalars)).encode()
        if len(text) > _SCALAR_BYTES:
            raise SnapshotError(f"the scalars of a state must have at most {_SCALAR_BYTES} bytes, but have {len(text)}")
        at = _TENSORS_AT + self._bytes
        slot.memory[at : at + len(text)] = text
        crc = crc32c(slot.view[_TENSORS_AT:at])
        slot.write_header(_Header(number, self._bytes, len(text), crc, crc32c(text), self.signature))
        self.taken = number

    def newest(self) -> memoryview:
        """The newest snapshot as bytes, which stay as they are as long as its number is `kept`."""
        slot = self._newest_slot
        return slot.view[: _TENSORS_AT + self._bytes + slot.read_header().scalar_bytes]

    def checksum(self, besides: Collection[str] = ()) -> int:
        """Of the tensors in the newest snapshot, but for some."""
        slot = self._newest_slot
        if not besides:
            return slot.read_header().tensor_crc
        crc = 0
        for name, at, size in zip(self._names, self._offsets, self._sizes, strict=True):
            if name not in besides:
                crc = crc32c(slot.view[_TENSORS_AT + at : _TENSORS_AT + at + size], crc)
        return crc

    def drop_newest(self) -> None:
        """Take the newest snapshot back: the one before is the newest now."""
        self._newest_slot.write_header(_Header(0, 0, 0, 0, 0, b""))

    @property
    def _newest_slot(self) -> "_Slot":
        return next(slot for slot in self._slots if slot.read_header().number == self.taken)

    def restore(
        self, tensors: Mapping[str, Tensor], world: World, peers: PeerSnapshots | None = None
    ) -> dict[str, Any] | None:
        """Fill the tensors with the newest state that every rank can have; its scalars, None if there is none.

        Called by all ranks together. What is not in this host's memory is read from that of `peers`.
        """
        whole = self._whole()
        number, highest = _newest_of_all(world, whole)
        if not number and peers is not None:
            peers.announce(_files_in(self._folder))
            world.barrier()  # all ranks have announced before any rank looks
            elsewhere = peers.find(self.signature)
            number, highest = _newest_of_all(world, {**elsewhere, **whole})
            if number and number not in whole:
                self._fetch(peers, elsewhere[number])
                whole = self._whole()
                if number not in whole:
                    self.fetch_error = self.fetch_error or f"{elsewhere[number][0]}: what arrived is damaged"
            if world.any_rank(number not in whole):  # the only copy is damaged, or its host has just died too
                number = 0
        self.taken = number or highest  # what comes is newer than whatever is found here later
        if not number:
            return None
        for newer in (each for each in self._slots if each.read_header().number > number):
            newer.write_header(_Header(0, 0, 0, 0, 0, b""))  # another of that number will come, and is not this one
        slot = whole[number]
        with torch.no_grad():
            local = [local_tensor(tensor) for tensor in tensors.values()]
            foreach_copy_(local, self._views[self._slots.index(slot)])
        at = _TENSORS_AT + self._bytes
        scalars: dict[str, Any] = json.loads(slot.memory[at : at + slot.read_header().scalar_bytes])
        return scalars

    def _fetch(self, peers: PeerSnapshots, place: tuple[str, str]) -> None:
        """Read a snapshot from another host's memory; one that does not arrive is not whole."""
        slot = self._slots[self._oldest_slot()]
        slot.write_header(_Header(0, 0, 0, 0, 0, b""))
        try:
            peers.read_into(place, slot.view)
        except OSError as error:
            self.fetch_error = f"{place[0]}: {error}"

    def _oldest_slot(self) -> int:
        """The slot whose content is worth least."""
        numbers = [slot.read_header().number for slot in self._slots]
        return min((number, at) for at, number in enumerate(numbers) if not number or number not in self.kept)[1]

    def _whole(self) -> dict[int, "_Slot"]:
        """The snapshots that are complete, intact and of tensors such as these, by number."""
        found = {}
        for slot in self._slots:
            header = slot.read_header()
            end = _TENSORS_AT + self._bytes
            if (
                header.number
                and header.signature == self.signature
                and crc32c(slot.view[_TENSORS_AT:end]) == header.tensor_crc
                and crc32c(slot.view[end : end + header.scalar_bytes]) == header.scalar_crc
            ):
                found[header.number] = slot
        return found

    def close(self) -> None:
        """Let go of the memory, which stays for whoever comes next."""
        self._views.clear()
        for slot in self._slots:
            slot.close()


class _Slot:
    """One buffer: a file in memory, locked as long as its process lives."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(self._descriptor).st_size != size:
                os.ftruncate(self._descriptor, 0)
                os.posix_fallocate(self._descriptor, 0, size)  # fails here if memory is full, not at a page fault
            self.memory = mmap.mmap(self._descriptor, size, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        except BaseException:
            os.close(self._descriptor)
            raise
        self.view = memoryview(self.memory)

    def write_header(self, header: _Header) -> None:
        """Say what the buffer holds."""
        fields = (header.number, header.tensor_bytes, header.scalar_bytes, header.tensor_crc, header.scalar_crc)
        _HEADER.pack_into(self.memory, 0, _MAGIC, *fields, header.signature)

    def read_header(self) -> _Header:
        """What it says it holds; number 0 if nothing."""
        magic, *fields = _HEADER.unpack_from(self.memory)
        return _Header(*fields) if magic == _MAGIC else _Header(0, 0, 0, 0, 0, b"")

    def close(self) -> None:
        """Unlock it; tensors that still view it keep it mapped, and a descriptor of the mapping's own open."""
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)


def _view(slot: _Slot, offset: int, like: Tensor) -> Tensor:
    """A tensor in a buffer's memory."""
    if not like.numel():
        return torch.empty_like(like, device="cpu")
    flat = torch.frombuffer(slot.memory, dtype=like.dtype, count=like.numel(), offset=_TENSORS_AT + offset)
    return flat.view(like.shape)


def _files_in(folder: Path) -> Iterator[tuple[bytes, int, str]]:
    """The snapshots in a host's memory, of whichever ranks: what they are of, number, and name."""
    for path in folder.glob("[0-9]*-[0-9]"):
        with path.open("rb") as file:
            head = file.read(_HEADER.size)
        if len(head) == _HEADER.size and head.startswith(_MAGIC):
            _, number, *_, signature = _HEADER.unpack(head)
            if number:
                yield signature, number, path.name


def _newest_of_all(world: World, numbers: Collection[int]) -> tuple[int, int]:
    """The highest number that all ranks have, 0 if there is none; and the highest that any has."""
    highest = world.all_reduce_ints([max(numbers, default=0)], "max")[0]
    window = range(highest, max(0, highest - _WINDOW), -1)
    common = world.all_reduce_ints([int(number in numbers) for number in window], "min") if window else []
    return next((number for number, on_all in zip(window, common, strict=True) if on_all), 0), highest


def _signature(tensors: Mapping[str, Tensor]) -> bytes:
    """Which boxes of which tensors a snapshot is of: a state with others is another state."""
    lines = [f"{each.name} {each.dtype} {each.shape} {each.box}" for each in local_shards(tensors)]
    return blake2b("\n".join(lines).encode(), digest_size=16).digest()
