"""List the checkpoints in a store, and verify one. Nothing here needs torch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from danlu.storage.checkpoint.checkpoint_dir import QUARANTINE_FILE, CheckpointDir
from danlu.storage.checkpoint.commit import step_folder
from danlu.storage.checkpoint.manifest import (
    MANIFEST_FILE,
    MAX_METADATA_BYTES,
    CorruptCheckpointError,
    Leaf,
    Manifest,
    TreeNode,
    parse_manifest,
    replica_path,
)
from danlu.storage.checkpoint.metadata_files import MetadataParser, manifest_parser, read_bounded, read_metadata
from danlu.storage.checkpoint.parity_groups import (
    find_corrupt_blocks,
    has_parity,
    parity_group_parser,
    read_parity_groups,
)
from danlu.storage.checkpoint.reader import CheckpointReader, Fault, iter_chunks, iter_padding
from danlu.storage.store.base import Store

CheckpointState = Literal["complete", "quarantined", "incomplete", "damaged"]
"""`damaged` means that the manifest cannot be read; `verify` checks everything below it."""


@dataclass(frozen=True)
class CheckpointEntry:
    """One step's folder."""

    step: int
    state: CheckpointState
    manifest: Manifest | None
    """None if it cannot be read or was never written."""
    leftover_files: int
    """Files that belong to no checkpoint: of a save that was given up, or is running."""
    error: str = ""
    """Why the manifest cannot be read."""


def list_checkpoints(store: Store) -> list[CheckpointEntry]:
    """Every step's folder in a store, oldest first, whatever its state."""
    found = [(step, store.list(step_folder(step))) for step in CheckpointDir(store, keep=1).steps_with_folder()]
    return [_entry(store, step, names) for step, names in found if names]  # some stores list empty folders


def _entry(store: Store, step: int, names: list[str]) -> CheckpointEntry:
    folder = step_folder(step)
    file = next((name for name in (MANIFEST_FILE, QUARANTINE_FILE) if name in names), None)
    if file is None:
        return CheckpointEntry(step, "incomplete", None, len(names))
    path = f"{folder}/{file}"
    try:
        manifest = read_metadata(store, path, MAX_METADATA_BYTES, parse_manifest, lambda line: None)
    except CorruptCheckpointError as error:
        return CheckpointEntry(step, "damaged", None, 0, str(error))
    mine = (file, replica_path(file))
    left = [name for name in names if name not in mine and not name.startswith(f"{manifest.attempt}-")]
    return CheckpointEntry(step, "complete" if file == MANIFEST_FILE else "quarantined", manifest, len(left))


@dataclass
class VerifyResult:
    """Result of verifying a checkpoint."""

    step: int
    tensors: int = 0
    chunks: int = 0
    bytes: int = 0
    """Of the chunks that were read."""
    faults: list[Fault] = field(default_factory=list)
    """What is lost."""
    mendable: list[str] = field(default_factory=list)
    """What is corrupt, and can be repaired from replicas and parity; a load does so by itself."""


def verify(store: Store, step: int, on_bytes: Callable[[int, int], None] = lambda done, total: None) -> VerifyResult:
    """Read an entire checkpoint and compare it with its hashes; continues after a fault, to find them all.

    `on_bytes` is called with the bytes done and the total bytes.
    """
    result = VerifyResult(step)
    try:
        reader = CheckpointReader(store, step)
    except (CorruptCheckpointError, OSError, EOFError) as error:
        result.faults.append(Fault("", f"{step_folder(step)}/{MANIFEST_FILE}", str(error)))
        return result
    result.tensors = len(reader.manifest.tensors)
    done = 0

    def count(more: int) -> None:
        nonlocal done
        done += more
        on_bytes(min(done, reader.manifest.bytes), reader.manifest.bytes)

    replicas = has_parity(store, step)
    if replicas:
        _check_replica(
            store, f"{reader.folder}/{MANIFEST_FILE}", MAX_METADATA_BYTES, manifest_parser(reader.manifest), result
        )
    for leaf in _leaves(reader, reader.manifest, result, replicas=replicas):
        chunks = list(iter_chunks(leaf))
        result.chunks += len(chunks)
        result.bytes += sum(stored.bytes for stored in chunks)
        try:
            chunks_and_padding = sorted([*chunks, *iter_padding(leaf)], key=lambda stored: stored.chunk.at)
        except CorruptCheckpointError as error:
            result.faults.append(Fault(", ".join(sorted(leaf.tensors)), f"{reader.folder}/{leaf.pack}", str(error)))
            continue
        result.faults += reader.check_chunks(chunks_and_padding, on_bytes=count)
    result.mendable += reader.repairs
    if replicas:
        _check_parity(store, reader, result)
    return result


