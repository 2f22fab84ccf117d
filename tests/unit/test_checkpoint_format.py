"""The checkpoint format without ranks: boxes, fingerprints, the tree, and texts that are not what was written."""

import json
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from danlu.storage.checkpoint import fingerprint as weighing
from danlu.storage.checkpoint.boxes import bounding_box, intersect, numel, split_box
from danlu.storage.checkpoint.checkpoint_dir import CheckpointDir
from danlu.storage.checkpoint.commit import CheckpointSaveError, commit, leaf_name, pack_name, step_folder, tree_levels
from danlu.storage.checkpoint.fingerprint import all_finite, as_bits, fingerprint
from danlu.storage.checkpoint.manifest import (
    MANIFEST_FILE,
    Chunk,
    CorruptCheckpointError,
    Leaf,
    Manifest,
    SafetensorsDtype,
    TensorShard,
    parse_manifest,
    parse_metadata,
    to_json_bytes,
)
from danlu.storage.checkpoint.reader import CheckpointReader, hash_only
from danlu.storage.store.base import Store, open_store
from danlu.storage.store.checksum import crc32c

extents = st.lists(st.integers(1, 7), min_size=0, max_size=4).map(tuple)


@settings(deadline=None)
@given(extents, st.integers(1, 64))
def test_cut_pieces_tile_a_box_in_memory_order(size: tuple[int, ...], most: int) -> None:
    whole = np.arange(numel(size)).reshape(size)
    offset = tuple(range(10, 10 + len(size)))
    pieces = list(split_box((offset, size), 4, most))
    found = []
    for start, extent in pieces:
        window = tuple(slice(s - o, s - o + n) for s, o, n in zip(start, offset, extent, strict=True))
        found.append(whole[window].reshape(-1))
        assert numel(extent) * 4 <= max(most, 4 * (size[-1] if size else 1))
    assert np.array_equal(np.concatenate(found), whole.reshape(-1))


