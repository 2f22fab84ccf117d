"""Read a checkpoint: walk its tree, fetch chunks, check every one. Nothing here needs torch."""

import mmap
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from danlu.storage.checkpoint.boxes import Box, overlap, volume
from danlu.storage.checkpoint.commit import folder_of
from danlu.storage.checkpoint.manifest import (
    ITEMSIZE,
    Chunk,
    Damaged,
    Leaf,
    Manifest,
    Node,
    Tensor,
    Under,
    open_child,
)
from danlu.storage.checkpoint.parity_packs import Copies, mended
from danlu.storage.checkpoint.texts import Open, manifest_of, whole_text
from danlu.storage.checkpoint.tree import same, within_reach
from danlu.storage.hashing import crc32c
from danlu.storage.store import Store

RUN_BYTES = 32 << 20
"""Chunks that lie one after the other are read together, up to this many bytes."""
_GAP = 64 << 10
_PAGE = 4096
_THREADS = 4


@dataclass(frozen=True)
class Stored:
    """A chunk, with the pack it is in and the bytes it has there."""

    name: str
    pack: str
    chunk: Chunk
    bytes: int
    pack_bytes: int
    """Length of the whole pack."""

    def damaged(self, path: str, found: int) -> str:
        """What to say of it when its bytes in `path` have another crc32c."""
        return (
            f"{path} is damaged in bytes {self.chunk.at} to {self.chunk.at + self.bytes}, {self.name}"
            f"{list(self.chunk.offset)}: crc32c must be {self.chunk.crc32c:08x}, but is {found:08x}"
        )


class Unreadable(OSError):  # noqa: N818 - it is what the checkpoint is at present
    """A store could not be asked for a checkpoint; what it holds may well be right."""


@dataclass(frozen=True)
class Fault:
    """Something of a checkpoint that is not as it was written, or could not be read."""

    tensor: str
    """Whose bytes are concerned; several names are joined by commas, none is empty."""
    file: str
    message: str
    passing: bool = False
    """Whether it may be otherwise another time: the store failed, and nothing is known of what it holds."""


class Take(Protocol):
    """What is done with a chunk whose bytes are there; it answers with their crc32c."""

    def __call__(self, stored: Stored, content: memoryview) -> int:
        """Called once for every chunk, in threads; `content` is valid until it returns."""
        ...


def only_hash(stored: Stored, content: memoryview) -> int:
    """Take nothing: to verify."""
    return crc32c(content)


