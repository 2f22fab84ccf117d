"""Checkpoints made by hand, without ranks and without torch."""

from pathlib import Path

import numpy as np

from danlu.storage.checkpoint.commit import commit, pack_name, step_folder
from danlu.storage.checkpoint.fingerprint import as_bits, fingerprint
from danlu.storage.checkpoint.manifest import Chunk, Leaf, Manifest, TensorShard
from danlu.storage.checkpoint.single_writer import source_tensor, write_checkpoint
from danlu.storage.store.base import Store, open_store
from danlu.storage.store.checksum import crc32c

WEIGHT = np.arange(24, dtype=np.float32).reshape(6, 4) / 7
HALF = np.array([0x3F80, 0x4000, 0xC040], np.uint16)  # 1, 2 and -3 in bf16


def one_writer(store: Store | Path, step: int, *, weight: np.ndarray = WEIGHT, half: np.ndarray = HALF) -> Manifest:
    """A matrix in fp32, three numbers in bf16, a counter."""
    store = open_store(str(store)) if isinstance(store, Path) else store
    tensors = [source_tensor("model.w", "F32", weight), source_tensor("model.half", "BF16", half)]
    tensors.append(source_tensor("optimizer.step", "I64", np.array(step)))
    return write_checkpoint(store, step, tensors, {"cursor": 8 * step, "seed": 3}, layout={"shard": 1, "tp": 1})


def two_writers(store: Store, step: int, *, attempt: str = "00c0ffee") -> None:
    """The same matrix, its rows shared by two writers; with nothing else."""
    for writer in (1, 0):
        mine = WEIGHT[writer * 3 : writer * 3 + 3]
        raw, offset = mine.tobytes(), (writer * 3, 0)
        held = TensorShard(
            dtype="F32",
            shape=WEIGHT.shape,
            chunks=(Chunk(offset=offset, size=mine.shape, at=0, crc32c=crc32c(raw)),),
            fingerprint=fingerprint(as_bits(memoryview(raw), 4, mine.shape), offset),
        )
        pack = pack_name(attempt, writer)
        store.write(f"{step_folder(step)}/{pack}", [raw])
        leaf = Leaf(
            step=step, attempt=attempt, writer=writer, pack=pack, bytes=len(raw), finite=True, tensors={"model.w": held}
        )
        root = {"scalars": {"step": step, "cursor": 8 * step, "seed": 3}, "layout": {"shard": 2}, "written": 1e9}
        commit(store, leaf, 2, root, timeout=0.0)


def flip(path: Path, at: int = -1) -> None:
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(bytes(content))
