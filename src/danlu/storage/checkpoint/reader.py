"""Read a checkpoint: walk its tree, fetch chunks, check every one. Nothing here needs torch."""

import mmap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

from danlu.storage.checkpoint.boxes import Box, overlap, volume
from danlu.storage.checkpoint.commit import folder_of
from danlu.storage.checkpoint.manifest import (
    ITEMSIZE,
    LARGEST_TEXT,
    MANIFEST,
    Chunk,
    Damaged,
    Leaf,
    Manifest,
    Node,
    Tensor,
    Under,
    open_child,
    open_manifest,
)
from danlu.storage.checkpoint.tree import same, within_reach
from danlu.storage.hashing import crc32c
from danlu.storage.store import Store

RUN_BYTES = 32 << 20
"""Chunks that lie one after the other are read together, up to this many bytes."""
_GAP = 64 << 10
_PAGE = 4096
_THREADS = 4
T = TypeVar("T", Leaf, Node)


@dataclass(frozen=True)
class Stored:
    """A chunk, with the pack it is in and the bytes it has there."""

    name: str
    pack: str
    chunk: Chunk
    bytes: int
    pack_bytes: int


class Take(Protocol):
    """What is done with a chunk whose bytes are there; it answers with their crc32c."""

    def __call__(self, stored: Stored, content: memoryview) -> int:
        """Called once for every chunk, in threads; `content` is valid until it returns."""
        ...


def only_hash(stored: Stored, content: memoryview) -> int:
    """Take nothing: to verify."""
    return crc32c(content)


class Reader:
    """One checkpoint in a store. Every text is held against its parent, every chunk against its leaf."""

    def __init__(self, store: Store, step: int) -> None:
        self.store = store
        self.folder = folder_of(step)
        self._buffers = _Buffers()
        path = f"{self.folder}/{MANIFEST}"
        self.manifest: Manifest = open_manifest(self._text(path, LARGEST_TEXT), f"{store.name}/{path}")
        if self.manifest.step != step:
            raise Damaged(f"{store.name}/{path} must be of step {step}, but is of step {self.manifest.step}")

    def find(self, wanted: Mapping[str, Sequence[Box]] | None = None) -> list[Stored]:
        """Chunks that hold something of what is wanted (boxes by name), or all; by pack and place in it."""
        found = [each for leaf in self.leaves(wanted) for each in _of(leaf, wanted)]
        return sorted(found, key=lambda each: (each.pack, each.chunk.at))

    def leaves(self, wanted: Mapping[str, Sequence[Box]] | None = None) -> Iterator[Leaf]:
        """Leaves that may hold something of what is wanted."""
        yield from self._below(self.manifest, wanted, set())

    def fetch(self, chunks: Sequence[Stored], take: Take, on_bytes: Callable[[int], None] = lambda done: None) -> None:
        """Read chunks, several runs at a time, and hand each to `take`; `Damaged` names those that are not right."""
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="danlu-read") as pool:
            packs = sorted({(stored.pack, stored.pack_bytes) for stored in chunks})
            wrong = [line for line in pool.map(lambda pack: self._not_whole(*pack), packs) if line]
            if not wrong:
                outcomes = pool.map(lambda run: self._fetch_run(run, take, on_bytes), _runs(chunks))
                wrong = [line for lines in outcomes for line in lines]
        if wrong:
            more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise Damaged(f"{self.store.name}/{self.folder}: " + "; ".join(wrong[:5]) + more)

    def _not_whole(self, pack: str, expected: int) -> str:
        """What is wrong with a pack's length; asked before memory is taken for what a leaf says is in it."""
        path = f"{self.folder}/{pack}"
        try:
            size = self.store.size(path)
        except OSError as error:
            return f"{path} cannot be read: {error}"
        return "" if size == expected else f"{path} must have {expected} bytes, but has {size}"

    def _fetch_run(self, run: Sequence[Stored], take: Take, on_bytes: Callable[[int], None]) -> list[str]:
        # From a page on, so that a store can read past the cache straight into the buffer.
        start, end = run[0].chunk.at // _PAGE * _PAGE, run[-1].chunk.at + run[-1].bytes
        path = f"{self.folder}/{run[0].pack}"
        try:
            content = self._buffers.of(end - start)
            self.store.read_into(path, start, content)
        except (OSError, EOFError) as error:
            return [f"{path} cannot be read from byte {start} to {end}: {error}"]
        wrong = []
        for stored in run:
            at = stored.chunk.at - start
            found = take(stored, content[at : at + stored.bytes])
            if found != stored.chunk.crc32c:
                wrong.append(
                    f"{path} is damaged in bytes {stored.chunk.at} to {stored.chunk.at + stored.bytes}, {stored.name}"
                    f"{list(stored.chunk.offset)}: crc32c must be {stored.chunk.crc32c:08x}, but is {found:08x}"
                )
        on_bytes(end - start)
        return wrong

    def _below(self, node: Node, wanted: Mapping[str, Sequence[Box]] | None, seen: set[str]) -> Iterator[Leaf]:
        children = node.children if wanted is None else within_reach(node, wanted)
        for under in children:
            path = f"{self.folder}/{under.file}"
            where = f"{self.store.name}/{path}"
            if under.file in seen:  # eight levels of 64 times the same child would never end
                raise Damaged(f"{where} must be named once, but is named again")
            seen.add(under.file)
            text = self._child(path, under)
            if node.level == 1:
                yield self._own(open_child(Leaf, text, under, where), under)
            else:
                child = self._own(open_child(Node, text, under, where), under)
                if child.level != node.level - 1:
                    raise Damaged(f"{where} must be a node of level {node.level - 1}, but is of level {child.level}")
                yield from self._below(child, wanted, seen)

    def _own(self, child: T, under: Under) -> T:
        if (child.step, child.attempt) != (self.manifest.step, self.manifest.attempt):
            raise Damaged(f"{self.folder}/{under.file} must belong to attempt {self.manifest.attempt}, but does not")
        whole: Mapping[str, Tensor] = self.manifest.tensors
        for name, tensor in child.tensors.items():
            if name not in whole or not same(whole[name], tensor):
                raise Damaged(f"{self.folder}/{under.file} must have tensor {name[:80]} as the manifest has it")
        return child

    def _child(self, path: str, under: Under) -> bytes:
        try:
            return self._text(path, under.bytes)
        except (FileNotFoundError, EOFError) as error:
            raise Damaged(f"{self.store.name}/{self.folder} lacks a file that it names: {error}") from None

    def _text(self, path: str, most: int) -> bytes:
        if (size := self.store.size(path)) > most:
            raise Damaged(f"{self.store.name}/{path} must have at most {most} bytes, but has {size}")
        return self.store.read(path)


class _Buffers(threading.local):
    """One buffer a thread, on a page, used again and again: fresh memory costs more than a read."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, RUN_BYTES + _PAGE)

    def of(self, length: int) -> memoryview:
        """A buffer of this length; the one before it is no longer valid."""
        if length > len(self._map):
            self._map = mmap.mmap(-1, length)
        return memoryview(self._map)[:length]


def _of(leaf: Leaf, wanted: Mapping[str, Sequence[Box]] | None) -> Iterator[Stored]:
    for name, held in leaf.tensors.items():
        boxes = None if wanted is None else wanted.get(name, ())
        for chunk in held.chunks:
            if boxes is None or any(overlap(chunk.box, box) for box in boxes):
                yield Stored(name, leaf.pack, chunk, volume(chunk.size) * ITEMSIZE[held.dtype], leaf.bytes)


def _runs(chunks: Sequence[Stored]) -> Iterator[list[Stored]]:
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