class Reader:
    """One checkpoint in a store. Every text is held against its parent, every chunk against its leaf.

    A chunk is taken from the nearest copy of its pack that has it right; one that no copy has is mended from parity.
    """

    def __init__(self, store: Store, step: int, copies: Copies = lambda path: ()) -> None:
        """`copies` names stores that may hold a file (`step-…/….pack`) nearer than `store`, nearest first."""
        self.store = store
        self.folder = folder_of(step)
        self.read_from: Counter[str] = Counter()
        """Bytes of chunks, by the store they came from."""
        self.mended: list[str] = []
        """Chunks that were damaged or lost in one place and taken from another."""
        self._copies = copies
        self._buffers = _Buffers()
        self.manifest: Manifest = manifest_of(store, step, self.mended.append)

    def find(self, wanted: Mapping[str, Sequence[Box]] | None = None) -> list[Stored]:
        """Chunks that hold something of what is wanted (boxes by name), or all; by pack and place in it."""
        found = [each for leaf in self.leaves(wanted) for each in chunks_of(leaf, wanted)]
        return sorted(found, key=lambda each: (each.pack, each.chunk.at))

    def leaves(self, wanted: Mapping[str, Sequence[Box]] | None = None) -> Iterator[Leaf]:
        """Leaves that may hold something of what is wanted."""
        yield from self._below(self.manifest, wanted, set())

    def fetch(self, chunks: Sequence[Stored], take: Take, on_bytes: Callable[[int], None] = lambda done: None) -> None:
        """Read chunks, several runs at a time, and hand each to `take`; `Damaged` names those that are not right."""
        wrong = self.faults(chunks, take, on_bytes)
        if wrong:
            more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            message = "; ".join(fault.message for fault in wrong[:5]) + more
            raise Unreadable(message) if all(fault.passing for fault in wrong) else Damaged(message)

    def faults(
        self, chunks: Sequence[Stored], take: Take = only_hash, on_bytes: Callable[[int], None] = lambda done: None
    ) -> list[Fault]:
        """The same, with everything that is not right as a list; empty if all is as it was written."""
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="danlu-read") as pool:
            outcomes = pool.map(lambda run: self._fetch_run(run, take, on_bytes), runs_of(chunks))
            return [fault for faults in outcomes for fault in faults]

    def child(self, node: Node, under: Under) -> Leaf | Node:
        """A leaf or node, as its parent `node` names it; `Damaged` if it is not that."""
        path = f"{self.folder}/{under.file}"
        try:
            return whole_text(self.store, path, under.bytes, self.opener(node, under), self.mended.append)
        except (FileNotFoundError, EOFError) as error:
            raise Damaged(f"{self.store.name}/{self.folder} lacks a file that it names: {error}") from None

    def opener(self, node: Node, under: Under) -> Open[Leaf | Node]:
        """What makes a leaf or node of a text, as its parent `node` names it."""
        kind: type[Leaf] | type[Node] = Leaf if node.level == 1 else Node

        def opened(text: bytes, where: str) -> Leaf | Node:
            child = self._own(open_child(kind, text, under, where), under)
            if isinstance(child, Node) and child.level != node.level - 1:
                raise Damaged(f"{where} must be a node of level {node.level - 1}, but is of level {child.level}")
            return child

        return opened

    def _fetch_run(self, run: Sequence[Stored], take: Take, on_bytes: Callable[[int], None]) -> list[Fault]:
        """Take the chunks of a run from the nearest copies that have them; what is wrong with those that nobody has."""
        path = f"{self.folder}/{run[0].pack}"
        wrong: dict[Stored, Fault] = {}
        missing = list(run)
        for store in (*self._copies(path), self.store):
            found = self._from_copy(store, path, missing, take)
            for stored in missing:
                if stored not in found:
                    self.read_from[store.name] += stored.bytes
                    if stored in wrong:
                        self.mended.append(f"{wrong[stored].message}; taken from {store.name}")
            wrong |= found
            missing = list(found)
            if not missing:
                break
        left = [stored for stored in missing if not self._from_parity(stored, take, wrong[stored])]
        on_bytes(sum(stored.bytes for stored in run))
        return list(dict.fromkeys(wrong[stored] for stored in left))

    def _from_copy(self, store: Store, path: str, run: Sequence[Stored], take: Take) -> dict[Stored, Fault]:
        """Read a run from one store; the chunks that are not right there, and why."""
        # From a page on, so that a store can read past the cache straight into the buffer.
        start, end = run[0].chunk.at // _PAGE * _PAGE, run[-1].chunk.at + run[-1].bytes
        try:
            size, whole = store.size(path), run[0].pack_bytes
            if size < end or (store is self.store and size != whole):  # before memory is taken for it
                raise EOFError(f"it must have {whole} bytes, but has {size}")
            content = self._buffers.of(end - start)
            store.read_into(path, start, content)
        except (OSError, EOFError) as error:
            names = ", ".join(sorted({stored.name for stored in run}))
            message = f"{store.name}/{path} cannot be read from byte {start} to {end}: {error}"
            passing = isinstance(error, OSError) and not isinstance(error, FileNotFoundError)
            return dict.fromkeys(run, Fault(names, path, message, passing))
        wrong = {}
        for stored in run:
            at = stored.chunk.at - start
            crc = take(stored, content[at : at + stored.bytes])
            if crc != stored.chunk.crc32c:
                wrong[stored] = Fault(stored.name, path, stored.damaged(f"{store.name}/{path}", crc))
        return wrong

    def _from_parity(self, stored: Stored, take: Take, was: Fault) -> bool:
        """Work a chunk out from the other packs of its group."""
        path = f"{self.folder}/{stored.pack}"
        for content in mended(self.store, self._copies, path, stored.chunk.at, stored.bytes):
            if crc32c(content) == stored.chunk.crc32c and take(stored, memoryview(content)) == stored.chunk.crc32c:
                self.mended.append(f"{was.message}; mended from parity")
                return True
        return False

    def _below(self, node: Node, wanted: Mapping[str, Sequence[Box]] | None, seen: set[str]) -> Iterator[Leaf]:
        children = node.children if wanted is None else within_reach(node, wanted)
        for under in children:
            if under.file in seen:  # eight levels of 64 times the same child would never end
                raise Damaged(f"{self.store.name}/{self.folder}/{under.file} must be named once, but is named again")
            seen.add(under.file)
            child = self.child(node, under)
            if isinstance(child, Leaf):
                yield child
            else:
                yield from self._below(child, wanted, seen)

    def _own(self, child: Leaf | Node, under: Under) -> Leaf | Node:
        if (child.step, child.attempt) != (self.manifest.step, self.manifest.attempt):
            raise Damaged(f"{self.folder}/{under.file} must belong to attempt {self.manifest.attempt}, but does not")
        whole: Mapping[str, Tensor] = self.manifest.tensors
        for name, tensor in child.tensors.items():
            if name not in whole or not same(whole[name], tensor):
                raise Damaged(f"{self.folder}/{under.file} must have tensor {name[:80]} as the manifest has it")
        return child


