"""Two real ranks on a mixture to which shards are appended while they train: the order that was promised stays."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layouts import STEPS
from mixing import make_source, write_texts
from mixture_rank import APPENDED_AFTER, STOPS
from ranks import run_ranks

from danlu.spec.recipe import DataConfig, DataSource
from danlu.storage.data.mixture_dataset import MixtureDataset
from danlu.storage.data.version_log import DatasetVersionLog

BATCH = 16
TAKEN_UP = 6  # the first checkpoint after the append
Told = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    (folder / "sources").mkdir()
    make_source(folder / "sources", "code", 2000, 1)
    make_source(folder / "sources", "prose", 5000, 2)
    write_texts(folder / "sources" / "late.jsonl", 3000, 3)
    run_ranks(Path(__file__).with_name("mixture_rank.py"), 2, str(folder), seconds=900)
    return folder


@pytest.fixture(scope="module")
def told(folder: Path) -> Told:
    return [json.loads((folder / f"told-{rank}.json").read_text()) for rank in range(2)]


def samples(told: Told, case: str) -> list[list[str]]:
    """The batch of every step, of which each of two data ranks read a half."""
    return [first + second for first, second in zip(told[0][case]["rows"], told[1][case]["rows"], strict=True)]


def test_the_append_is_taken_up_at_the_next_checkpoint_and_read(folder: Path, told: Told) -> None:
    assert APPENDED_AFTER < TAKEN_UP
    promises = DatasetVersionLog(folder / "run-whole" / "data.jsonl").read()
    assert [(promise.cursor, promise.editions) for promise in promises] == [(0, (0, 0)), (TAKEN_UP * BATCH, (1, 0))]
    sources = tuple(
        DataSource(shards=str(folder / "data-whole" / name), weight=weight)
        for name, weight in (("code", 0.3), ("prose", 0.7))
    )
    data = MixtureDataset.from_recipe(DataConfig(sources=sources), 32, 7)
    data.set_version_schedule([(promise.cursor, promise.editions) for promise in promises])
    size = data.sources[0].num_samples(32, 0)
    places = data.locate(np.arange(STEPS * BATCH))
    new = [number for number, place in enumerate(places) if place.source == 0 and place.sample_id >= size]
    assert new and min(new) >= TAKEN_UP * BATCH, "nothing that was appended before it is promised, some of it after"
    batches = samples(told, "whole")
    assert len(batches) == STEPS and all(len(batch) == BATCH for batch in batches)


@pytest.mark.parametrize("case", [*(f"stopped {stop}" for stop in STOPS), "killed"])
def test_stopped_or_killed_it_reads_and_computes_what_the_whole_run_did(folder: Path, told: Told, case: str) -> None:
    assert samples(told, case) == samples(told, "whole")
    for rank in range(2):
        assert told[rank][case]["losses"] == told[rank]["whole"]["losses"], "to the last bit"
    whole, other = (
        DatasetVersionLog(folder / f"run-{name}" / "data.jsonl").read() for name in ("whole", case.replace(" ", "-"))
    )
    assert [(each.cursor, each.editions) for each in other] == [(each.cursor, each.editions) for each in whole]


def test_what_a_kill_took_back_is_read_again_as_it_was(told: Told) -> None:
    assert samples(told, "killed, before") == samples(told, "whole")[:7]


def test_another_layout_reads_the_same_samples(told: Told) -> None:
    expected = samples(told, "whole")[6:]
    for rank in range(2):  # tensor parallel ranks read the whole batch
        assert told[rank]["other layout, after 6"]["rows"] == expected
    whole = [float.fromhex(loss) for loss in told[0]["whole"]["losses"][6:]]
    resumed = [float.fromhex(loss) for loss in told[0]["other layout, after 6"]["losses"]]
    assert resumed == pytest.approx(whole, rel=1e-5)
