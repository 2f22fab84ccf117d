"""`danlu data append` and `danlu data locate`: from a user's hands to bytes and back to text."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from danlu.cli.app import app
from danlu.spec.load import load_recipe
from danlu.storage.data.mixture_dataset import MixtureDataset, update_version_log
from danlu.storage.data.token_shards import TokenShards
from danlu.storage.data.version_log import DatasetVersionLog

RECIPE = """\
name = "mixed"
steps = 100
seed = 5

[model]
base = "tiny-llama"
vocabulary = 264

[batch]
sequences = 4
length = 16

[[data.sources]]
shards = "words"
weight = 3

[[data.sources]]
shards = "numbers"
weight = 1
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("words", "numbers"):
        lines = [json.dumps({"text": f"{name} of document {number}, "}) for number in range(40)]
        Path(f"{name}.jsonl").write_text("\n".join(lines))
        assert danlu("data", "build", f"{name}.jsonl", "-o", name, "--shard-tokens", "500").exit_code == 0
    Path("mixed.toml").write_text(RECIPE)
    return tmp_path


def danlu(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def located(*arguments: str) -> list[dict[str, Any]]:
    result = danlu("data", "locate", *arguments, "--json")
    assert result.exit_code == 0, result.output
    answer: list[dict[str, Any]] = json.loads(result.stdout)
    return answer


def test_every_sample_of_a_step_leads_back_to_its_documents(folder: Path) -> None:
    samples = located("mixed.toml", "--step", "3")
    assert [sample["index"] for sample in samples] == [8, 9, 10, 11]
    assert sorted(sample["source"] for sample in samples) == [0, 0, 0, 1]
    for sample in samples:
        shards = TokenShards.open(Path(sample["where"]))
        name = Path(sample["where"]).name
        texts = [json.loads(line)["text"] for line in Path(f"{name}.jsonl").read_text().splitlines()]
        assert sum(part["tokens"][1] - part["tokens"][0] for part in sample["documents"]) == 17
        for part in sample["documents"]:
            whole = texts[part["document"]] + "<|endoftext|>"
            assert part["text"] in whole and part["text"]
        raw = b"".join(
            (Path(sample["where"]) / part["file"]).read_bytes()[slice(*part["bytes"])] for part in sample["shards"]
        )
        assert (np.frombuffer(raw, "<u2") == shards.read(sample["sample"] * 16, 17)).all()


def test_ranks_share_the_step(folder: Path) -> None:
    Path("plan.toml").write_text("[degrees]\nreplicate = 2\ntp = 2\n")
    whole = located("mixed.toml", "--step", "3")
    parts = [located("mixed.toml", "--step", "3", "--plan", "plan.toml", "--rank", str(rank)) for rank in range(4)]
    assert parts[0] == parts[1] == whole[:2] and parts[2] == parts[3] == whole[2:]
    assert (
        "must be below 4"
        in danlu("data", "locate", "mixed.toml", "--step", "1", "--plan", "plan.toml", "--rank", "4").output
    )


def test_a_run_is_shown_as_it_read_over_an_append(folder: Path) -> None:
    run = folder / "runs" / "mixed"
    run.mkdir(parents=True)
    (run / "recipe.toml").write_text(
        RECIPE.replace('"words"', f'"{folder}/words"').replace('"numbers"', f'"{folder}/numbers"')
    )
    (run / "plan.toml").write_text("")
    (run / "events.jsonl").write_text("")
    recipe = load_recipe(run / "recipe.toml")
    log = DatasetVersionLog(run / "data.jsonl")
    update_version_log(log, MixtureDataset.from_recipe(recipe.data, 16, 5), 0)
    before = [located("mixed", "--step", str(step)) for step in (2, 20)]
    result = danlu("data", "append", "numbers.jsonl", "-o", "words")
    assert result.exit_code == 0 and "version 1" in result.output
    assert [located("mixed", "--step", str(step)) for step in (2, 20)] == before, "promised, whatever was appended"
    update_version_log(log, MixtureDataset.from_recipe(recipe.data, 16, 5), 40)
    after = [located("mixed", "--step", str(step)) for step in (2, 20)]
    assert after[0] == before[0] and after[1] != before[1]
    shown = danlu("data", "show", "words").output
    assert "0: 2 shards" in shown and "1: 3 shards" in shown and "every block" in shown


def test_a_table_for_people(folder: Path) -> None:
    shown = danlu("data", "locate", "mixed.toml", "--step", "1").output
    assert "step 1, all ranks" in shown and "document" in shown and "words" in shown


def test_an_append_wants_what_the_data_set_was_built_with(folder: Path) -> None:
    index = folder / "words" / "index.json"
    index.write_text(index.read_text().replace('"tokenizer": "bytes"', '"tokenizer": "other.json sha256:0"'))
    result = danlu("data", "append", "numbers.jsonl", "-o", "words")
    assert "--tokenizer FILE" in str(result.exception)


def test_ray_is_asked_for_by_name_when_it_is_missing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    result = danlu("data", "build", "words.jsonl", "-o", "other", "--on", "ray")
    assert "pip install 'danlu[data]'" in str(result.exception)
    result = danlu("data", "build", "words.jsonl", "-o", "other", "--address", "10.0.0.1:6379")
    assert result.exit_code == 2 and "is for --on ray" in result.output
    assert not Path("other").exists()


def test_show_tells_the_mixture_of_a_run(folder: Path) -> None:
    run = folder / "runs" / "mixed"
    run.mkdir(parents=True)
    (run / "recipe.toml").write_text(RECIPE)
    (run / "plan.toml").write_text("")
    (run / "events.jsonl").write_text("")
    shown = danlu("show", "mixed", "--no-open").output
    assert "75.0 % (weight 3)  words" in shown and "25.0 % (weight 1)  numbers" in shown
    parts = json.loads(danlu("show", "mixed", "--json").stdout)["mixture"]
    assert [(part["shards"], part["weight"], part["share"]) for part in parts] == [
        ("words", 3.0, 0.75),
        ("numbers", 1.0, 0.25),
    ]
    (run / "recipe.toml").write_text(RECIPE[: RECIPE.index("[[data")] + '[data]\nshards = "words"\n')
    assert "mixture" not in danlu("show", "mixed", "--no-open").output
