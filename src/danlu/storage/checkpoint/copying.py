"""Copy a checkpoint from one store to another: every chunk checked on the way, the manifest last. No torch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from danlu.storage.checkpoint.commit import folder_of
from danlu.storage.checkpoint.manifest import (
    LARGEST_TEXT,
    MANIFEST,
    Damaged,
    Leaf,
    Node,
    open_manifest,
    twin_of,
)
from danlu.storage.checkpoint.parity_packs import groups_of, is_protected, write_parity
from danlu.storage.checkpoint.reader import RUN_BYTES, Reader, Stored, chunks_of
from danlu.storage.checkpoint.texts import right_text
from danlu.storage.hashing import crc32c
from danlu.storage.store import Store

OnBytes = Callable[[int], None]


class Occupied(RuntimeError):  # noqa: N818 - it is what the place is
    """The target has another checkpoint of the same step; nothing is written over."""


@dataclass
class Copied:
    """What a copy did."""

    step: int
    files: int = 0
    """Packs that were written."""
    bytes: int = 0
    there: int = 0
    """Packs that were there already, with the right content."""
    complete_before: bool = False
    """The target had this very checkpoint, manifest and all: nothing was done."""


def copy(source: Store, target: Store, step: int, on_bytes: OnBytes = lambda done: None) -> Copied:
    """Copy one checkpoint; a copy that was cut off goes on where it stopped, after the packs that are right.

    Raises `Damaged` if the source is not what was written, `Occupied` if the target has another of this step.
    """
    reader = Reader(source, step)
    copied = Copied(step)
    if _is_complete(reader, target):
        copied.complete_before = True
        on_bytes(reader.manifest.bytes)
        return copied
    if (free := target.free()) is not None and free < (needed := reader.manifest.bytes - _there(reader, target)):
        raise OSError(f"{target.name} has {free} bytes left, but {needed} are to be written; make room first")
    _below(reader, reader.manifest, target, copied, on_bytes, twins=is_protected(source, step))
    path = f"{reader.folder}/{MANIFEST}"
    text = right_text(source, path, LARGEST_TEXT, open_manifest)
    target.create(path, text)
    _protect(reader, target, text)
    return copied


def _protect(reader: Reader, target: Store, manifest: bytes) -> None:
    """Give the copy second texts and parity where the source has them; parity is worked out from the copy's packs."""
    attempt, source = reader.manifest.attempt, reader.store
    if not is_protected(source, reader.manifest.step):
        return
    target.write(f"{reader.folder}/{twin_of(MANIFEST)}", [manifest])
    for group in groups_of(source, reader.manifest.step, attempt, lambda line: None, _no_parity):
        write_parity(target, group.step, group.attempt, group.group, group.members, len(group.blocks))


def _no_parity(path: str, message: str) -> None:
    raise Damaged(f"{message}; the copy is complete, but would lack this parity: mend the source and copy again")


def _is_complete(reader: Reader, target: Store) -> bool:
    path = f"{reader.folder}/{MANIFEST}"
    try:
        there = open_manifest(target.read(path), f"{target.name}/{path}")
    except FileNotFoundError:
        return False
    if there.root != reader.manifest.root:
        raise Occupied(
            f"{target.name}/{folder_of(reader.manifest.step)} is another checkpoint, with root {there.root[:12]} "
            f"instead of {reader.manifest.root[:12]}; nothing was written over: copy to another place, or remove it"
        )
    return True


def _there(reader: Reader, target: Store) -> int:
    """Bytes of packs that the target has; whether they are right is seen when their turn comes."""
    names = [name for name in target.list(reader.folder) if name.endswith(".pack")]
    mine = [name for name in names if name.startswith(reader.manifest.attempt)]
    return sum(target.size(f"{reader.folder}/{name}") for name in mine)


def _below(reader: Reader, node: Node, target: Store, copied: Copied, on_bytes: OnBytes, *, twins: bool) -> None:
    """Copy what is under a node: packs before their leaf, children before their parent."""
    for under in node.children:
        child = reader.child(node, under)
        if isinstance(child, Node):
            _below(reader, child, target, copied, on_bytes, twins=twins)
        elif child.bytes:
            _pack(reader, child, target, copied, on_bytes)
        path = f"{reader.folder}/{under.file}"
        text = right_text(reader.store, path, under.bytes, reader.opener(node, under))
        if twins:
            target.write(twin_of(path), [text])
        target.write(path, [text])


def _pack(reader: Reader, leaf: Leaf, target: Store, copied: Copied, on_bytes: OnBytes) -> None:
    path = f"{reader.folder}/{leaf.pack}"
    chunks = sorted(chunks_of(leaf), key=lambda stored: stored.chunk.at)
    if pack_is_right(target, path, leaf, chunks):
        copied.there += 1
        on_bytes(leaf.bytes)
        return
    target.write(path, _checked(reader.store, path, leaf, chunks, on_bytes))
    copied.files += 1
    copied.bytes += leaf.bytes


def pack_is_right(target: Store, path: str, leaf: Leaf, chunks: Sequence[Stored]) -> bool:
    """Whether a pack is there and has, chunk for chunk, the bytes that were saved."""
    try:
        if target.size(path) != leaf.bytes:
            return False
        for _ in _checked(target, path, leaf, chunks, lambda done: None):
            pass
    except (FileNotFoundError, EOFError, Damaged):
        return False
    return True


def _checked(store: Store, path: str, leaf: Leaf, chunks: Sequence[Stored], on_bytes: OnBytes) -> Iterator[memoryview]:
    """A pack's bytes from its first to its last, each chunk held against its crc32c before it is handed on."""
    start = 0
    for run in _runs(leaf.bytes, chunks):
        end = run[1]
        content = memoryview(bytearray(end - start))
        store.read_into(path, start, content)
        for stored in run[0]:
            at = stored.chunk.at - start
            if (found := crc32c(content[at : at + stored.bytes])) != stored.chunk.crc32c:
                raise Damaged(f"{store.name}: {stored.damaged(path, found)}")
        on_bytes(end - start)
        yield content
        start = end


def _runs(length: int, chunks: Sequence[Stored]) -> Iterator[tuple[list[Stored], int]]:
    """Chunks in groups of some size, each with the byte at which the next group begins; the last ends the pack."""
    group: list[Stored] = []
    start = 0
    for stored in chunks:
        if group and stored.chunk.at + stored.bytes - start > RUN_BYTES:
            yield group, stored.chunk.at
            start, group = stored.chunk.at, []
        group.append(stored)
    yield group, length