class _Buffers(threading.local):
    """One buffer a thread, on a page, used again and again: fresh memory costs more than a read."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, RUN_BYTES + _PAGE)

    def of(self, length: int) -> memoryview:
        """A buffer of this length; the one before it is no longer valid."""
        if length > len(self._map):
            self._map = mmap.mmap(-1, length)
        return memoryview(self._map)[:length]


def chunks_of(leaf: Leaf, wanted: Mapping[str, Sequence[Box]] | None = None) -> Iterator[Stored]:
    """What a leaf lists, or what of it is wanted."""
    for name, held in leaf.tensors.items():
        boxes = None if wanted is None else wanted.get(name, ())
        for chunk in held.chunks:
            if boxes is None or any(overlap(chunk.box, box) for box in boxes):
                yield Stored(name, leaf.pack, chunk, volume(chunk.size) * ITEMSIZE[held.dtype], leaf.bytes)


def padding_of(leaf: Leaf) -> Iterator[Stored]:
    """The bytes of a pack that belong to no tensor, as chunks of zeros: to be checked and mended like the others."""
    end = 0
    for stored in sorted(chunks_of(leaf), key=lambda each: each.chunk.at):
        if (gap := stored.chunk.at - end) >= _PAGE:  # before memory is taken for so many zeros
            raise Damaged(f"{leaf.pack} must have less than {_PAGE} bytes between its chunks, but has {gap}")
        if gap > 0:
            zeros = Chunk(offset=(0,), size=(gap,), at=end, crc32c=crc32c(bytes(gap)))
            yield Stored("(padding)", leaf.pack, zeros, gap, leaf.bytes)
        end = max(end, stored.chunk.at + stored.bytes)


def runs_of(chunks: Sequence[Stored]) -> Iterator[list[Stored]]:
    """Chunks of a pack that lie close together."""
    run: list[Stored] = []
    for stored in chunks:
        if run:
            last = run[-1]
            near = stored.pack == last.pack and stored.chunk.at - (last.chunk.at + last.bytes) <= _GAP
            if not near or stored.chunk.at + stored.bytes - run[0].chunk.at > RUN_BYTES:
                yield run
                run = []
        run.append(stored)
    if run:
        yield run