def _leaves(reader: CheckpointReader, node: TreeNode, result: VerifyResult, *, replicas: bool) -> Iterator[Leaf]:
    """Every leaf that can be read; others are faults, with the tensors that they leave unread."""
    for ref in node.children:
        path = f"{reader.folder}/{ref.file}"
        try:
            child = reader.read_child(node, ref)
        except (CorruptCheckpointError, OSError, EOFError) as error:
            result.faults.append(Fault(", ".join(sorted(ref.reach)), path, str(error)))
            continue
        if replicas:
            _check_replica(reader.store, path, ref.bytes, reader.child_parser(node, ref), result)
        if isinstance(child, Leaf):
            yield child
        else:
            yield from _leaves(reader, child, result, replicas=replicas)


def _check_replica(store: Store, path: str, most: int, parse: MetadataParser[object], result: VerifyResult) -> None:
    """Check that the replica of a metadata file is what the file itself must be."""
    try:
        parse(read_bounded(store, replica_path(path), most), f"{store.name}/{replica_path(path)}")
    except (CorruptCheckpointError, OSError, EOFError) as error:
        result.mendable.append(f"{error}; it is the replica of {path.rpartition('/')[2]}")


def _check_parity(store: Store, reader: CheckpointReader, result: VerifyResult) -> None:
    """Compare parity with its own hashes, to find in time that it is corrupt."""

    def lost(path: str, message: str) -> None:
        result.faults.append(Fault("", path, f"{message}; no parity can be read without it"))

    manifest = reader.manifest
    for group in read_parity_groups(store, manifest.step, manifest.attempt, result.mendable.append, lost):
        _check_replica(store, group.path, MAX_METADATA_BYTES, parity_group_parser(group.path), result)
        result.mendable += find_corrupt_blocks(store, group)


@dataclass
class TreeStats:
    """The shape of a checkpoint's hash tree."""

    levels: int
    """The manifest included."""
    nodes: int = 0
    """Between the manifest and the leaves."""
    leaves: int = 0
    packs: int = 0
    """A writer that had nothing to write has a leaf and no pack."""
    chunks: dict[str, list[tuple[str, str, int]]] = field(default_factory=dict)
    """By tensor: box as text, pack, first byte."""


def tree_stats(reader: CheckpointReader) -> TreeStats:
    """Walk the entire tree; reads metadata files only, no pack."""
    tree = TreeStats(levels=reader.manifest.level)
    _walk(reader, reader.manifest, tree)
    return tree


def _walk(reader: CheckpointReader, node: TreeNode, tree: TreeStats) -> None:
    for ref in node.children:
        child = reader.read_child(node, ref)
        if isinstance(child, TreeNode):
            tree.nodes += 1
            _walk(reader, child, tree)
            continue
        tree.leaves += 1
        tree.packs += child.bytes > 0
        for stored in iter_chunks(child):
            box = f"{list(stored.chunk.offset)} + {list(stored.chunk.size)}"
            tree.chunks.setdefault(stored.name, []).append((box, stored.pack, stored.chunk.at))
