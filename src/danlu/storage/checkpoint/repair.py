"""Repair a corrupt checkpoint, as far as replicas and parity allow. Nothing here needs torch."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from danlu.storage.checkpoint.commit import step_folder
from danlu.storage.checkpoint.copying import pack_is_intact
from danlu.storage.checkpoint.manifest import (
    MANIFEST_FILE,
    MAX_METADATA_BYTES,
    CorruptCheckpointError,
    Leaf,
    TreeNode,
    parse_manifest,
    replica_path,
)
from danlu.storage.checkpoint.metadata_files import MetadataParser, manifest_parser, read_bounded, read_manifest
from danlu.storage.checkpoint.parity_groups import (
    ParityGroup,
    find_corrupt_blocks,
    has_parity,
    parity_group_parser,
    read_parity_groups,
    write_parity,
)
from danlu.storage.checkpoint.reader import CheckpointReader, Fault, StoredChunk, iter_chunks, iter_padding
from danlu.storage.store.base import Store
from danlu.storage.store.checksum import crc32c

_READ_ERRORS = (CorruptCheckpointError, OSError, EOFError)


@dataclass
class RepairResult:
    """Result of a repair."""

    step: int
    mended: list[str] = field(default_factory=list)
    """Files that were rewritten."""
    left: list[Fault] = field(default_factory=list)
    """What could not be repaired."""


def repair(store: Store, step: int, on_bytes: Callable[[int], None] = lambda done: None) -> RepairResult:
    """Rewrite every corrupt file of a checkpoint, each atomically.

    Nothing is trusted: a metadata file must have the hash in its parent, a chunk the crc32c taken while training.
    """
    result = RepairResult(step)
    try:
        _restore_manifest(store, step, result)
        reader = CheckpointReader(store, step)
    except _READ_ERRORS as error:
        result.left.append(Fault("", f"{step_folder(step)}/{MANIFEST_FILE}", str(error)))
        return result
    work = _Repairer(reader, result, on_bytes, has_parity(store, step))
    work.repair_metadata(f"{reader.folder}/{MANIFEST_FILE}", MAX_METADATA_BYTES, manifest_parser(reader.manifest))
    work.repair_subtree(reader.manifest)
    work.repair_parity()
    return result


def _restore_manifest(store: Store, step: int, result: RepairResult) -> None:
    """Replace a manifest of another attempt with the replica, if that is the right one.

    Both are valid; the one whose children exist belongs to the checkpoint.
    """
    path, names = f"{step_folder(step)}/{MANIFEST_FILE}", set(store.list(step_folder(step)))
    here = read_manifest(store, step)
    if replica_path(MANIFEST_FILE) not in names or all(ref.file in names for ref in here.children):
        return
    try:
        text = read_bounded(store, replica_path(path))
        replica = parse_manifest(text, replica_path(path))
    except _READ_ERRORS:
        return
    if replica.step == step and replica.root != here.root and all(ref.file in names for ref in replica.children):
        store.write(path, [text])
        result.mended.append(path)


def repair_pack(reader: CheckpointReader, leaf: Leaf) -> bool:
    """Rewrite a pack if it is corrupt; returns whether it was. `CorruptCheckpointError` if it cannot be repaired."""
    path = f"{reader.folder}/{leaf.pack}"
    chunks_and_padding = sorted([*iter_chunks(leaf), *iter_padding(leaf)], key=lambda stored: stored.chunk.at)
    if not leaf.bytes or pack_is_intact(reader.store, path, leaf, chunks_and_padding):
        return False
    reader.store.write(path, (_read_intact(reader, stored) for stored in chunks_and_padding))
    return True


def _read_intact(reader: CheckpointReader, stored: StoredChunk) -> memoryview:
    """A chunk's bytes as they were saved, from wherever they are intact."""
    intact = bytearray(stored.bytes)

    def consume(stored: StoredChunk, content: memoryview) -> int:
        intact[:] = content
        return crc32c(content)

    reader.read_chunks([stored], consume)
    return memoryview(intact)


@dataclass
class _Repairer:
    reader: CheckpointReader
    result: RepairResult
    on_bytes: Callable[[int], None]
    protected: bool

    def repair_metadata(self, path: str, most: int, parse: MetadataParser[object]) -> None:
        """Restore a metadata file and its replica, if one of them is intact."""
        store, intact, corrupt = self.reader.store, b"", []
        for each in (path, replica_path(path)) if self.protected else (path,):
            try:
                text = read_bounded(store, each, most)
                parse(text, f"{store.name}/{each}")
                intact = text
            except _READ_ERRORS:
                corrupt.append(each)
        for each in corrupt if intact else ():
            self._try(each, partial(store.write, each, [intact]))

    def repair_subtree(self, node: TreeNode) -> None:
        """Repair everything below a node: packs before their leaf."""
        for ref in node.children:
            path = f"{self.reader.folder}/{ref.file}"
            try:
                child = self.reader.read_child(node, ref)
            except _READ_ERRORS as error:
                self.result.left.append(Fault(", ".join(sorted(ref.reach)), path, str(error)))
                continue
            if isinstance(child, TreeNode):
                self.repair_subtree(child)
            else:
                self._pack(child)
            self.repair_metadata(path, ref.bytes, self.reader.child_parser(node, ref))

    def repair_parity(self) -> None:
        """Repair parity files."""
        manifest, store = self.reader.manifest, self.reader.store
        for group in list(read_parity_groups(store, manifest.step, manifest.attempt, lambda line: None, self._lost)):
            self.repair_metadata(group.path, MAX_METADATA_BYTES, parity_group_parser(group.path))
            if find_corrupt_blocks(store, group):
                self._try(group.path, partial(_rewrite_parity, store, group))

    def _pack(self, leaf: Leaf) -> None:
        path = f"{self.reader.folder}/{leaf.pack}"
        try:
            if repair_pack(self.reader, leaf):
                self.result.mended.append(path)
        except _READ_ERRORS as error:
            self.result.left.append(Fault(", ".join(sorted(leaf.tensors)[:5]), path, str(error)))
        self.on_bytes(leaf.bytes)

    def _try(self, path: str, write: Callable[[], None]) -> None:
        try:
            write()
        except _READ_ERRORS as error:
            self._lost(path, str(error))
        else:
            self.result.mended.append(path)

    def _lost(self, path: str, message: str) -> None:
        self.result.left.append(Fault("", path, message))


def _rewrite_parity(store: Store, group: ParityGroup) -> None:
    write_parity(store, group.step, group.attempt, group.group, group.members, len(group.blocks))
