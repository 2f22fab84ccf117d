import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from danlu.spec import SpecError
from danlu.storage.data.build import build_dataset
from danlu.storage.data.dataset_index import token_dtype
from danlu.storage.data.token_shards import ShuffledDataset, TokenShards, rank_sample_indices
from danlu.storage.data.tokenizer import BytesTokenizer

TEXT = "".join(chr(ord("a") + place % 26) + str(place) for place in range(700))
TOKENS = [*TEXT.encode(), 256]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("built")
    (root / "text.txt").write_text(TEXT)
    build_dataset([str(root / "text.txt")], root / "shards", BytesTokenizer(), shard_tokens=37)
    return root / "shards"


@pytest.fixture
def folder(built: Path, tmp_path: Path) -> Path:
    """A data set of its own for every test: some damage it."""
    return shutil.copytree(built, tmp_path / "shards")


def test_any_window_reads_right_across_shards(folder: Path) -> None:
    shards = TokenShards.open(folder)
    assert len(shards.index.shards) == -(-len(TOKENS) // 37)
    assert shards.tokens == len(TOKENS) and shards.vocabulary == 257
    for start in range(120):
        for count in (0, 1, 36, 37, 38, 150):
            assert shards.read(start, count).tolist() == TOKENS[start : start + count]
    assert shards.read(0, shards.tokens).tolist() == TOKENS
    assert shards.read(shards.tokens - 1, 1).tolist() == [256]


def test_windows_outside_are_refused(folder: Path) -> None:
    shards = TokenShards.open(folder)
    for start, count in ((-1, 2), (shards.tokens, 1), (0, shards.tokens + 1)):
        with pytest.raises(ValueError, match="are not within"):
            shards.read(start, count)


def test_an_epoch_covers_every_sample_with_its_target(folder: Path) -> None:
    data = ShuffledDataset(TokenShards.open(folder), length=16, seed=3)
    assert data.num_samples == (len(TOKENS) - 1) // 16
    rows = data.read_samples(np.arange(data.num_samples))
    assert rows.dtype == np.int64 and rows.shape == (data.num_samples, 17)
    expected = [TOKENS[sample * 16 : sample * 16 + 17] for sample in range(data.num_samples)]
    assert rows.tolist() != expected and sorted(rows.tolist()) == sorted(expected)


def test_the_last_sample_may_end_with_the_last_token(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("abcdefgh")  # nine tokens with the end of text
    build_dataset([str(tmp_path / "text.txt")], tmp_path / "shards", BytesTokenizer())
    data = ShuffledDataset(TokenShards.open(tmp_path / "shards"), length=4, seed=0)
    assert sorted(data.read_samples(np.arange(2)).tolist()) == [[*b"abcde"], [*b"efgh", 256]]


def test_reading_on_from_any_cursor_equals_reading_from_the_start(folder: Path) -> None:
    whole = ShuffledDataset(TokenShards.open(folder), length=8, seed=1).read_samples(
        np.arange(600)
    )  # more than two epochs
    for cursor in (0, 1, 7, 255, 256, 257, 599):
        resumed = ShuffledDataset(TokenShards.open(folder), length=8, seed=1)
        assert (resumed.read_samples(np.arange(cursor, 600)) == whole[cursor:]).all()


def test_any_number_of_ranks_reads_the_same_batch(folder: Path) -> None:
    data = ShuffledDataset(TokenShards.open(folder), length=8, seed=1)
    batch = data.read_samples(rank_sample_indices(cursor=100, sequences=24))
    for ranks in (1, 2, 3, 4, 6, 8, 12, 24):
        parts = [data.read_samples(rank_sample_indices(100, 24, rank, ranks)) for rank in range(ranks)]
        assert all(len(part) == 24 // ranks for part in parts)
        assert (np.concatenate(parts) == batch).all()


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="divide by the 3 data ranks"):
        rank_sample_indices(0, 8, 0, 3)
    with pytest.raises(ValueError, match="`rank` must be from 0 to 1"):
        rank_sample_indices(0, 8, 2, 2)


def test_seeds_differ(folder: Path) -> None:
    shards = TokenShards.open(folder)
    assert (
        ShuffledDataset(shards, 8, seed=0).read_samples(np.arange(32))
        != ShuffledDataset(shards, 8, seed=1).read_samples(np.arange(32))
    ).any()


def test_too_few_tokens_for_a_sample_says_how_many(folder: Path) -> None:
    shards = TokenShards.open(folder)
    ShuffledDataset(shards, length=shards.tokens - 1, seed=0)
    with pytest.raises(SpecError, match=rf"holds {len(TOKENS)} tokens, but one sample .* takes {len(TOKENS) + 1}"):
        ShuffledDataset(shards, length=shards.tokens, seed=0)


def test_thousands_of_shards_are_not_all_open(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    build_dataset([str(tmp_path / "text.txt")], tmp_path / "shards", BytesTokenizer(), shard_tokens=16)
    shards = TokenShards.open(tmp_path / "shards")
    assert len(shards.index.shards) == -(-len(TOKENS) // 16) > 128
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert shards.read(0, shards.tokens).tolist() == TOKENS
    assert len(list(Path("/proc/self/fd").iterdir())) - before <= 64


def test_a_folder_without_an_index_is_no_data_set(folder: Path) -> None:
    (folder / "index.json").unlink()
    with pytest.raises(SpecError, match=r"has no index\.json\n.*danlu data build"):
        TokenShards.open(folder)
    with pytest.raises(SpecError, match="No such file or directory"):
        TokenShards.open(folder / "nowhere")


def test_every_shard_of_a_wrong_size_is_named(folder: Path) -> None:
    (folder / "00001.bin").write_bytes(b"short")
    (folder / "00003.bin").unlink()
    with pytest.raises(SpecError) as caught:
        TokenShards.open(folder)
    assert [Path(problem.file).name for problem in caught.value.problems] == ["00001.bin", "00003.bin"]
    assert "is 5 bytes, but the index says 74" in str(caught.value)


def test_a_size_not_checked_at_the_door_is_checked_on_reading(folder: Path) -> None:
    (folder / "00001.bin").write_bytes(b"short")
    shards = TokenShards.open(folder, check_sizes=False)
    assert shards.read(0, 37).tolist() == TOKENS[:37]
    with pytest.raises(SpecError, match="is 5 bytes, but the index says 74"):
        shards.read(0, 38)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("format", 2, "format"),
        ("tokens", 1, "must be what the shards hold"),
        ("dtype", "uint32", "must be uint16"),
        ("end_of_text", 257, "must be below the vocabulary"),
        ("surprise", 1, "surprise"),
    ],
)
def test_an_index_that_contradicts_itself_is_refused(folder: Path, key: str, value: object, message: str) -> None:
    path = folder / "index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(SpecError, match=message):
        TokenShards.open(folder)


def test_an_index_cannot_name_a_file_elsewhere(folder: Path) -> None:
    path = folder / "index.json"
    path.write_text(path.read_text().replace("00000.bin", "../00000.bin"))
    with pytest.raises(SpecError, match=r"shards\.0\.file"):
        TokenShards.open(folder)


def test_verify_finds_one_changed_bit(folder: Path) -> None:
    shards = TokenShards.open(folder)
    reports: list[tuple[int, int]] = []
    shards.verify(lambda done, total: reports.append((done, total)))
    assert reports[-1] == (2 * len(TOKENS), 2 * len(TOKENS))
    raw = bytearray((folder / "00002.bin").read_bytes())
    raw[10] ^= 1
    (folder / "00002.bin").write_bytes(raw)
    with pytest.raises(SpecError, match=r"00002\.bin:1: content: has sha256"):
        TokenShards.open(folder).verify()


def test_a_flipped_bit_is_an_error_when_it_is_read(folder: Path) -> None:
    raw = bytearray((folder / "00002.bin").read_bytes())
    raw[10] ^= 1
    (folder / "00002.bin").write_bytes(raw)
    shards = TokenShards.open(folder)
    assert shards.read(0, 74).tolist() == TOKENS[:74]
    with pytest.raises(
        SpecError, match=r"00002\.bin:1: block 0: is corrupt: its CRC-32C is .* documents 0 to 0"
    ) as caught:
        shards.read(100, 30)
    assert "tokens 74 to 110" in str(caught.value) and "danlu data build" in str(caught.value)


def test_a_damaged_table_of_sums_is_an_error(folder: Path) -> None:
    (folder / "00002.crc").write_bytes(b"\0\0\0\0")
    with pytest.raises(SpecError, match=r"00002\.crc:1: content: has sha256"):
        TokenShards.open(folder).read(100, 30)
    with pytest.raises(SpecError, match=r"00002\.crc"):
        TokenShards.open(folder).verify()


def test_every_flipped_bit_of_a_block_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a" * 500)
    build_dataset([str(tmp_path / "text.txt")], tmp_path / "shards", BytesTokenizer())
    path = tmp_path / "shards" / "00000.bin"
    whole = path.read_bytes()
    for bit in range(0, 8 * len(whole), 7):
        raw = bytearray(whole)
        raw[bit // 8] ^= 1 << bit % 8
        path.write_bytes(raw)
        with pytest.raises(SpecError, match="is corrupt"):
            TokenShards.open(tmp_path / "shards").read(3, 4)


def test_a_data_set_of_an_earlier_release_opens_with_a_warning(folder: Path) -> None:
    path = folder / "index.json"
    index = json.loads(path.read_text())
    del index["editions"]
    index["shards"] = [{key: shard[key] for key in ("file", "tokens", "sha256")} for shard in index["shards"]]
    path.write_text(json.dumps(index))
    with pytest.warns(UserWarning, match=r"\d+ of \d+ shards have no block checksums"):
        shards = TokenShards.open(folder)
    assert shards.read(0, shards.tokens).tolist() == TOKENS
    assert [part.document for part in shards.document_spans(0, 20)] == [None]
    assert shards.token_counts(0).sum() == len(TOKENS)
    shards.verify()


def test_a_data_set_replaced_under_a_reader_is_noticed(folder: Path) -> None:
    shards = TokenShards.open(folder)
    shards.read(0, 10)
    other = folder.parent / "other.txt"
    other.write_text(TEXT.upper())  # the same sizes throughout
    build_dataset([str(other)], folder, BytesTokenizer(), shard_tokens=37, force=True)
    assert shards.read(0, 10).tolist() == TOKENS[:10]  # still mapped
    with pytest.raises(SpecError, match="was replaced while it was being read"):
        shards.read(40, 10)


def test_dtype_is_the_smallest_that_fits() -> None:
    sizes = {1: "uint8", 256: "uint8", 257: "uint16", 65536: "uint16", 65537: "uint32", 2**32: "uint32"}
    assert {size: token_dtype(size) for size in sizes} == sizes
    with pytest.raises(ValueError, match="at most 2"):
        token_dtype(2**32 + 1)
