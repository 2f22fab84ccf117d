"""Put a damaged checkpoint right, as far as second copies and parity reach. Nothing here needs torch."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from danlu.storage.checkpoint.commit import folder_of
from danlu.storage.checkpoint.copying import pack_is_right
from danlu.storage.checkpoint.manifest import LARGEST_TEXT, MANIFEST, Damaged, Leaf, Node, open_manifest, twin_of
from danlu.storage.checkpoint.parity_packs import (
    Group,
    group_opener,
    groups_of,
    is_protected,
    rotten_blocks,
    write_parity,
)
from danlu.storage.checkpoint.reader import Fault, Reader, Stored, chunks_of, padding_of
from danlu.storage.checkpoint.texts import Open, bounded_text, manifest_of, opener_of
from danlu.storage.hashing import crc32c
from danlu.storage.store import Store

_FAILS = (Damaged, OSError, EOFError)


@dataclass
class Mending:
    """What came of it."""

    step: int
    mended: list[str] = field(default_factory=list)
    """Files that were written anew."""
    left: list[Fault] = field(default_factory=list)
    """What could not be put right."""


def mend(store: Store, step: int, on_bytes: Callable[[int], None] = lambda done: None) -> Mending:
    """Write every file of a checkpoint anew that is not as it was saved; each takes its place whole or not at all.

    Nothing is trusted: a text counts if its parent names its hash, a chunk if it has the crc32c taken while training.
    """
    mending = Mending(step)
    try:
        _restore_manifest(store, step, mending)
        reader = Reader(store, step)
    except _FAILS as error:
        mending.left.append(Fault("", f"{folder_of(step)}/{MANIFEST}", str(error)))
        return mending
    work = _Work(reader, mending, on_bytes, is_protected(store, step))
    work.text(f"{reader.folder}/{MANIFEST}", LARGEST_TEXT, opener_of(reader.manifest))
    work.below(reader.manifest)
    work.parity()
    return mending


def _restore_manifest(store: Store, step: int, mending: Mending) -> None:
    """Where a manifest of another attempt lies in place of the right one, put the second copy there.

    Both are right in themselves; the one whose children are there belongs to the checkpoint.
    """
    path, names = f"{folder_of(step)}/{MANIFEST}", set(store.list(folder_of(step)))
    here = manifest_of(store, step)
    if twin_of(MANIFEST) not in names or all(under.file in names for under in here.children):
        return
    try:
        text = bounded_text(store, twin_of(path))
        twin = open_manifest(text, twin_of(path))
    except _FAILS:
        return
    if twin.step == step and twin.root != here.root and all(under.file in names for under in twin.children):
        store.write(path, [text])
        mending.mended.append(path)


def mend_pack(reader: Reader, leaf: Leaf) -> bool:
    """Write a pack anew if it is not right; whether that was so. `Damaged` if it is not right and cannot be made so."""
    path = f"{reader.folder}/{leaf.pack}"
    every = sorted([*chunks_of(leaf), *padding_of(leaf)], key=lambda stored: stored.chunk.at)
    if not leaf.bytes or pack_is_right(reader.store, path, leaf, every):
        return False
    reader.store.write(path, (_right(reader, stored) for stored in every))
    return True


def _right(reader: Reader, stored: Stored) -> memoryview:
    """A chunk's bytes as they were saved, from wherever they are found."""
    right = bytearray(stored.bytes)

    def take(stored: Stored, content: memoryview) -> int:
        right[:] = content
        return crc32c(content)

    reader.fetch([stored], take)
    return memoryview(right)


@dataclass
class _Work:
    reader: Reader
    mending: Mending
    on_bytes: Callable[[int], None]
    protected: bool

    def text(self, path: str, most: int, opened: Open[object]) -> None:
        """Make a text and its twin alike, if one of them is right."""
        store, right, wrong = self.reader.store, b"", []
        for each in (path, twin_of(path)) if self.protected else (path,):
            try:
                text = bounded_text(store, each, most)
                opened(text, f"{store.name}/{each}")
                right = text
            except _FAILS:
                wrong.append(each)
        for each in wrong if right else ():
            self._try(each, partial(store.write, each, [right]))

    def below(self, node: Node) -> None:
        """Mend all that is under a node: packs before their leaf."""
        for under in node.children:
            path = f"{self.reader.folder}/{under.file}"
            try:
                child = self.reader.child(node, under)
            except _FAILS as error:
                self.mending.left.append(Fault(", ".join(sorted(under.reach)), path, str(error)))
                continue
            if isinstance(child, Node):
                self.below(child)
            else:
                self._pack(child)
            self.text(path, under.bytes, self.reader.opener(node, under))

    def parity(self) -> None:
        """Mend what mends."""
        manifest, store = self.reader.manifest, self.reader.store
        for group in list(groups_of(store, manifest.step, manifest.attempt, lambda line: None, self._lost)):
            self.text(group.path, LARGEST_TEXT, group_opener(group.path))
            if rotten_blocks(store, group):
                self._try(group.path, partial(_again, store, group))

    def _pack(self, leaf: Leaf) -> None:
        path = f"{self.reader.folder}/{leaf.pack}"
        try:
            if mend_pack(self.reader, leaf):
                self.mending.mended.append(path)
        except _FAILS as error:
            self.mending.left.append(Fault(", ".join(sorted(leaf.tensors)[:5]), path, str(error)))
        self.on_bytes(leaf.bytes)

    def _try(self, path: str, act: Callable[[], None]) -> None:
        try:
            act()
        except _FAILS as error:
            self._lost(path, str(error))
        else:
            self.mending.mended.append(path)

    def _lost(self, path: str, message: str) -> None:
        self.mending.left.append(Fault("", path, message))


def _again(store: Store, group: Group) -> None:
    write_parity(store, group.step, group.attempt, group.group, group.members, len(group.blocks))
