"""Every change to a checkpoint's files is found when they are verified, and by whoever loads what it touches."""

from pathlib import Path

import pytest
import torch
from damaging import OTHER, STEP, Shelves, damage_many, store_of
from made_checkpoints import attempt_of

from danlu.storage.checkpoint.checkpoints import Checkpoints
from danlu.storage.checkpoint.manifest import MANIFEST, Damaged
from danlu.storage.checkpoint.reader import Reader, only_hash
from danlu.storage.checkpoint.shelf import Shelf
from danlu.storage.store import Store


@pytest.mark.parametrize(("writers", "changes"), [(1, 150), (3, 250), (66, 40)])
def test_changes_drawn_by_lot(writers: int, changes: int) -> None:
    told = damage_many(Shelves.made(writers), changes, seed=writers)
    assert not told.silent, told.silent[:5]
    assert told.found + told.padding == told.changes == changes
    assert told.found > 0.8 * changes, "most of a pack must belong to tensors"
    assert told.layouts_refused > 0 and told.layouts_right > 0, told


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
        checkpoints = Checkpoints(store, 2, torch.device("cpu"), staging=tmp_path)
        with pytest.raises(Damaged, match="crc32c must be"):
            checkpoints.load(STEP, whole)
        checkpoints.close()


def test_a_pack_that_is_longer_than_its_leaf_says_is_refused() -> None:
    shelves = Shelves.made(1)
    store = store_of(shelves.files)
    path = f"step-{STEP:08d}/{attempt_of(1)}-000000.pack"
    store.write(path, [store.read(path), b"more"])
    reader = Reader(store, STEP)
    with pytest.raises(Damaged, match="bytes, but has"):
        reader.fetch(reader.find(), only_hash)


def test_a_manifest_of_another_step_is_not_listed() -> None:
    shelves = Shelves.made(1)
    store = store_of(shelves.files)
    store.write(f"step-{STEP:08d}/{MANIFEST}", [store.read(f"step-{OTHER:08d}/{MANIFEST}")])
    assert Shelf(store, 2).steps() == [OTHER]


def test_a_leaf_that_is_gone_is_damage_and_not_a_missing_file() -> None:
    """`danlu train --resume` goes back to the checkpoint before a damaged one, but ends at any other error."""
    shelves = Shelves.made(2)
    store = store_of(shelves.files)
    store.remove(f"step-{STEP:08d}/{attempt_of(1)}-000001.json")
    with pytest.raises(Damaged, match="lacks a file that it names"):
        Reader(store, STEP).find()


def test_a_repair_is_held_against_what_was_saved() -> None:
    """What puts a checkpoint right is tried on every change, when there is such a thing."""
    shelves = Shelves.made(2)

    def restore_all(store: Store, step: int) -> None:
        for path, content in shelves.files.items():
            store.write(path, [content])

    told = damage_many(shelves, 30, seed=5, repair=restore_all)
    assert told.repaired == told.found and not told.silent

    def make_it_worse(store: Store, step: int) -> None:
        path = next(each for each in shelves.files if each.endswith(".pack"))
        store.write(path, [b"\1" + shelves.files[path][1:]])

    assert damage_many(shelves, 30, seed=5, repair=make_it_worse).silent