@settings(deadline=None)
@given(extents)
def test_fingerprints_of_any_tiling_add_up(size: tuple[int, ...]) -> None:
    bits = np.random.default_rng(numel(size)).integers(0, 2**32, size, dtype=np.uint32)
    whole = fingerprint(bits, (0,) * len(size))
    cuts = [sorted({0, n, n // 2, n // 3}) for n in size]
    total = 0
    for lows in product(*(c[:-1] for c in cuts)):
        highs = tuple(c[c.index(low) + 1] for low, c in zip(lows, cuts, strict=True))
        window = tuple(slice(low, high) for low, high in zip(lows, highs, strict=True))
        total += fingerprint(np.array(bits[window]), lows)
    assert total % 2**64 == whole


def test_a_fingerprint_changes_with_every_bit_and_with_places() -> None:
    bits = np.random.default_rng(0).integers(0, 2**16, (3, 5), dtype=np.uint16)
    before = fingerprint(bits, (0, 0))
    for row, column, bit in product(range(3), range(5), range(16)):
        changed = bits.copy()
        changed[row, column] ^= np.uint16(1 << bit)
        assert fingerprint(changed, (0, 0)) != before
    assert fingerprint(bits[::-1].copy(), (0, 0)) != before
    assert fingerprint(bits, (1, 0)) != before


def test_fingerprints_of_long_rows_and_far_offsets() -> None:
    bits = np.arange(200_000, dtype=np.uint32)
    halves = fingerprint(bits[:70_001], (5,)) + fingerprint(bits[70_001:], (70_006,))
    assert halves % 2**64 == fingerprint(bits, (5,))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize("shape", [(70_001,), (300, 257), (3, 1, 66_000), (5, 1), ()])
def test_numpy_and_c_agree(dtype: type, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    bits = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, shape, dtype=dtype, endpoint=True)
    bits = np.asarray(bits, dtype=dtype)
    offset = (65_530,) * len(shape)
    names: list[SafetensorsDtype] = ["F8_E4M3", "BF16", "F32", "F64"]
    name = names[int(np.log2(bits.itemsize))]
    tame = np.asarray(bits & dtype(1))

    def told() -> tuple[int, bool, bool]:
        return fingerprint(bits, offset), all_finite(bits, name), all_finite(tame, name)

    assert isinstance(weighing._fingerprint_backend(), weighing.NativeFingerprint)
    in_c = told()
    monkeypatch.setattr(weighing, "_fingerprint_backend", weighing.NumpyFingerprint)
    assert told() == in_c
    assert in_c[2]


def test_overlap_and_around() -> None:
    assert intersect(((0, 0), (2, 2)), ((1, 1), (5, 5))) == ((1, 1), (1, 1))
    assert intersect(((0,), (2,)), ((2,), (2,))) is None
    assert intersect(((), ()), ((), ())) == ((), ())
    assert bounding_box([((0, 3), (1, 1)), ((4, 0), (2, 2))]) == ((0, 0), (6, 4))


@pytest.mark.parametrize(
    ("dtype", "numbers", "finite"),
    [
        ("F32", np.array([1.0, 3e38, 3e38], np.float32), True),  # the sum is infinite, the numbers are not
        ("F32", np.array([1.0, np.inf], np.float32), False),
        ("F32", np.array([np.inf, -np.inf], np.float32), False),
        ("F64", np.array([np.nan]), False),
        ("F16", np.array([65504, 1], np.float16), True),
        ("F16", np.array([np.inf, 1], np.float16), False),
        ("BF16", np.array([0x7F80, 0], np.uint16), False),
        ("BF16", np.array([0x7F7F, 0xFF7F], np.uint16), True),
        ("F8_E5M2", np.array([0x7C], np.uint8), False),
        ("F8_E4M3", np.array([0xFF], np.uint8), False),
        ("F8_E4M3", np.array([0x7E], np.uint8), True),
        ("I32", np.array([-1], np.int32), True),
    ],
)
def test_what_is_finite(dtype: str, numbers: np.ndarray, finite: bool) -> None:
    bits = as_bits(memoryview(numbers.tobytes()), numbers.itemsize, numbers.shape)
    assert all_finite(bits, dtype) is finite  # type: ignore[arg-type]


# --- a checkpoint of many writers, made by hand


ROWS = 3


def written(store: Store, writers: int, step: int = 7) -> Manifest:
    """A matrix of which every writer has some rows."""
    whole = np.arange(writers * ROWS * 4, dtype=np.float32).reshape(-1, 4)
    text = None
    for writer in reversed(range(writers)):  # those who wait come last
        mine = whole[writer * ROWS : (writer + 1) * ROWS]
        raw = mine.tobytes()
        offset = (writer * ROWS, 0)
        chunk = Chunk(offset=offset, size=mine.shape, at=0, crc32c=crc32c(raw))
        held = TensorShard(
            dtype="F32",
            shape=whole.shape,
            chunks=(chunk,),
            fingerprint=fingerprint(as_bits(memoryview(raw), 4, mine.shape), offset),
        )
        pack = pack_name("00c0ffee", writer)
        store.write(f"{step_folder(step)}/{pack}", [raw])
        leaf = Leaf(
            step=step, attempt="00c0ffee", writer=writer, pack=pack, bytes=len(raw), finite=True, tensors={"w": held}
        )
        root = {"scalars": {"step": step}, "layout": {"shard": writers}, "written": 0.0}
        text = commit(store, leaf, writers, root, timeout=0.0) or text
    assert text is not None
    return parse_manifest(text, "made")


@pytest.mark.parametrize(("writers", "depth"), [(1, 1), (64, 1), (65, 2), (200, 2)])
def test_a_tree_of_any_number_of_writers(writers: int, depth: int) -> None:
    assert tree_levels(writers) == depth
    store = open_store(f"memory://tree-{writers}")
    manifest = written(store, writers)
    assert manifest.level == depth and manifest.packs == writers
    reader = CheckpointReader(store, 7)
    (found,) = reader.find_chunks({"w": [((writers * ROWS - 1, 0), (1, 4))]})
    assert found.pack == pack_name("00c0ffee", writers - 1)
    read = [f"{step_folder(7)}/{found.pack}"]
    assert len(list(reader.leaves({"w": [((0, 0), (1, 1))]}))) == 1, read
    chunks = reader.find_chunks()
    assert len(chunks) == writers
    reader.read_chunks(chunks, hash_only)


def test_levels_of_large_trees() -> None:
    assert [tree_levels(writers) for writers in (4096, 4097, 100_000, 64**3 + 1)] == [2, 3, 3, 4]


def test_a_missing_writer_fails_the_save_and_leaves_no_manifest() -> None:
    store = open_store("memory://missing")
    manifest = written(store, 3)
    store.remove(f"{step_folder(7)}/{MANIFEST_FILE}")
    store.remove(f"{step_folder(7)}/{leaf_name('00c0ffee', 2)}")
    leaf = Leaf.model_validate_json(store.read(f"{step_folder(7)}/{manifest.children[0].file}"))
    with pytest.raises(CheckpointSaveError, match=r"00c0ffee-000002\.json was not written by another rank"):
        commit(store, leaf, 3, {"scalars": {}, "layout": {}, "written": 0.0}, timeout=0.0)
    assert CheckpointDir(store, 2).resumable_steps() == []


def verify(store: Store) -> None:
    reader = CheckpointReader(store, 7)
    reader.read_chunks(reader.find_chunks(), hash_only)


def test_every_flipped_bit_of_every_file_is_found() -> None:
    store = open_store("memory://flips")
    written(store, 66)
    folder = step_folder(7)
    rng = np.random.default_rng(0)
    for name in [*store.list(folder)[::7], MANIFEST_FILE, "00c0ffee-n1-000000.json"]:
        content = store.read(f"{folder}/{name}")
        for _ in range(20):
            bit = int(rng.integers(len(content) * 8))
            changed = bytearray(content)
            changed[bit // 8] ^= 1 << bit % 8
            store.write(f"{folder}/{name}", [changed])
            with pytest.raises(CorruptCheckpointError):
                verify(store)
        store.write(f"{folder}/{name}", [content])
    verify(store)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda leaf: leaf["tensors"]["w"]["chunks"][0].update(at=1), "must end within the pack"),
        (lambda leaf: leaf["tensors"]["w"]["chunks"][0].update(offset=[9, 0]), "must lie inside"),
        (lambda leaf: leaf["tensors"]["w"]["chunks"][0].update(offset=[0]), "must have the 2 dimensions"),
        (lambda leaf: leaf["tensors"]["w"]["chunks"].append(leaf["tensors"]["w"]["chunks"][0]), "must not overlap"),
        (lambda leaf: leaf.update(pack="../../etc/passwd"), "pack"),
        (lambda leaf: leaf.update(pack="/tmp/00c0ffee-000000.pack"), "pack"),
        (lambda leaf: leaf.update(surprise=1), "surprise"),
    ],
)
def test_a_leaf_that_no_writer_writes_is_refused(change: object, message: str) -> None:
    store = open_store("memory://refused")
    store.remove(step_folder(7))
    manifest = written(store, 1)
    leaf = json.loads(store.read(f"{step_folder(7)}/{manifest.children[0].file}"))
    change(leaf)  # type: ignore[operator]
    with pytest.raises(CorruptCheckpointError, match=message):
        parse_metadata(Leaf, json.dumps(leaf).encode(), "leaf")


def test_a_manifest_that_lacks_elements_is_refused() -> None:
    store = open_store("memory://lacking")
    fields = json.loads(to_json_bytes(written(store, 2)))
    fields["tensors"]["w"]["elements"] -= 1
    with pytest.raises(CorruptCheckpointError, match="must have 24 elements in its chunks, but has 23"):
        parse_manifest(json.dumps(fields).encode(), "manifest")


def test_old_ones_go_and_what_is_not_finite_stays_aside() -> None:
    store = open_store("memory://shelf")
    shelf = CheckpointDir(store, keep=2)
    for step in (1, 2, 3):
        written(store, 1, step)
    shelf.purge_stale(2)
    assert shelf.resumable_steps() == [1, 2, 3], "the third is not yet known to be whole, so two older ones stay"
    shelf.purge_stale(3)
    assert shelf.resumable_steps() == [2, 3]
    shelf.quarantine(3)
    assert shelf.resumable_steps() == [2] and shelf.quarantined_steps() == [3]
    assert store.list(step_folder(1)) == []
