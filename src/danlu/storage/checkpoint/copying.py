"""Copy a checkpoint from one store to another: every chunk is verified on the way, the manifest is last. No torch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from danlu.spec.byte_format import format_bytes
from danlu.storage.checkpoint.commit import step_folder
from danlu.storage.checkpoint.manifest import (
    MANIFEST_FILE,
    MAX_METADATA_BYTES,
    CorruptCheckpointError,
    Leaf,
    TreeNode,
    parse_manifest,
    replica_path,
)
from danlu.storage.checkpoint.metadata_files import read_intact_bytes
from danlu.storage.checkpoint.parity_groups import has_parity, read_parity_groups, write_parity
from danlu.storage.checkpoint.reader import MAX_READ_BYTES, CheckpointReader, StoredChunk, iter_chunks
from danlu.storage.store.base import Store
from danlu.storage.store.checksum import crc32c

OnBytes = Callable[[int], None]


class CheckpointExistsError(RuntimeError):
    """The target has another checkpoint of the same step; nothing is overwritten."""


@dataclass
class CopyResult:
    """Result of a copy."""

    step: int
    files: int = 0
    """Packs that were written."""
    bytes: int = 0
    there: int = 0
    """Packs that existed already, with the right content."""
    complete_before: bool = False
    """The target had this very checkpoint, including its manifest: no pack was copied."""
    parity_groups: int = 0
    """Whose parity was written."""


def copy_checkpoint(source: Store, target: Store, step: int, on_bytes: OnBytes = lambda done: None) -> CopyResult:
    """Copy one checkpoint; an interrupted copy is resumed: intact packs are not copied again.

    Raises `CorruptCheckpointError` if the source is not what was written, and `CheckpointExistsError` if the target has
    another checkpoint of this step.
    """
    reader = CheckpointReader(source, step)
    result = CopyResult(step)
    path = f"{reader.folder}/{MANIFEST_FILE}"
    text = read_intact_bytes(source, path, MAX_METADATA_BYTES, parse_manifest)
    if _is_complete(reader, target):
        result.complete_before = True
        on_bytes(reader.manifest.bytes)
        _copy_parity(reader, target, text, result)
        return result
    if (free := target.free_bytes()) is not None and free < (
        needed := reader.manifest.bytes - _bytes_present(reader, target)
    ):
        raise OSError(
            f"{target.name} has {format_bytes(free)} free, but {format_bytes(needed)} are needed; free some space first"
        )
    _copy_subtree(reader, reader.manifest, target, result, on_bytes, replicas=has_parity(source, step))
    target.create(path, text)
    _copy_parity(reader, target, text, result)
    return result


def _copy_parity(reader: CheckpointReader, target: Store, manifest: bytes, result: CopyResult) -> None:
    """Write metadata replicas and parity that the source has and the target lacks: a copy may have been cut off.

    Parity is computed from the copied packs.
    """
    attempt, source = reader.manifest.attempt, reader.store
    if not has_parity(source, reader.manifest.step):
        return
    target.write(f"{reader.folder}/{replica_path(MANIFEST_FILE)}", [manifest])
    for group in read_parity_groups(source, reader.manifest.step, attempt, lambda line: None, _raise_parity_lost):
        try:
            target.size(group.path)  # it is written last
        except FileNotFoundError:
            write_parity(target, group.step, group.attempt, group.group, group.members, len(group.blocks))
            result.parity_groups += 1


def _raise_parity_lost(path: str, message: str) -> None:
    raise CorruptCheckpointError(
        f"{message}; the copy is complete, but would lack this parity: repair the source and copy again"
    )


def _is_complete(reader: CheckpointReader, target: Store) -> bool:
    path = f"{reader.folder}/{MANIFEST_FILE}"
    try:
        there = parse_manifest(target.read(path), f"{target.name}/{path}")
    except FileNotFoundError:
        return False
    if there.root != reader.manifest.root:
        raise CheckpointExistsError(
            f"{target.name}/{step_folder(reader.manifest.step)} is another checkpoint, with root {there.root[:12]} "
            f"instead of {reader.manifest.root[:12]}; nothing was overwritten: copy to another location, or remove it"
        )
    return True


def _bytes_present(reader: CheckpointReader, target: Store) -> int:
    """Bytes of packs that the target has; whether they are intact is checked when they are copied."""
    names = [name for name in target.list(reader.folder) if name.endswith(".pack")]
    mine = [name for name in names if name.startswith(reader.manifest.attempt)]
    return sum(target.size(f"{reader.folder}/{name}") for name in mine)


def _copy_subtree(
    reader: CheckpointReader, node: TreeNode, target: Store, result: CopyResult, on_bytes: OnBytes, *, replicas: bool
) -> None:
    """Copy everything below a node: packs before their leaf, children before their parent."""
    for ref in node.children:
        child = reader.read_child(node, ref)
        if isinstance(child, TreeNode):
            _copy_subtree(reader, child, target, result, on_bytes, replicas=replicas)
        elif child.bytes:
            _copy_pack(reader, child, target, result, on_bytes)
        path = f"{reader.folder}/{ref.file}"
        text = read_intact_bytes(reader.store, path, ref.bytes, reader.child_parser(node, ref))
        if replicas:
            target.write(replica_path(path), [text])
        target.write(path, [text])


def _copy_pack(reader: CheckpointReader, leaf: Leaf, target: Store, result: CopyResult, on_bytes: OnBytes) -> None:
    path = f"{reader.folder}/{leaf.pack}"
    chunks = sorted(iter_chunks(leaf), key=lambda stored: stored.chunk.at)
    if pack_is_intact(target, path, leaf, chunks):
        result.there += 1
        on_bytes(leaf.bytes)
        return
    target.write(path, _read_checked(reader.store, path, leaf, chunks, on_bytes))
    result.files += 1
    result.bytes += leaf.bytes


def pack_is_intact(target: Store, path: str, leaf: Leaf, chunks: Sequence[StoredChunk]) -> bool:
    """Whether a pack exists and has, chunk for chunk, the bytes that were saved."""
    try:
        if target.size(path) != leaf.bytes:
            return False
        for _ in _read_checked(target, path, leaf, chunks, lambda done: None):
            pass
    except (FileNotFoundError, EOFError, CorruptCheckpointError):
        return False
    return True


def _read_checked(
    store: Store, path: str, leaf: Leaf, chunks: Sequence[StoredChunk], on_bytes: OnBytes
) -> Iterator[memoryview]:
    """A pack's bytes in order; each chunk is compared with its crc32c before it is yielded."""
    start = 0
    for run in _group_chunks(leaf.bytes, chunks):
        end = run[1]
        content = memoryview(bytearray(end - start))
        store.read_into(path, start, content)
        for stored in run[0]:
            at = stored.chunk.at - start
            if (found := crc32c(content[at : at + stored.bytes])) != stored.chunk.crc32c:
                raise CorruptCheckpointError(f"{store.name}: {stored.mismatch_message(path, found)}")
        on_bytes(end - start)
        yield content
        start = end


def _group_chunks(length: int, chunks: Sequence[StoredChunk]) -> Iterator[tuple[list[StoredChunk], int]]:
    """Chunks in groups of bounded size, each with the byte at which the next group begins; the last ends the pack."""
    group: list[StoredChunk] = []
    start = 0
    for stored in chunks:
        if group and stored.chunk.at + stored.bytes - start > MAX_READ_BYTES:
            yield group, stored.chunk.at
            start, group = stored.chunk.at, []
        group.append(stored)
    yield group, length
