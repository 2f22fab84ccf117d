"""Every change to a checkpoint's files is found when they are verified, and by whoever loads what it touches."""

from pathlib import Path

import pytest
import torch
from damaging import OTHER, STEP, Shelves, damage_many, store_of
from made_checkpoints import attempt_of, content, write_all

from danlu.comm.world import World
from danlu.storage.checkpoint.checkpoint_dir import CheckpointDir
from danlu.storage.checkpoint.engine import CheckpointEngine
from danlu.storage.checkpoint.manifest import MANIFEST_FILE, CorruptCheckpointError
from danlu.storage.checkpoint.reader import CheckpointReader, hash_only
from danlu.storage.checkpoint.repair import repair
from danlu.storage.store.base import Store


@pytest.mark.parametrize(("writers", "changes"), [(1, 150), (3, 250), (66, 40)])
def test_changes_drawn_by_lot(writers: int, changes: int) -> None:
    told = damage_many(Shelves.made(writers), changes, seed=writers)
    assert not told.silent, told.silent[:5]
    assert told.found == told.changes == changes
    assert told.layouts_refused > 0 and told.layouts_right > 0, told


@pytest.mark.parametrize(("writers", "changes"), [(1, 100), (3, 200), (66, 30)])
def test_all_that_parity_reaches_is_mended(writers: int, changes: int) -> None:
    told = damage_many(Shelves.made(writers, parity=2), changes, seed=writers, repair=repair)
    assert not told.silent, told.silent[:5]
    assert told.found == told.changes == changes
    assert told.repaired + sum(told.beyond.values()) == changes
    assert told.repaired > 0.95 * changes, told.beyond


def test_every_bit_of_a_chunk_matters(tmp_path: Path) -> None:
    """All flips of one small chunk, one by one, with the load a training run makes."""
    shelves = Shelves.made(2)
    chunk = next(each for each in shelves.chunks if each.name == "bias")
    path = f"step-{STEP:08d}/{chunk.pack}"
    whole = {name: torch.zeros(array.shape) for name, array in shelves.tensors.items()}
    for bit in range(8 * chunk.bytes):
        store = store_of(shelves.files)
        content = bytearray(store.read(path))
        content[chunk.chunk.at + bit // 8] ^= 1 << bit % 8
        store.write(path, [content])
        checkpoints = CheckpointEngine(store, 2, World.adopt(), staging=tmp_path)
        with pytest.raises(CorruptCheckpointError, match="crc32c must be"):
            checkpoints.load(STEP, whole)
        checkpoints.close()


def test_a_pack_that_is_longer_than_its_leaf_says_is_refused() -> None:
    shelves = Shelves.made(1)
    store = store_of(shelves.files)
    path = f"step-{STEP:08d}/{attempt_of(1)}-000000.pack"
    store.write(path, [store.read(path), b"more"])
    reader = CheckpointReader(store, STEP)
    with pytest.raises(CorruptCheckpointError, match="bytes, but has"):
        reader.read_chunks(reader.find_chunks(), hash_only)


def test_a_manifest_of_another_step_is_not_listed() -> None:
    shelves = Shelves.made(1)
    store = store_of(shelves.files)
    store.write(f"step-{STEP:08d}/{MANIFEST_FILE}", [store.read(f"step-{OTHER:08d}/{MANIFEST_FILE}")])
    assert CheckpointDir(store, 2).resumable_steps() == [OTHER]


def test_a_leaf_that_is_gone_is_damage_and_not_a_missing_file() -> None:
    """`danlu train --resume` goes back to the checkpoint before a damaged one, but ends at any other error."""
    shelves = Shelves.made(2)
    store = store_of(shelves.files)
    store.remove(f"step-{STEP:08d}/{attempt_of(1)}-000001.json")
    with pytest.raises(CorruptCheckpointError, match="lacks a file that it names"):
        CheckpointReader(store, STEP).find_chunks()


def test_a_repair_is_held_against_what_was_saved() -> None:
    shelves = Shelves.made(2, parity=1)

    def make_it_another(store: Store, step: int) -> None:
        store.remove(f"step-{STEP:08d}")
        write_all(store, step, attempt_of(1), content(STEP, attempt_of(9), rows=24, columns=40), 2, parity=1)

    told = damage_many(shelves, 10, seed=5, repair=make_it_another)
    assert told.silent and not told.repaired
