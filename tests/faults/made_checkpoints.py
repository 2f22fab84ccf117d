"""Checkpoints of several writers made by hand, without torch, and the question whether a store's are what was saved."""

import random
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from danlu.storage.checkpoint.boxes import Box, numel
from danlu.storage.checkpoint.checkpoint_dir import CheckpointDir
from danlu.storage.checkpoint.commit import commit, pack_name, step_folder, wait_for_leaf
from danlu.storage.checkpoint.fingerprint import as_bits, fingerprint
from danlu.storage.checkpoint.manifest import (
    MANIFEST_FILE,
    Chunk,
    CorruptCheckpointError,
    Leaf,
    Manifest,
    TensorShard,
    parse_manifest,
    replica_path,
)
from danlu.storage.checkpoint.parity_groups import ParityMember, group_writers, parity_group_of_writer, write_parity
from danlu.storage.checkpoint.reader import CheckpointReader, StoredChunk
from danlu.storage.store.base import Store
from danlu.storage.store.checksum import crc32c

Content = Mapping[str, NDArray[np.float32]]
KEEP = 2
GROUP = 8
"""Packs that share parity."""
PADDING = 64
"""Bytes between two chunks begin at multiples of this."""


class Wrong(AssertionError):  # noqa: N818 - it is what the store's content is
    """What must never be: a checkpoint that is listed and is not what was saved, or none where one had been saved."""


def content(step: int, attempt: str, *, rows: int = 6, columns: int = 5, finite: bool = True) -> Content:
    """The tensors of one save: every attempt has its own, so that a mixture of two shows."""
    draw = np.random.default_rng([step, int(attempt, 16)])
    made = {
        "weight": draw.standard_normal((rows, columns), dtype=np.float32),
        "bias": draw.standard_normal(rows, dtype=np.float32),
        "step": np.array(step, np.float32),
    }
    if not finite:
        made["bias"][0] = np.nan
    return made


def attempt_of(seed: int) -> str:
    """A name for an attempt, drawn by lot."""
    return f"{random.Random(seed).getrandbits(32):08x}"


def leaf_of(step: int, attempt: str, tensors: Content, writer: int, writers: int) -> tuple[Leaf, bytes]:
    """What one of several writers writes: its rows of every tensor, and the scalar if it is the first."""
    pack, held, finite = bytearray(), {}, True
    for name, whole in sorted(tensors.items()):
        chunks, total = [], 0
        for box in _rows(whole.shape, writer, writers):
            part = whole[tuple(slice(start, start + count) for start, count in zip(*box, strict=True))]
            raw = np.ascontiguousarray(part).tobytes()
            pack.extend(bytes(-len(pack) % PADDING))
            chunks.append(Chunk(offset=box[0], size=box[1], at=len(pack), crc32c=crc32c(raw)))
            pack.extend(raw)
            total += fingerprint(as_bits(memoryview(raw), 4, box[1]), box[0])
            finite = finite and bool(np.isfinite(part).all())
        if chunks:
            held[name] = TensorShard(dtype="F32", shape=whole.shape, chunks=tuple(chunks), fingerprint=total % 2**64)
    leaf = Leaf(
        step=step,
        attempt=attempt,
        writer=writer,
        pack=pack_name(attempt, writer),
        bytes=len(pack),
        finite=finite,
        tensors=held,
    )
    return leaf, bytes(pack)


def write(
    store: Store, step: int, attempt: str, tensors: Content, writer: int, writers: int, *, replicas: bool = False
) -> Manifest | None:
    """One writer's part of a save, in the order of the real one; the manifest from the writer that commits."""
    leaf, pack = leaf_of(step, attempt, tensors, writer, writers)
    if pack:
        half = len(pack) // 2
        store.write(f"{step_folder(step)}/{leaf.pack}", [pack[:half], pack[half:]])
    root = {"scalars": {"step": step}, "layout": {"shard": writers}, "written": 0.0}
    text = commit(store, leaf, writers, root, timeout=60.0, replicas=replicas)
    if text is not None and replicas:
        store.write(f"{step_folder(step)}/{replica_path(MANIFEST_FILE)}", [text])
    return None if text is None else parse_manifest(text, "made")


