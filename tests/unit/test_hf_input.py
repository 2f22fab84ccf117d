"""Hugging Face folders and event files that are not what they should be: a message, soon, and nothing else."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from made_runs import line, make_run, started, step
from safetensors.torch import save_file

from danlu.framework.hf.convert import import_hf
from danlu.report.event_tail import MAX_PROBLEMS
from danlu.report.run_history import read_run_history
from danlu.spec import SpecError

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
}


def _folder(tmp_path: Path, config: str | None = None, **changes: Any) -> Path:
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | changes, indent=1) if config is None else config)
    save_file({"w": torch.zeros(2)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hidden_size": 10**18}, r"config\.json:4: hidden_size: is 10{18}, but must be a number"),
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers: is 1000000000: .*100000"),
        ({"num_hidden_layers": 90_000}, r"num_hidden_layers: is 90000, but there are only 1 tensors"),
        ({"num_attention_heads": 0}, r"num_attention_heads: is 0"),
        ({"hidden_size": "8"}, r'hidden_size: is "8", but must be a number'),
        ({"hidden_size": [8]}, r"hidden_size: is \[8\], but must be a number"),
        ({"rope_scaling": "llama3"}, r'rope_scaling: is "llama3", but must be a table'),
        ({"rope_scaling": {"rope_type": "llama3", "factor": "x"}}, r"rope_scaling: is .* but must be a table"),
        ({"layer_types": [[]]}, r"layer_types: is \[\[\]\], but must be a list of names"),
        ({"tie_word_embeddings": "yes"}, r'tie_word_embeddings: is "yes", but must be true or false'),
        ({"model_type": ["llama"]}, r"model_type: is \['llama'\], but must be one of"),
    ],
)
def test_a_configuration_that_cannot_be(changes: dict[str, Any], expected: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=expected):
        import_hf(_folder(tmp_path, **changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[" * 100_000, "nests"),
        ("{", "is not JSON"),
        ("[]", "model_type"),
        ("1" * 5000, "is not JSON that can be read"),
    ],
)
def test_a_configuration_that_is_none(text: str, expected: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=expected):
        import_hf(_folder(tmp_path, text), tmp_path / "out")


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        ({"weight_map": {"w": "../secret"}}, r"index\.json:1: weight_map: .*\.\./secret"),
        ({"weight_map": {"w": "/etc/passwd"}}, "weight_map: .*/etc/passwd"),
        ({"weight_map": {"w": "a\0b"}}, "weight_map: "),
        ({"weight_map": {"w": 5}}, "weight_map: "),
        ({"weight_map": ["w"]}, "weight_map: must map every tensor"),
        ([], "weight_map: must map every tensor"),
    ],
)
def test_an_index_that_leads_astray(index: Any, expected: str, tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    (tmp_path / "secret").write_text("secret")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(SpecError, match=expected):
        import_hf(folder, tmp_path / "out")


def test_weights_that_are_no_safetensors(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    (folder / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(SpecError, match=r"model\.safetensors:1: "):
        import_hf(folder, tmp_path / "out")


def test_a_pipe_in_place_of_a_configuration(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    with pytest.raises(SpecError, match="is a pipe"):
        import_hf(folder, tmp_path / "out")


def test_a_file_that_holds_no_events_is_not_read_to_its_end(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    run.events.write_text(line(started()) + line(step(1)) + "{}\n" * 2_000_000)
    story = read_run_history(run)
    assert story.step == 1 and len(story.problems) == MAX_PROBLEMS + 1
    assert "invalid lines: reading stopped" in str(story.problems[-1])


def test_times_that_no_calendar_has_are_no_events(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    run.events.write_text(line(started()) + line(step(1)).replace("1000.5", "Infinity") + line(step(2)))
    story = read_run_history(run)
    assert story.step == 2 and [problem.line for problem in story.problems] == [2]
