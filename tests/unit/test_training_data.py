import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from danlu.spec import SpecError
from danlu.spec.recipe import DataConfig, DataSource
from danlu.storage.data.build import build_dataset
from danlu.storage.data.dataset_index import read_index
from danlu.storage.data.mixture_dataset import MixtureDataset, update_version_log
from danlu.storage.data.token_shards import TokenShards
from danlu.storage.data.tokenizer import BytesTokenizer
from danlu.storage.data.version_log import DatasetVersionLog

BYTES = BytesTokenizer()
LENGTH = 8


def write_texts(path: Path, count: int, seed: int) -> str:
    dice = random.Random(seed)
    records = [{"text": "".join(dice.choices("abcdef", k=dice.randint(3, 60)))} for _ in range(count)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    for number, name in enumerate(("a", "b", "more")):
        write_texts(root / f"{name}.jsonl", 30 + 20 * number, number)
    build_dataset([str(root / "a.jsonl")], root / "a", BYTES, shard_tokens=300)
    build_dataset([str(root / "b.jsonl")], root / "b", BYTES, shard_tokens=300)
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "made")


def mixed(root: Path, *weights: float) -> DataConfig:
    names = ("a", "b")[: len(weights)]
    return DataConfig(
        sources=tuple(
            DataSource(shards=str(root / name), weight=weight) for name, weight in zip(names, weights, strict=True)
        )
    )


def append(root: Path, name: str, source: str = "more") -> None:
    build_dataset([str(root / f"{source}.jsonl")], root / name, BYTES, shard_tokens=300, append=True)


def test_one_source_is_the_plain_sequence(root: Path) -> None:
    one = MixtureDataset.from_recipe(DataConfig(shards=str(root / "a")), LENGTH, 3)
    same = MixtureDataset.from_recipe(mixed(root, 5), LENGTH, 3)
    assert (one.read_samples(np.arange(300)) == same.read_samples(np.arange(300))).all()
    assert one.baseline_loss == read_index(root / "a").unigram_loss


