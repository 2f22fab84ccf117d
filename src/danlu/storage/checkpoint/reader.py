"""Read a checkpoint: walk its tree, read chunks, verify every one. Nothing here needs torch."""

import mmap
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from danlu.storage.checkpoint.boxes import Box, intersect, numel
from danlu.storage.checkpoint.commit import step_folder
from danlu.storage.checkpoint.hash_tree import children_overlapping, same_dtype_and_shape
from danlu.storage.checkpoint.manifest import (
    ITEMSIZE,
    ChildRef,
    Chunk,
    CorruptCheckpointError,
    Leaf,
    Manifest,
    TensorMeta,
    TreeNode,
    parse_child,
)
from danlu.storage.checkpoint.metadata_files import MetadataParser, read_manifest, read_metadata
from danlu.storage.checkpoint.parity_groups import ReplicaLookup, reconstruct_candidates
from danlu.storage.store.base import Store
from danlu.storage.store.checksum import crc32c

MAX_READ_BYTES = 32 << 20
"""Adjacent chunks are read together, up to this many bytes."""
_MAX_GAP_BYTES = 64 << 10
_PAGE = 4096
_THREADS = 4


@dataclass(frozen=True)
class StoredChunk:
    """A chunk, with its pack and its length there."""

    name: str
    pack: str
    chunk: Chunk
    bytes: int
    pack_bytes: int
    """Length of the pack."""

    def mismatch_message(self, path: str, found: int) -> str:
        """The message for bytes in `path` that have another crc32c."""
        return (
            f"{path} is corrupt in bytes {self.chunk.at} to {self.chunk.at + self.bytes}, {self.name}"
            f"{list(self.chunk.offset)}: crc32c must be {self.chunk.crc32c:08x}, but is {found:08x}"
        )


class CheckpointUnavailableError(OSError):
    """The store failed to return a checkpoint, which may well be intact."""


@dataclass(frozen=True)
class Fault:
    """A part of a checkpoint that is not as written, or could not be read."""

    tensor: str
    """The affected tensor; several names are joined by commas, empty if none."""
    file: str
    message: str
    passing: bool = False
    """Transient: the store failed; a retry may succeed."""


class ChunkConsumer(Protocol):
    """Processes a chunk whose bytes were read; returns their crc32c."""

    def __call__(self, stored: StoredChunk, content: memoryview) -> int:
        """Called once for every chunk, in threads; `content` is valid until it returns."""
        ...


def hash_only(stored: StoredChunk, content: memoryview) -> int:
    """Only compute the crc32c, to verify."""
    return crc32c(content)


