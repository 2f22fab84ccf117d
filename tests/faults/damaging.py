"""Damage to the files of checkpoints, drawn by lot: what disks, networks and people do to bytes that were right."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from made_checkpoints import Content, attempt_of, content, into, read_all, same_bits, write_all

from danlu.storage.checkpoint.boxes import Box
from danlu.storage.checkpoint.commit import step_folder
from danlu.storage.checkpoint.inspection import verify
from danlu.storage.checkpoint.manifest import MANIFEST_FILE, CorruptCheckpointError
from danlu.storage.checkpoint.reader import CheckpointReader, StoredChunk
from danlu.storage.store.base import Store
from danlu.storage.store.memory_store import MemoryStore

STEP, OTHER = 10, 20
KINDS = (
    "bit flip", "bit flip", "bit flip", "byte lost", "byte added", "truncated", "block zeroed", "chunks swapped",
    "file of another checkpoint", "file of another attempt", "file swapped with another", "file removed",
)  # fmt: skip
Repair = Callable[[Store, int], None]
"""Given a store and a step whose files are damaged, put them right, as far as it can."""


@dataclass
class Damages:
    """What came of many changes, by kind."""

    changes: int = 0
    found: int = 0
    layouts: int = 0
    """Loads of a part of the tensors, drawn by lot."""
    layouts_refused: int = 0
    layouts_right: int = 0
    """Loads that touch nothing damaged and are bit for bit right."""
    repaired: int = 0
    """Afterwards every file of the checkpoint is, byte for byte, what it was."""
    beyond: dict[str, int] = field(default_factory=dict)
    """Damage that reaches further than parity does, by kind."""
    kinds: dict[str, int] = field(default_factory=dict)
    silent: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Shelves:
    """Two checkpoints, and the files of another attempt at the first, as they are when all is right."""

    files: Mapping[str, bytes]
    tensors: Content
    other_attempt: Mapping[str, bytes]
    chunks: Sequence[StoredChunk]

    @classmethod
    def made(cls, writers: int, parity: int = 0) -> "Shelves":
        """Checkpoints of so many writers; from 65 on there are nodes between manifest and leaves."""
        store, again = MemoryStore("damage"), MemoryStore("again")
        shape = {"rows": max(24, 2 * writers), "columns": 40}
        tensors = content(STEP, attempt_of(1), **shape)
        write_all(store, STEP, attempt_of(1), tensors, writers, parity)
        write_all(store, OTHER, attempt_of(2), content(OTHER, attempt_of(2), **shape), writers, parity)
        write_all(again, STEP, attempt_of(3), content(STEP, attempt_of(3), **shape), writers, parity)
        return cls(_files(store), tensors, _files(again), CheckpointReader(store, STEP).find_chunks())


def damage_many(
    shelves: Shelves,
    changes: int,
    seed: int,
    repair: Repair | None = None,
    on_change: Callable[[], None] = lambda: None,
) -> Damages:
    """Change one thing at a time and see whether a full verification and loads of parts notice."""
    draw, told = random.Random(seed), Damages()
    while told.changes < changes:
        kind = draw.choice(KINDS)
        store = store_of(shelves.files)
        what = _change(store, shelves, kind, draw)
        if _files(store) == shelves.files:
            continue  # swapped with something equal: nothing has changed
        told.changes += 1
        told.kinds[kind] = told.kinds.get(kind, 0) + 1
        verdict = verify(store, STEP)
        told.found += bool(verdict.faults or verdict.mendable)
        if not (verdict.faults or verdict.mendable):
            told.silent.append(what)
        if not verdict.faults and not _loads(store, shelves):
            told.silent.append(f"{what}: said to be mendable, but does not load as it was")
        _load_a_part(store, shelves, draw, told, what)
        if repair is not None:
            _mended(store, shelves, repair, told, kind, what)
        on_change()
    return told


def _loads(store: Store, shelves: Shelves) -> bool:
    """Whether all tensors are read, and are bit for bit what was saved."""
    try:
        return same_bits(read_all(store, STEP)[1], shelves.tensors)
    except (CorruptCheckpointError, FileNotFoundError):
        return False


def _load_a_part(store: Store, shelves: Shelves, draw: random.Random, told: Damages, what: str) -> None:
    """Load a box of every tensor, as a rank of some layout would; it is refused or it is right."""
    told.layouts += 1
    wanted = {name: [_box(array.shape, draw)] for name, array in shelves.tensors.items()}
    found = {name: np.full(array.shape, np.nan, np.float32) for name, array in shelves.tensors.items()}
    try:
        reader = CheckpointReader(store, STEP)
        reader.read_chunks(reader.find_chunks(wanted), into(found))
    except (CorruptCheckpointError, FileNotFoundError):
        told.layouts_refused += 1
        return
    for name, (box,) in wanted.items():
        window = tuple(slice(start, start + count) for start, count in zip(*box, strict=True))
        if found[name][window].tobytes() != shelves.tensors[name][window].tobytes():
            told.silent.append(f"{what}: loading {name} {box}")
            return
    told.layouts_right += 1


def _mended(store: MemoryStore, shelves: Shelves, repair: Repair, told: Damages, kind: str, what: str) -> None:
    repair(store, STEP)
    verdict = verify(store, STEP)
    if verdict.faults or verdict.mendable:
        told.beyond[kind] = told.beyond.get(kind, 0) + 1
    elif _files(store) == shelves.files:
        told.repaired += 1
    else:
        told.silent.append(f"{what}: repaired into something else")


def _change(store: MemoryStore, shelves: Shelves, kind: str, draw: random.Random) -> str:
    """Change one thing in the first checkpoint, and say what."""
    folder = step_folder(STEP)
    name = draw.choice(store.list(folder))
    if kind in ("chunks swapped", "block zeroed", "byte lost", "byte added") and draw.random() < 0.7:
        name = draw.choice([each for each in store.list(folder) if each.endswith(".pack")])
    path = f"{folder}/{name}"
    whole = bytearray(store.read(path))
    at = draw.randrange(len(whole))
    match kind:
        case "bit flip":
            whole[at] ^= 1 << draw.randrange(8)
        case "byte lost":
            del whole[at]
        case "byte added":
            whole.insert(at, draw.randrange(256))
        case "truncated":
            del whole[at:]
        case "block zeroed":
            start = at // 512 * 512
            whole[start : start + 512] = bytes(len(whole[start : start + 512]))
        case "chunks swapped":
            _swap_chunks(whole, [each for each in shelves.chunks if each.pack == name], draw)
        case "file of another checkpoint":
            whole = bytearray(store.read(f"{step_folder(OTHER)}/{_like(name, store.list(step_folder(OTHER)))}"))
        case "file of another attempt":
            names = [each.rpartition("/")[2] for each in shelves.other_attempt]
            whole = bytearray(shelves.other_attempt[f"{folder}/{_like(name, names)}"])
        case "file swapped with another":
            other = f"{folder}/{draw.choice(store.list(folder))}"
            first, second = bytes(whole), store.read(other)
            store.write(other, [first])
            whole = bytearray(second)
        case "file removed":
            store.remove(path)
            return f"{kind}: {name}"
    store.write(path, [whole])
    return f"{kind}: {name} at {at}"


def _swap_chunks(pack: bytearray, chunks: Sequence[StoredChunk], draw: random.Random) -> None:
    if len(chunks) < 2:
        return
    first, second = draw.sample(chunks, 2)
    length = min(first.bytes, second.bytes)
    a, b = first.chunk.at, second.chunk.at
    pack[a : a + length], pack[b : b + length] = pack[b : b + length], pack[a : a + length]


def _like(name: str, names: Sequence[str]) -> str:
    """The file that plays the same part: the same name but for the attempt."""
    return next(each for each in names if each[8:] == name[8:] or each == name == MANIFEST_FILE)


def _box(shape: tuple[int, ...], draw: random.Random) -> Box:
    starts = [draw.randrange(extent) for extent in shape]
    sizes = [draw.randint(1, extent - start) for extent, start in zip(shape, starts, strict=True)]
    return tuple(starts), tuple(sizes)


def _files(store: MemoryStore) -> dict[str, bytes]:
    return {
        f"{folder}/{name}": store.read(f"{folder}/{name}") for folder in store.list() for name in store.list(folder)
    }


def store_of(files: Mapping[str, bytes]) -> MemoryStore:
    """A store with these files."""
    store = MemoryStore("damaged")
    for path, whole in files.items():
        store.write(path, [whole])
    return store
