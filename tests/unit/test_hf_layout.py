"""What loaders need of an exported folder: it is there, it loads from nothing else, and what is said if not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from made_hf import MODELS, make_hf, transformers
from made_saved_runs import LLAMA, random_weights, saved_run
from typer.testing import CliRunner

from danlu.cli.app import app
from danlu.framework.decoder.decoder import Decoder
from danlu.framework.generation import generate
from danlu.framework.hf.convert import export_hf, import_hf
from danlu.framework.hf.layout import check_layout
from danlu.framework.hf.tokenizer import ExportTokenizer, bytes_tokenizer_json
from danlu.framework.sampling import Sampling
from danlu.framework.weights import WEIGHTS_FILE_PREFIX
from danlu.spec import Moe
from danlu.spec.model import Model
from danlu.storage.checkpoint.safetensors_io import SafetensorsReader
from danlu.storage.data.tokenizer import BytesTokenizer

TEXT = "Danlu 丹炉 🙂\n\tend"
BYTES = ExportTokenizer(BytesTokenizer(), 256)
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, tied, biases": {"tied": True, "bias": True},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "mixtral": {"moe": Moe(experts=4, top_k=2, width=24)},
}


def exported(folder: Path, model: Model = LLAMA, dtype: str = "fp32") -> Path:
    module = random_weights(Decoder(model), 1)
    export_hf(model, lambda name: module.get_parameter(name).detach(), folder, dtype=dtype, tokenizer=BYTES)
    return folder


def states(folder: Path) -> dict[str, str]:
    return {check.name: check.state for check in check_layout(folder)}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_folder_loads_from_nothing_else(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, configuration and tokenizer by transformers' own classes, and the tokens that `danlu sample` draws."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = LLAMA.model_copy(update=VARIANTS[variant])
    folder = exported(tmp_path / "export", model)
    assert set(states(folder).values()) <= {"ok", "note"}, check_layout(folder)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", local_files_only=True, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    assert theirs.dtype == torch.float32
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ids = list(TEXT.encode())
    assert tokenizer(TEXT).input_ids == ids and tokenizer.decode(ids) == TEXT
    assert tokenizer.eos_token_id == theirs.config.eos_token_id == theirs.generation_config.eos_token_id == 256
    assert theirs.config.bos_token_id is None and len(tokenizer) == 257
    drawn = theirs.eval().generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False, pad_token_id=0)
    ours = generate(
        random_weights(Decoder(model), 1), ids, Sampling(temperature=0), tokens=24, end_of_text=256, vocabulary=264
    )
    assert [token for token in drawn[0, len(ids) :].tolist() if token != 256] == [step[0] for step in ours]


@pytest.mark.parametrize("name", MODELS)
def test_an_import_comes_back_as_loaders_need_it(name: str, tmp_path: Path) -> None:
    model = import_hf(make_hf(tmp_path / "source", name), tmp_path / "out").model
    read = SafetensorsReader(tmp_path / "out", WEIGHTS_FILE_PREFIX).read
    export_hf(model, read, tmp_path / "export", tmp_path / "out")
    found = states(tmp_path / "export")
    assert [found[f"config.json: {key}"] for key in ("architectures", "dtype", "positions")] == ["ok"] * 3
    assert found["weights: names"] == found["weights: files"] == "ok"
    assert found["tokenizer.json"] == "wrong"  # the stand-in for one, which has no vocabulary


def test_the_dtype_is_that_of_the_files(tmp_path: Path) -> None:
    folder = exported(tmp_path / "export", dtype="bf16")
    assert states(folder)["config.json: dtype"] == "ok"
    assert transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype == torch.bfloat16


def _config(**changes: Any) -> Callable[[Path], None]:
    return _json("config.json", **changes)


def _json(name: str, **changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        values = json.loads((folder / name).read_text()) | changes
        (folder / name).write_text(json.dumps({key: value for key, value in values.items() if value != "drop"}))

    return change


def _remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _stray(folder: Path) -> None:
    (folder / "adapter.safetensors").write_bytes(b"")


@pytest.mark.parametrize(
    ("change", "name", "state"),
    [
        (_config(architectures="drop"), "config.json: architectures", "missing"),
        (_config(architectures=["LlamaModel"]), "config.json: architectures", "wrong"),
        (_config(torch_dtype="bfloat16"), "config.json: dtype", "wrong"),
        (_config(torch_dtype="drop"), "config.json: dtype", "missing"),
        (_config(rope_theta="drop"), "config.json: positions", "missing"),
        (_config(eos_token_id="drop"), "config.json: eos_token_id", "missing"),
        (_config(eos_token_id=2), "config.json: eos_token_id", "note"),
        (_config(num_hidden_layers=3), "config and weights", "wrong"),
        (_config(vocab_size=128), "config and weights", "wrong"),
        (_stray, "weights: files", "wrong"),
        (_remove("tokenizer.json"), "tokenizer.json", "missing"),
        (_json("tokenizer.json", added_tokens=[{"id": 264, "content": "x"}]), "tokenizer.json", "wrong"),
        (_json("tokenizer.json", post_processor={"type": "TemplateProcessing"}), "added tokens", "note"),
        (_remove("tokenizer_config.json"), "tokenizer_config.json", "missing"),
        (_json("tokenizer_config.json", eos_token="</s>"), "tokenizer_config.json", "wrong"),
        (_json("tokenizer_config.json", eos_token="drop"), "tokenizer_config.json", "missing"),
        (_remove("generation_config.json"), "generation_config.json", "missing"),
        (_json("generation_config.json", eos_token_id=7), "generation_config.json", "wrong"),
        (_remove("special_tokens_map.json"), "special_tokens_map.json", "note"),
        (_json("tokenizer_config.json", chat_template="{{ messages }}"), "chat template", "ok"),
    ],
)
def test_what_is_missing_or_wrong_is_named(
    change: Callable[[Path], None], name: str, state: str, tmp_path: Path
) -> None:
    folder = exported(tmp_path / "export")
    before = states(folder)
    change(folder)
    after = states(folder)
    assert after[name] == state and before.get(name) != state


def test_the_bytes_tokenizer_is_one_that_others_read() -> None:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import ByteLevel

    tokenizer = Tokenizer.from_str(bytes_tokenizer_json().decode())
    every = "".join(map(chr, range(0x20, 0x2FF))) + TEXT
    assert tokenizer.encode(every).ids == list(every.encode())
    assert tokenizer.decode(list(every.encode())) == every
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    assert sorted(vocabulary) == sorted(ByteLevel.alphabet()) and sorted(vocabulary.values()) == list(range(256))
    assert tokenizer.token_to_id("<|endoftext|>") == 256


# --- the command


def _export(run_folder: Path, output: Path) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["export", "hf", str(run_folder), "-o", str(output), "--json"])
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout)) | {"stderr": result.stderr}


def test_the_command_exports_the_tokenizer_of_the_run_and_prints_the_table(tmp_path: Path) -> None:
    run = saved_run(tmp_path)
    figures = _export(run.path, tmp_path / "export")
    assert figures["good"] and figures["compared"] and figures["step"] == 20
    assert {check["state"] for check in figures["layout"]} == {"ok", "note"}
    shown = CliRunner().invoke(app, ["export", "hf", str(run.path), "-o", str(tmp_path / "again"), "--no-compare"])
    assert "what transformers and vLLM read" in shown.stdout and "tokenizer.json" in shown.stdout


def test_a_tokenizer_that_is_gone_is_reported_and_missing(tmp_path: Path) -> None:
    run = saved_run(tmp_path)
    run.recipe.write_text(run.recipe.read_text().replace('tokenizer = "bytes"', f'tokenizer = "{tmp_path}/gone.json"'))
    figures = _export(run.path, tmp_path / "export")
    assert "the tokenizer of the run is not exported" in figures["stderr"] and figures["good"]
    found = {check["name"]: check["state"] for check in figures["layout"]}
    assert found["tokenizer.json"] == found["config.json: eos_token_id"] == "missing"


def test_the_tokenizer_of_an_import_gives_way_to_the_one_of_training(tmp_path: Path) -> None:
    source = make_hf(tmp_path / "source", "llama")
    (source / "generation_config.json").write_text('{"eos_token_id": 2, "temperature": 0.6}')
    (source / "chat_template.jinja").write_text("of the other tokenizer")
    model = import_hf(source, tmp_path / "out").model
    read = SafetensorsReader(tmp_path / "out", WEIGHTS_FILE_PREFIX).read
    export_hf(model, read, tmp_path / "export", tmp_path / "out", tokenizer=BYTES)
    assert (tmp_path / "export" / "tokenizer.json").read_bytes() == bytes_tokenizer_json()
    assert not (tmp_path / "export" / "chat_template.jinja").exists()
    kept = json.loads((tmp_path / "export" / "generation_config.json").read_text())
    assert kept["eos_token_id"] == 256 and kept["temperature"] == 0.6
    (tmp_path / "out" / "tokenizer.json").write_bytes(bytes_tokenizer_json())
    export_hf(model, read, tmp_path / "same", tmp_path / "out", tokenizer=BYTES)
    assert (tmp_path / "same" / "chat_template.jinja").exists()