class CheckpointReader:
    """One checkpoint in a store. Every metadata file is verified against its parent, every chunk against its leaf.

    A chunk is read from the nearest replica of its pack that has it intact, or else reconstructed from parity.
    """

    def __init__(self, store: Store, step: int, replicas: ReplicaLookup = lambda path: ()) -> None:
        """`replicas` gives the stores that may have a file (`step-…/….pack`) nearer than `store`, nearest first."""
        self.store = store
        self.folder = step_folder(step)
        self.bytes_by_store: Counter[str] = Counter()
        """Bytes of chunks, by the store they came from."""
        self.repairs: list[str] = []
        """Chunks that were corrupt or lost, and read from a replica or parity."""
        self._replicas = replicas
        self._buffers = _ThreadBuffer()
        self.manifest: Manifest = read_manifest(store, step, self.repairs.append)

    def find_chunks(self, wanted: Mapping[str, Sequence[Box]] | None = None) -> list[StoredChunk]:
        """Chunks that overlap the wanted boxes (by name), or all; sorted by pack and offset."""
        found = [each for leaf in self.leaves(wanted) for each in iter_chunks(leaf, wanted)]
        return sorted(found, key=lambda each: (each.pack, each.chunk.at))

    def leaves(self, wanted: Mapping[str, Sequence[Box]] | None = None) -> Iterator[Leaf]:
        """Leaves whose chunks may overlap the wanted boxes."""
        yield from self._walk_leaves(self.manifest, wanted, set())

    def read_chunks(
        self, chunks: Sequence[StoredChunk], consume: ChunkConsumer, on_bytes: Callable[[int], None] = lambda done: None
    ) -> None:
        """Read chunks, several runs at a time, and pass each to `consume`; `CorruptCheckpointError` names bad ones."""
        wrong = self.check_chunks(chunks, consume, on_bytes)
        if wrong:
            more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            message = "; ".join(fault.message for fault in wrong[:5]) + more
            raise (
                CheckpointUnavailableError(message)
                if all(fault.passing for fault in wrong)
                else CorruptCheckpointError(message)
            )

    def check_chunks(
        self,
        chunks: Sequence[StoredChunk],
        consume: ChunkConsumer = hash_only,
        on_bytes: Callable[[int], None] = lambda done: None,
    ) -> list[Fault]:
        """The same, but returns the faults as a list; empty if everything is as written."""
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="danlu-read") as pool:
            outcomes = pool.map(lambda run: self._read_run(run, consume, on_bytes), group_adjacent(chunks))
            return [fault for faults in outcomes for fault in faults]

    def read_child(self, node: TreeNode, ref: ChildRef) -> Leaf | TreeNode:
        """A leaf or node, as its parent `node` names it; `CorruptCheckpointError` if it is not that."""
        path = f"{self.folder}/{ref.file}"
        try:
            return read_metadata(self.store, path, ref.bytes, self.child_parser(node, ref), self.repairs.append)
        except (FileNotFoundError, EOFError) as error:
            raise CorruptCheckpointError(
                f"{self.store.name}/{self.folder} lacks a file that it names: {error}"
            ) from None

    def child_parser(self, node: TreeNode, ref: ChildRef) -> MetadataParser[Leaf | TreeNode]:
        """A parser for a leaf or node that accepts only what its parent `node` names."""
        kind: type[Leaf] | type[TreeNode] = Leaf if node.level == 1 else TreeNode

        def parse(text: bytes, where: str) -> Leaf | TreeNode:
            child = self._check_belongs(parse_child(kind, text, ref, where), ref)
            if isinstance(child, TreeNode) and child.level != node.level - 1:
                raise CorruptCheckpointError(
                    f"{where} must be a node of level {node.level - 1}, but is of level {child.level}"
                )
            return child

        return parse

    def _read_run(
        self, run: Sequence[StoredChunk], consume: ChunkConsumer, on_bytes: Callable[[int], None]
    ) -> list[Fault]:
        """Read the chunks of a run from the nearest replicas that have them; returns faults of those that none has."""
        path = f"{self.folder}/{run[0].pack}"
        wrong: dict[StoredChunk, Fault] = {}
        missing = list(run)
        for store in (*self._replicas(path), self.store):
            found = self._read_from_store(store, path, missing, consume)
            for stored in missing:
                if stored not in found:
                    self.bytes_by_store[store.name] += stored.bytes
                    if stored in wrong:
                        self.repairs.append(f"{wrong[stored].message}; read from {store.name}")
            wrong |= found
            missing = list(found)
            if not missing:
                break
        left = [stored for stored in missing if not self._read_from_parity(stored, consume, wrong[stored])]
        on_bytes(sum(stored.bytes for stored in run))
        return list(dict.fromkeys(wrong[stored] for stored in left))

    def _read_from_store(
        self, store: Store, path: str, run: Sequence[StoredChunk], consume: ChunkConsumer
    ) -> dict[StoredChunk, Fault]:
        """Read a run from one store; returns the chunks that are not intact there, and why."""
        # From a page boundary, so that a store can read with O_DIRECT straight into the buffer.
        start, end = run[0].chunk.at // _PAGE * _PAGE, run[-1].chunk.at + run[-1].bytes
        try:
            size, expected = store.size(path), run[0].pack_bytes
            if size < end or (store is self.store and size != expected):  # before allocating memory for it
                raise EOFError(f"it must have {expected} bytes, but has {size}")
            content = self._buffers.get(end - start)
            store.read_into(path, start, content)
        except (OSError, EOFError) as error:
            names = ", ".join(sorted({stored.name for stored in run}))
            message = f"{store.name}/{path} cannot be read from byte {start} to {end}: {error}"
            passing = isinstance(error, OSError) and not isinstance(error, FileNotFoundError)
            return dict.fromkeys(run, Fault(names, path, message, passing))
        wrong = {}
        for stored in run:
            at = stored.chunk.at - start
            crc = consume(stored, content[at : at + stored.bytes])
            if crc != stored.chunk.crc32c:
                wrong[stored] = Fault(stored.name, path, stored.mismatch_message(f"{store.name}/{path}", crc))
        return wrong

    def _read_from_parity(self, stored: StoredChunk, consume: ChunkConsumer, was: Fault) -> bool:
        """Reconstruct a chunk from the other packs of its group."""
        path = f"{self.folder}/{stored.pack}"
        for content in reconstruct_candidates(self.store, self._replicas, path, stored.chunk.at, stored.bytes):
            if crc32c(content) == stored.chunk.crc32c and consume(stored, memoryview(content)) == stored.chunk.crc32c:
                self.repairs.append(f"{was.message}; reconstructed from parity")
                return True
        return False

    def _walk_leaves(
        self, node: TreeNode, wanted: Mapping[str, Sequence[Box]] | None, seen: set[str]
    ) -> Iterator[Leaf]:
        children = node.children if wanted is None else children_overlapping(node, wanted)
        for ref in children:
            if ref.file in seen:  # eight levels of 64 times the same child would never end
                raise CorruptCheckpointError(
                    f"{self.store.name}/{self.folder}/{ref.file} must be named once, but is named again"
                )
            seen.add(ref.file)
            child = self.read_child(node, ref)
            if isinstance(child, Leaf):
                yield child
            else:
                yield from self._walk_leaves(child, wanted, seen)

    def _check_belongs(self, child: Leaf | TreeNode, ref: ChildRef) -> Leaf | TreeNode:
        if (child.step, child.attempt) != (self.manifest.step, self.manifest.attempt):
            raise CorruptCheckpointError(
                f"{self.folder}/{ref.file} must belong to attempt {self.manifest.attempt}, but does not"
            )
        tensors: Mapping[str, TensorMeta] = self.manifest.tensors
        for name, tensor in child.tensors.items():
            if name not in tensors or not same_dtype_and_shape(tensors[name], tensor):
                raise CorruptCheckpointError(
                    f"{self.folder}/{ref.file} must have tensor {name[:80]} as the manifest has it"
                )
        return child