def test_a_mixture_reads_every_source_whole_epoch_by_epoch(root: Path) -> None:
    data = MixtureDataset.from_recipe(mixed(root, 0.7, 0.3), LENGTH, 3)
    places = data.locate(np.arange(4000))
    assert [sum(place.source == source for place in places[:1000]) for source in (0, 1)] == [700, 300]
    for source, shards in enumerate(data.sources):
        mine = [place.sample_id for place in places if place.source == source]
        size = shards.num_samples(LENGTH)
        for epoch in range(len(mine) // size):
            assert sorted(mine[epoch * size : (epoch + 1) * size]) == list(range(size))
    rows = data.read_samples(np.arange(50))
    for row, place in zip(rows, places, strict=False):
        start = place.sample_id * LENGTH
        assert (row == data.sources[place.source].read(start, LENGTH + 1)).all()


def test_the_baseline_of_a_mixture_is_the_entropy_of_the_mixed_tokens(root: Path) -> None:
    data = MixtureDataset.from_recipe(mixed(root, 3, 1), LENGTH, 0)
    shares = [np.bincount(s.read(0, s.tokens), minlength=257) / s.tokens for s in data.sources]
    mix = 0.75 * shares[0] + 0.25 * shares[1]
    assert data.baseline_loss == pytest.approx(-(mix[mix > 0] * np.log(mix[mix > 0])).sum())


def test_an_append_keeps_what_is_there_and_adds_an_edition(root: Path) -> None:
    before = {path.name: path.read_bytes() for path in (root / "a").iterdir()}
    old = TokenShards.open(root / "a")
    tokens, described = old.read(0, old.tokens), old.index
    append(root, "a")
    after = {path.name: path.read_bytes() for path in (root / "a").iterdir()}
    assert all(after[name] == raw for name, raw in before.items() if name not in ("index.json", ".done"))
    new = TokenShards.open(root / "a")
    new.verify()
    assert new.newest_version == 1 and new.index.extends(described) and not described.extends(new.index)
    assert (new.read(0, len(tokens)) == tokens).all()
    fresh = build_dataset([str(root / "a.jsonl"), str(root / "more.jsonl")], root / "fresh", BYTES)
    assert (new.read(0, new.tokens) == TokenShards.open(root / "fresh").read(0, new.tokens)).all()
    assert new.index.documents == fresh.index.documents
    assert new.index.unigram_loss == fresh.index.unigram_loss
    assert (new.token_counts(0) == np.bincount(tokens, minlength=257)).all()


def test_an_append_of_another_tokenizer_or_to_nothing_is_refused(root: Path) -> None:
    class Other(BytesTokenizer):
        pass

    with pytest.raises(SpecError, match="was given to append"):
        build_dataset([str(root / "more.jsonl")], root / "a", Other(name="other"), append=True)
    with pytest.raises(SpecError, match="is not a data set"):
        build_dataset([str(root / "more.jsonl")], root / "none", BYTES, append=True)


def test_a_reader_goes_on_over_an_append_and_sees_it_when_asked(root: Path) -> None:
    shards = TokenShards.open(root / "a")
    first = shards.read(0, 10)
    append(root, "a")
    assert (shards.read(0, 10) == first).all() and shards.newest_version == 0
    shards.refresh()
    assert shards.newest_version == 1


def test_a_run_takes_up_an_append_at_the_sample_it_has_come_to(root: Path, tmp_path: Path) -> None:
    log = DatasetVersionLog(tmp_path / "data.jsonl")
    data = MixtureDataset.from_recipe(mixed(root, 2, 1), LENGTH, 3)
    data.set_version_schedule(update_version_log(log, data, 0))
    before = data.read_samples(np.arange(200))
    append(root, "a")
    data.set_version_schedule(update_version_log(log, data, 120))
    whole = data.read_samples(np.arange(2000))
    assert (whole[:120] == before[:120]).all() and not (whole[120:200] == before[120:]).all()
    assert update_version_log(log, data, 160) == [(0, (0, 0)), (120, (1, 0))], "nothing new: nothing more is promised"
    for cursor in (0, 119, 120, 121, 700):  # resumed from any checkpoint, older than the append or not
        again = MixtureDataset.from_recipe(mixed(root, 2, 1), LENGTH, 3)
        again.set_version_schedule(update_version_log(log, again, cursor))
        assert (again.read_samples(np.arange(cursor, 2000)) == whole[cursor:]).all()
    numbers = [place.sample_id for place in data.locate(np.arange(2000)) if place.source == 0]
    size = data.sources[0].num_samples(LENGTH)
    assert sorted(numbers[:size]) == list(range(size)), "old and new, each once in the epoch that grew"


def test_a_run_begun_before_promises_were_kept_reads_on_as_it_did(root: Path, tmp_path: Path) -> None:
    data = MixtureDataset.from_recipe(DataConfig(shards=str(root / "a")), LENGTH, 3)
    before = data.read_samples(np.arange(60))
    append(root, "a")
    again = MixtureDataset.from_recipe(DataConfig(shards=str(root / "a")), LENGTH, 3)
    again.set_version_schedule(update_version_log(DatasetVersionLog(tmp_path / "data.jsonl"), again, 60))
    assert again.version_schedule == [(0, (0,)), (60, (1,))] and (again.read_samples(np.arange(60)) == before).all()


def test_a_promise_that_was_cut_off_does_not_count(root: Path, tmp_path: Path) -> None:
    log = DatasetVersionLog(tmp_path / "data.jsonl")
    data = MixtureDataset.from_recipe(DataConfig(shards=str(root / "a")), LENGTH, 3)
    update_version_log(log, data, 0)
    whole = log.path.read_bytes()
    log.path.write_bytes(whole + b'{"cursor": 8, "edi')
    assert update_version_log(log, data, 4) == [(0, (0,))]
    append(root, "a")
    update_version_log(log, data, 4)
    assert log.path.read_bytes().startswith(whole) and len(log.read()) == 2


def test_other_data_under_a_run_is_refused(root: Path, tmp_path: Path) -> None:
    log = DatasetVersionLog(tmp_path / "data.jsonl")
    update_version_log(log, MixtureDataset.from_recipe(mixed(root, 2, 1), LENGTH, 3), 0)
    with pytest.raises(SpecError, match=r"weights: are \[1, 1\], but the run began with \[2, 1\]"):
        update_version_log(log, MixtureDataset.from_recipe(mixed(root, 1, 1), LENGTH, 3), 8)
    with pytest.raises(SpecError, match=r"batch.length: is 4, but the run began with 8"):
        update_version_log(log, MixtureDataset.from_recipe(mixed(root, 2, 1), 4, 3), 8)
    build_dataset([str(root / "more.jsonl")], root / "b", BYTES, force=True)
    with pytest.raises(SpecError, match=r"b/index\.json:1: data: is not the data set that the run began with"):
        update_version_log(log, MixtureDataset.from_recipe(mixed(root, 2, 1), LENGTH, 3), 8)