def write_all(store: Store, step: int, attempt: str, tensors: Content, writers: int, parity: int = 0) -> Manifest:
    """A whole checkpoint, one writer after the other; those who wait for others come last."""
    order = reversed(range(writers))
    made = [write(store, step, attempt, tensors, each, writers, replicas=bool(parity)) for each in order][-1]
    assert made is not None
    if parity:
        protect(store, step, attempt, writers, parity)
    return made


def protect(store: Store, step: int, attempt: str, writers: int, parity: int) -> None:
    """Parity for all groups of a checkpoint, as its writers would make it."""
    leaves = [wait_for_leaf(store, step, attempt, writer, 0.0) for writer in range(writers)]
    kept = {parity_group_of_writer(writer, writers, GROUP) for writer in range(writers)} - {None}
    for group in sorted(each for each in kept if each is not None):
        mine = [leaves[writer] for writer in group_writers(group, writers, GROUP)]
        members = [ParityMember(pack=leaf.pack, bytes=leaf.bytes) for leaf in mine if leaf.bytes]
        write_parity(store, step, attempt, group, members, parity)


def read_all(store: Store, step: int) -> tuple[Manifest, dict[str, NDArray[np.float32]]]:
    """Every tensor of a checkpoint, every chunk checked; `CorruptCheckpointError` if anything is not right."""
    reader = CheckpointReader(store, step)
    shapes = {name: tensor.shape for name, tensor in reader.manifest.tensors.items()}
    tensors = {name: np.full(shape, np.nan, np.float32) for name, shape in shapes.items()}
    reader.read_chunks(reader.find_chunks(), into(tensors))
    return reader.manifest, tensors


def into(tensors: Mapping[str, NDArray[np.float32]]) -> Callable[[StoredChunk, memoryview], int]:
    """Copies chunks to where they belong."""

    def take(stored: StoredChunk, raw: memoryview) -> int:
        window = tuple(
            slice(start, start + count) for start, count in zip(stored.chunk.offset, stored.chunk.size, strict=True)
        )
        target = tensors[stored.name]
        if numel(stored.chunk.size) * target.itemsize == len(raw):
            target[window] = np.frombuffer(raw, target.dtype).reshape(stored.chunk.size)
        return crc32c(raw)

    return take


def same_bits(found: Content, expected: Content) -> bool:
    """Whether the same tensors are there with the same bits."""
    return found.keys() == expected.keys() and all(
        found[name].shape == expected[name].shape and found[name].tobytes() == expected[name].tobytes()
        for name in expected
    )


def check(store: Store, expected: Callable[[int, str], Content], committed: Sequence[int], keep: int = KEEP) -> int:
    """Hold a store against what was saved; `Wrong` says what must never be. The number of checkpoints listed.

    Never a wrong load: every step that is listed can be read whole and is, bit for bit, one attempt's content. Never an
    unloadable run: of the steps whose save had returned, the newest or a later one is listed.
    """
    listed = CheckpointDir(store, keep).resumable_steps()
    for step in listed:
        try:
            manifest, tensors = read_all(store, step)
        except (CorruptCheckpointError, OSError, EOFError) as error:
            raise Wrong(f"step {step} is listed, but cannot be read: {error}") from error
        if not same_bits(tensors, expected(step, manifest.attempt)):
            raise Wrong(f"step {step} is listed and passes every check, but is not what was saved")
    if committed and max(listed, default=-1) < committed[-1]:
        raise Wrong(f"step {committed[-1]} was saved, but of it and all later ones none is listed: {listed}")
    return len(listed)


def _rows(shape: tuple[int, ...], writer: int, writers: int) -> list[Box]:
    """A writer's rows of a tensor, one chunk a row pair; a scalar belongs to the first."""
    if not shape:
        return [((), ())] if writer == 0 else []
    first, last = shape[0] * writer // writers, shape[0] * (writer + 1) // writers
    rest = shape[1:]
    return [((start, *(0 for _ in rest)), (min(2, last - start), *rest)) for start in range(first, last, 2)]