class _ThreadBuffer(threading.local):
    """One page-aligned buffer per thread, reused: fresh memory costs more than a read."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, MAX_READ_BYTES + _PAGE)

    def get(self, length: int) -> memoryview:
        """A buffer of this length; the previous one is no longer valid."""
        if length > len(self._map):
            self._map = mmap.mmap(-1, length)
        return memoryview(self._map)[:length]


def iter_chunks(leaf: Leaf, wanted: Mapping[str, Sequence[Box]] | None = None) -> Iterator[StoredChunk]:
    """The chunks of a leaf, or those that overlap the wanted boxes."""
    for name, shard in leaf.tensors.items():
        boxes = None if wanted is None else wanted.get(name, ())
        for chunk in shard.chunks:
            if boxes is None or any(intersect(chunk.box, box) for box in boxes):
                yield StoredChunk(name, leaf.pack, chunk, numel(chunk.size) * ITEMSIZE[shard.dtype], leaf.bytes)


def iter_padding(leaf: Leaf) -> Iterator[StoredChunk]:
    """The padding of a pack, as chunks of zeros: verified and repaired like the others."""
    end = 0
    for stored in sorted(iter_chunks(leaf), key=lambda each: each.chunk.at):
        if (gap := stored.chunk.at - end) >= _PAGE:  # before allocating so many zeros
            raise CorruptCheckpointError(
                f"{leaf.pack} must have less than {_PAGE} bytes between its chunks, but has {gap}"
            )
        if gap > 0:
            zeros = Chunk(offset=(0,), size=(gap,), at=end, crc32c=crc32c(bytes(gap)))
            yield StoredChunk("(padding)", leaf.pack, zeros, gap, leaf.bytes)
        end = max(end, stored.chunk.at + stored.bytes)


def group_adjacent(chunks: Sequence[StoredChunk]) -> Iterator[list[StoredChunk]]:
    """Groups of chunks that are close together in a pack."""
    run: list[StoredChunk] = []
    for stored in chunks:
        if run:
            last = run[-1]
            near = stored.pack == last.pack and stored.chunk.at - (last.chunk.at + last.bytes) <= _MAX_GAP_BYTES
            if not near or stored.chunk.at + stored.bytes - run[0].chunk.at > MAX_READ_BYTES:
                yield run
                run = []
        run.append(stored)
    if run:
        yield run
