"""What lies in a store of checkpoints, and what is wrong with one. Nothing here needs torch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from danlu.storage.checkpoint.commit import folder_of
from danlu.storage.checkpoint.manifest import MANIFEST, Damaged, Leaf, Manifest, Node, open_manifest
from danlu.storage.checkpoint.reader import Fault, Reader, chunks_of
from danlu.storage.checkpoint.shelf import QUARANTINE, Shelf
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
        manifest = open_manifest(store.read(path), f"{store.name}/{path}")
    except Damaged as error:
        return Entry(step, "damaged", None, 0, str(error))
    left = [name for name in names if name != file and not name.startswith(f"{manifest.attempt}-")]
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

    for leaf in _leaves(reader, reader.manifest, verdict.faults):
        chunks = sorted(chunks_of(leaf), key=lambda stored: stored.chunk.at)
        verdict.chunks += len(chunks)
        verdict.bytes += sum(stored.bytes for stored in chunks)
        verdict.faults += reader.faults(chunks, on_bytes=count)
    return verdict


def _leaves(reader: Reader, node: Node, faults: list[Fault]) -> Iterator[Leaf]:
    """Every leaf that can be read; what cannot is a fault, with the tensors that it leaves unread."""
    for under in node.children:
        try:
            child = reader.child(node, under)
        except (Damaged, OSError, EOFError) as error:
            faults.append(Fault(", ".join(sorted(under.reach)), f"{reader.folder}/{under.file}", str(error)))
            continue
        if isinstance(child, Leaf):
            yield child
        else:
            yield from _leaves(reader, child, faults)


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
