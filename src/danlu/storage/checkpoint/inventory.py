"""What lies in a store of checkpoints, and what is wrong with one. Nothing here needs torch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from danlu.storage.checkpoint.commit import folder_of
from danlu.storage.checkpoint.manifest import (
    LARGEST_TEXT,
    MANIFEST,
    Damaged,
    Leaf,
    Manifest,
    Node,
    open_manifest,
    twin_of,
)
from danlu.storage.checkpoint.parity_packs import group_opener, groups_of, is_protected, rotten_blocks
from danlu.storage.checkpoint.reader import Fault, Reader, chunks_of, padding_of
from danlu.storage.checkpoint.shelf import QUARANTINE, Shelf
from danlu.storage.checkpoint.texts import Open, bounded_text, opener_of, whole_text
from danlu.storage.store import Store

State = Literal["complete", "quarantined", "incomplete", "damaged"]
"""`damaged` is told of a manifest that cannot be read; `verify` looks at everything under it."""


@dataclass(frozen=True)
class Entry:
    """One step's folder."""

    step: int
    state: State
    manifest: Manifest | None
    """What it says of itself; None where it cannot be read or was never written."""
    leftovers: int
    """Files that belong to no checkpoint: of a save that was given up, or is going on."""
    trouble: str = ""
    """Why a damaged manifest cannot be read."""


def inventory(store: Store) -> list[Entry]:
    """Every step's folder in a store, oldest first, whatever its state."""
    found = [(step, store.list(folder_of(step))) for step in Shelf(store, keep=1).folders()]
    return [_entry(store, step, names) for step, names in found if names]  # some stores show folders that are empty


def _entry(store: Store, step: int, names: list[str]) -> Entry:
    folder = folder_of(step)
    file = next((name for name in (MANIFEST, QUARANTINE) if name in names), None)
    if file is None:
        return Entry(step, "incomplete", None, len(names))
    path = f"{folder}/{file}"
    try:
        manifest = whole_text(store, path, LARGEST_TEXT, open_manifest, lambda line: None)
    except Damaged as error:
        return Entry(step, "damaged", None, 0, str(error))
    mine = (file, twin_of(file))
    left = [name for name in names if name not in mine and not name.startswith(f"{manifest.attempt}-")]
    return Entry(step, "complete" if file == MANIFEST else "quarantined", manifest, len(left))


@dataclass
class Verdict:
    """What reading a whole checkpoint has shown."""

    step: int
    tensors: int = 0
    chunks: int = 0
    bytes: int = 0
    """Of the chunks that were read."""
    faults: list[Fault] = field(default_factory=list)
    """What is lost."""
    mendable: list[str] = field(default_factory=list)
    """What is damaged, and can be made good from second copies and parity; a load does so by itself."""


def verify(store: Store, step: int, on_bytes: Callable[[int, int], None] = lambda done, total: None) -> Verdict:
    """Read everything of a checkpoint and hold it against its hashes; goes on after a fault, to find them all.

    `on_bytes` is told how many bytes are done and how many there are.
    """
    verdict = Verdict(step)
    try:
        reader = Reader(store, step)
    except (Damaged, OSError, EOFError) as error:
        verdict.faults.append(Fault("", f"{folder_of(step)}/{MANIFEST}", str(error)))
        return verdict
    verdict.tensors = len(reader.manifest.tensors)
    done = 0

    def count(more: int) -> None:
        nonlocal done
        done += more
        on_bytes(min(done, reader.manifest.bytes), reader.manifest.bytes)

    twins = is_protected(store, step)
    if twins:
        _check_twin(store, f"{reader.folder}/{MANIFEST}", LARGEST_TEXT, opener_of(reader.manifest), verdict)
    for leaf in _leaves(reader, reader.manifest, verdict, twins=twins):
        chunks = list(chunks_of(leaf))
        verdict.chunks += len(chunks)
        verdict.bytes += sum(stored.bytes for stored in chunks)
        try:
            every = sorted([*chunks, *padding_of(leaf)], key=lambda stored: stored.chunk.at)
        except Damaged as error:
            verdict.faults.append(Fault(", ".join(sorted(leaf.tensors)), f"{reader.folder}/{leaf.pack}", str(error)))
            continue
        verdict.faults += reader.faults(every, on_bytes=count)
    verdict.mendable += reader.mended
    if twins:
        _check_parity(store, reader, verdict)
    return verdict


def _leaves(reader: Reader, node: Node, verdict: Verdict, *, twins: bool) -> Iterator[Leaf]:
    """Every leaf that can be read; what cannot is a fault, with the tensors that it leaves unread."""
    for under in node.children:
        path = f"{reader.folder}/{under.file}"
        try:
            child = reader.child(node, under)
        except (Damaged, OSError, EOFError) as error:
            verdict.faults.append(Fault(", ".join(sorted(under.reach)), path, str(error)))
            continue
        if twins:
            _check_twin(reader.store, path, under.bytes, reader.opener(node, under), verdict)
        if isinstance(child, Leaf):
            yield child
        else:
            yield from _leaves(reader, child, verdict, twins=twins)


def _check_twin(store: Store, path: str, most: int, opened: Open[object], verdict: Verdict) -> None:
    """Hold the second copy of a text against what the text itself must be."""
    try:
        opened(bounded_text(store, twin_of(path), most), f"{store.name}/{twin_of(path)}")
    except (Damaged, OSError, EOFError) as error:
        verdict.mendable.append(f"{error}; it is the second copy of {path.rpartition('/')[2]}")


def _check_parity(store: Store, reader: Reader, verdict: Verdict) -> None:
    """Hold parity against its own hashes, so that it is known in time to be no help."""

    def lost(path: str, message: str) -> None:
        verdict.faults.append(Fault("", path, f"{message}; no parity can be read without it"))

    manifest = reader.manifest
    for group in groups_of(store, manifest.step, manifest.attempt, verdict.mendable.append, lost):
        _check_twin(store, group.path, LARGEST_TEXT, group_opener(group.path), verdict)
        verdict.mendable += rotten_blocks(store, group)


@dataclass
class Tree:
    """The shape of a checkpoint's tree of hashes."""

    levels: int
    """The manifest included."""
    nodes: int = 0
    """Between the manifest and the leaves."""
    leaves: int = 0
    packs: int = 0
    """A writer that had nothing to write has a leaf and no pack."""
    chunks: dict[str, list[tuple[str, str, int]]] = field(default_factory=dict)
    """By tensor: box in words, pack, first byte."""


def tree_of(reader: Reader) -> Tree:
    """Walk the whole tree; the texts alone are read, no pack."""
    tree = Tree(levels=reader.manifest.level)
    _walk(reader, reader.manifest, tree)
    return tree


def _walk(reader: Reader, node: Node, tree: Tree) -> None:
    for under in node.children:
        child = reader.child(node, under)
        if isinstance(child, Node):
            tree.nodes += 1
            _walk(reader, child, tree)
            continue
        tree.leaves += 1
        tree.packs += child.bytes > 0
        for stored in chunks_of(child):
            box = f"{list(stored.chunk.offset)} + {list(stored.chunk.size)}"
            tree.chunks.setdefault(stored.name, []).append((box, stored.pack, stored.chunk.at))
