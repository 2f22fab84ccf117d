"""Shards in a store: the same samples as from a folder, whatever the store, the cache and the disk under it do."""

import itertools
import json
import random
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from danlu.spec import SpecError
from danlu.storage.data.block_cache import MIN_CACHE_BYTES, BlockCache
from danlu.storage.data.block_checksums import block_crc32c
from danlu.storage.data.build import build_dataset
from danlu.storage.data.dataset_index import CHECKSUM_BLOCK_BYTES
from danlu.storage.data.store_shard_reader import StoreShardReader
from danlu.storage.data.token_shards import ShuffledDataset, TokenShards
from danlu.storage.data.tokenizer import BytesTokenizer
from danlu.storage.store.memory_store import MemoryStore

LENGTH = 1000


class Faulty(MemoryStore):
    """A store that fails, and flips bits, as often as it is told to."""

    def __init__(self, folder: Path) -> None:
        super().__init__("faulty")
        for path in folder.iterdir():
            self.write(path.name, [path.read_bytes()])
        self.failures = self.flips = 0
        self.reads: Counter[str] = Counter()
        self._counting = threading.Lock()

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        with self._counting:
            self.reads[path] += 1
            fails, flips = self.failures > 0, self.flips > 0 and path.endswith(".bin")
            self.failures -= fails
            self.flips -= flips and not fails
        if fails:
            raise OSError("connection reset")
        raw = super().read(path, offset, length)
        return bytes([raw[0] ^ 4]) + raw[1:] if flips else raw


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dozen blocks in three shards, the last block of each cut short."""
    root = tmp_path_factory.mktemp("set")
    dice = random.Random(3)
    lines = [json.dumps({"text": "".join(dice.choices("abcdefgh", k=3000))}) for _ in range(100)]
    (root / "text.jsonl").write_text("\n".join(lines))
    build_dataset([str(root / "text.jsonl")], root / "shards", BytesTokenizer(), shard_tokens=100_007)
    return root / "shards"


class Opened:
    def __init__(self, folder: Path, cache: Path, size: int = 64 * MIN_CACHE_BYTES, patience: float = 60) -> None:
        self.store = Faulty(folder)
        self.warnings: list[str] = []
        self.pauses: list[float] = []
        self.cache = BlockCache(cache, size)
        files = StoreShardReader(
            self.store, self.cache, self.warnings.append, timeout=patience, pause=self.pauses.append
        )
        self.shards = TokenShards.from_reader(files)
        self.data = ShuffledDataset(self.shards, LENGTH, seed=1)


def expected(folder: Path) -> NDArray[np.int64]:
    return ShuffledDataset(TokenShards.open(folder), LENGTH, seed=1).read_samples(np.arange(400))


def test_the_same_samples_as_from_a_folder_and_each_block_read_once(folder: Path, tmp_path: Path) -> None:
    opened = Opened(folder, tmp_path)
    assert (opened.data.read_samples(np.arange(400)) == expected(folder)).all()
    assert (opened.data.read_samples(np.arange(400)) == expected(folder)).all()
    assert sum(count for path, count in opened.store.reads.items() if path.endswith(".bin")) <= 12
    again = Opened(folder, tmp_path)
    assert (again.data.read_samples(np.arange(400)) == expected(folder)).all()
    assert not any(path.endswith(".bin") for path in again.store.reads), "another process finds them in the cache"
    opened.shards.verify()
    assert not opened.warnings


def test_a_cache_too_small_for_the_data_stays_within_its_size(folder: Path, tmp_path: Path) -> None:
    opened, whole = Opened(folder, tmp_path, size=MIN_CACHE_BYTES), expected(folder)
    for batch in range(40):
        rows = np.arange(batch * 10, batch * 10 + 10)
        assert (opened.data.read_samples(rows) == whole[rows]).all()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= MIN_CACHE_BYTES + 4096


def test_a_store_that_fails_is_tried_again_and_the_user_told(folder: Path, tmp_path: Path) -> None:
    opened = Opened(folder, tmp_path)
    opened.store.failures = 6
    assert (opened.data.read_samples(np.arange(100)) == expected(folder)[:100]).all()
    assert len(opened.warnings) == 1 and "connection reset" in opened.warnings[0]
    assert len(opened.pauses) > 2 and max(opened.pauses) > 2 * min(opened.pauses)


def test_a_dead_store_is_an_error_when_the_patience_is_over(folder: Path, tmp_path: Path) -> None:
    opened = Opened(folder, tmp_path, patience=5)
    opened.store.failures = 10**9
    with pytest.raises(
        SpecError, match=r"memory://faulty:1: store: did not answer for .* s: connection reset\n.*resume"
    ):
        opened.data.read_samples(np.arange(10))
    opened.store.failures = 0
    assert (opened.data.read_samples(np.arange(10)) == expected(folder)[:10]).all()


def test_flipped_bits_on_the_way_are_fetched_again_and_in_the_store_named(folder: Path, tmp_path: Path) -> None:
    opened = Opened(folder, tmp_path)
    opened.store.flips = 2
    assert (opened.data.read_samples(np.arange(400)) == expected(folder)).all()
    assert "was read with CRC-32C" in opened.warnings[0]
    damaged = Opened(folder, tmp_path / "other")
    raw = bytearray((folder / "00001.bin").read_bytes())
    raw[CHECKSUM_BLOCK_BYTES + 5] ^= 1
    damaged.store.write("00001.bin", [raw])
    place = r"00001\.bin:1: block 1: is corrupt: .*tokens 132775 to 165542, documents 44 to 55"
    with pytest.raises(SpecError, match=place):
        damaged.data.read_samples(np.arange(400))


def test_what_is_missing_or_cut_short_is_said_at_once(folder: Path, tmp_path: Path) -> None:
    opened = Opened(folder, tmp_path)
    opened.store.write("00001.bin", [b"short"])
    with pytest.raises(SpecError, match=r"00001\.bin"):
        opened.data.read_samples(np.arange(400))
    assert not opened.pauses
    opened.store.remove("index.json")
    with pytest.raises(SpecError, match=r"index\.json:1: data: does not exist"):
        opened.shards.refresh()


def test_a_cache_that_was_damaged_is_read_around(folder: Path, tmp_path: Path) -> None:
    opened = Opened(folder, tmp_path)
    opened.data.read_samples(np.arange(400))
    (blocks,) = tmp_path.glob("blocks-*.bin")
    raw = bytearray(blocks.read_bytes())
    for place in range(100, len(raw), CHECKSUM_BLOCK_BYTES // 2):
        raw[place] ^= 1
    blocks.write_bytes(raw)
    assert (Opened(folder, tmp_path).data.read_samples(np.arange(400)) == expected(folder)).all()


def test_a_full_disk_under_the_cache_is_told_and_read_around(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Opened(folder, tmp_path)
    together, calls = threading.Barrier(2), itertools.count()

    def no_space(*block: object) -> None:
        if next(calls) < 2:
            together.wait(timeout=30)  # the first two fail at the same time
        raise OSError(28, "no space")

    monkeypatch.setattr(opened.cache, "put", no_space)
    assert (opened.data.read_samples(np.arange(400)) == expected(folder)).all()
    unused = "cannot be written and is no longer used: [Errno 28] no space"
    assert opened.warnings == [f"the cache for memory://faulty {unused}"]


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, MIN_CACHE_BYTES)  # one set of eight
    blocks = [bytes([number]) * CHECKSUM_BLOCK_BYTES for number in range(9)]
    for number in range(8):
        cache.put("x", number, blocks[number])
    assert cache.get("x", 0, CHECKSUM_BLOCK_BYTES, block_crc32c(blocks[0])) == blocks[0]
    cache.put("x", 8, blocks[8])
    held = [number for number in range(9) if cache.get("x", number, CHECKSUM_BLOCK_BYTES, block_crc32c(blocks[number]))]
    assert held == [0, 2, 3, 4, 5, 6, 7, 8]
    assert cache.get("x", 8, CHECKSUM_BLOCK_BYTES, block_crc32c(blocks[8]) ^ 1) is None, "another sum is another block"
    with pytest.raises(ValueError, match="`size` must be"):
        BlockCache(tmp_path, 1000)


def test_another_size_replaces_the_files(tmp_path: Path) -> None:
    BlockCache(tmp_path, MIN_CACHE_BYTES).put("x", 0, b"a" * CHECKSUM_BLOCK_BYTES)
    BlockCache(tmp_path, 3 * MIN_CACHE_BYTES)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["blocks-3.bin", "tags-3.bin"]


PROCESS = """
import random, sys
from pathlib import Path
from danlu.storage.data.block_cache import MIN_CACHE_BYTES, BlockCache
from danlu.storage.data.block_checksums import block_crc32c
from danlu.storage.data.dataset_index import CHECKSUM_BLOCK_BYTES
cache, dice, hits = BlockCache(Path(sys.argv[1]), 2 * MIN_CACHE_BYTES), random.Random(sys.argv[2]), 0
for _ in range(3000):
    number = dice.randrange(24)
    raw = bytes([number]) * CHECKSUM_BLOCK_BYTES
    found = cache.get("x", number, CHECKSUM_BLOCK_BYTES, block_crc32c(raw))
    assert found is None or found == raw
    hits += found is not None
    cache.put("x", number, raw)
print(hits)
"""


def test_processes_share_a_cache_without_ever_reading_wrong(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen([sys.executable, "-c", PROCESS, str(tmp_path), str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in range(3)
    ]
    hits = [int(rank.communicate(timeout=360)[0]) for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks) and min(hits) > 300
