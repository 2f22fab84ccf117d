"""DeepSeek-V3 folders: what only they have, and what is refused or left out."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from made_hf import make_hf
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from danlu.cli.app import app
from danlu.framework.full_model import empty_decoder
from danlu.framework.hf.compare import LOGIT_TOLERANCE, compare_logits, load_decoder, load_imported_decoder
from danlu.framework.hf.convert import export_hf, import_hf, weight_shapes
from danlu.framework.hf.families import FAMILIES, find_family, unsupported_trait
from danlu.framework.hf.layout import check_layout
from danlu.framework.weights import WEIGHTS_FILE_PREFIX, buffer_shapes, load_weights
from danlu.spec import SpecError
from danlu.spec.load import load_model
from danlu.spec.model import Mtp
from danlu.storage.checkpoint.safetensors_io import SafetensorsReader


def _weights(folder: Path) -> SafetensorsReader:
    return SafetensorsReader(folder, WEIGHTS_FILE_PREFIX)


def _change(source: Path, changes: dict[str, Any]) -> None:
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes, indent=2))


def test_the_shape_is_that_of_the_configuration(tmp_path: Path) -> None:
    model = import_hf(make_hf(tmp_path / "source", "deepseek v3 tied, long context"), tmp_path / "out").model
    assert model.mla is not None
    assert model.mla.model_dump() == {
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 12,
        "v_head_dim": 10,
    }
    assert model.moe is not None
    assert (model.moe.experts, model.moe.top_k, model.moe.shared, model.moe.dense_layers) == (8, 3, 2, 1)
    assert (model.moe.n_group, model.moe.topk_group, model.moe.routed_scaling_factor) == (4, 2, 2.5)
    assert (model.moe.score, model.moe.balance, model.moe.normalize) == ("sigmoid", "bias", False)
    assert model.rope_scaling is not None
    assert (model.rope_scaling.kind, model.rope_scaling.mscale_all_dim) == ("yarn", 0.8)
    assert load_model(str(tmp_path / "out" / "model.toml")) == model


@pytest.mark.full
def test_a_wrong_trait_would_show(tmp_path: Path) -> None:
    source = make_hf(tmp_path / "source", "deepseek v3 tied, long context")
    model = import_hf(source, tmp_path / "out").model
    assert model.moe is not None
    assert model.rope_scaling is not None
    moe = model.moe
    wrong: list[dict[str, Any]] = [
        {"moe": moe.model_copy(update={"routed_scaling_factor": 1.0})},
        {"moe": moe.model_copy(update={"n_group": 1, "topk_group": 1})},
        {"moe": moe.model_copy(update={"normalize": True})},
        {"rope_scaling": model.rope_scaling.model_copy(update={"mscale_all_dim": 1.0})},
        {"rope_scaling": None},
    ]
    for change in wrong:
        other = model.model_copy(update=change)
        found = compare_logits(source, other, lambda other=other: load_imported_decoder(tmp_path / "out", other))
        assert found.max_difference > LOGIT_TOLERANCE, change


def test_the_bias_of_the_choice_comes_along_in_fp32(tmp_path: Path) -> None:
    """It is a buffer: it is in no list of parameters, and an export in bf16 must not round it."""
    source = make_hf(tmp_path / "source", "deepseek v3")
    model = import_hf(source, tmp_path / "out").model
    names = [f"blocks.{layer}.mlp.router.bias_E" for layer in (1, 2)]
    assert list(buffer_shapes(model)) == names
    decoder = empty_decoder(model)
    load_weights([decoder], model, tmp_path / "out")
    theirs = SafetensorsReader(source, "model")
    for layer, name in zip((1, 2), names, strict=True):
        expected = theirs.read(f"model.layers.{layer}.mlp.gate.e_score_correction_bias")
        assert expected.abs().max() > 0.05
        assert torch.equal(decoder.get_buffer(name), expected)
    export_hf(model, _weights(tmp_path / "out").read, tmp_path / "export", tmp_path / "out", dtype="bf16")
    again = SafetensorsReader(tmp_path / "export", "model")
    assert again.dtype("model.layers.1.mlp.gate.weight") == torch.bfloat16
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert again.dtype(name) == torch.float32
    assert torch.equal(again.read(name), theirs.read(name))
    states = {check.name: check.state for check in check_layout(tmp_path / "export")}
    assert states["config.json: dtype"] == "ok"


def test_the_stacked_form_of_experts_is_read_too(tmp_path: Path) -> None:
    for name, saving in (("each", {}), ("stacked", {"save_original_format": False})):
        import_hf(make_hf(tmp_path / name, "deepseek v3", **saving), tmp_path / f"{name}-out")
    forms = [
        {"gate_up_proj" in name for name in SafetensorsReader(tmp_path / form, "model").names}
        for form in ("each", "stacked")
    ]
    assert forms == [{False}, {False, True}]
    one, other = _weights(tmp_path / "each-out"), _weights(tmp_path / "stacked-out")
    assert one.names == other.names
    assert all(torch.equal(one.read(name), other.read(name)) for name in one.names)


def test_layers_for_multi_token_prediction_are_left_out_with_their_size(tmp_path: Path) -> None:
    source = make_hf(tmp_path / "source", "deepseek v3")
    tensors = load_file(source / "model.safetensors")
    extra = {"eh_proj.weight": torch.ones(32, 64), "self_attn.o_proj.weight": torch.ones(32, 40)}
    save_file(
        tensors | {f"model.layers.3.{name}": tensor for name, tensor in extra.items()}, source / "model.safetensors"
    )
    _change(source, {"num_nextn_predict_layers": 1})
    result = CliRunner().invoke(app, ["import", "hf", str(source), "-o", str(tmp_path / "out"), "--no-compare"])
    assert result.exit_code == 0, result.output
    # (32 · 64 + 32 · 40) · 4 bytes
    assert "left out: layers for multi-token prediction (--mtp imports them): 2 tensors, 13.3 kB" in result.stderr
    names = _weights(tmp_path / "out").names
    assert "blocks.2.attention.o.weight" in names
    assert not any(name.startswith("blocks.3.") for name in names)


def test_modules_of_multi_token_prediction_are_exported_as_deepseek_names_them(tmp_path: Path) -> None:
    plain = import_hf(make_hf(tmp_path / "source", "deepseek v3"), tmp_path / "out").model
    model = plain.model_copy(update={"mtp": Mtp(depth=2)})
    shapes = weight_shapes(model, FAMILIES["deepseek_v3"])
    generator = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}
    export_hf(model, tensors.__getitem__, tmp_path / "export")
    written = SafetensorsReader(tmp_path / "export", "model")
    first, last = f"model.layers.{model.layers}", f"model.layers.{model.layers - 1}"
    own = {"enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head", "embed_tokens"}
    of_a_layer = {name.removeprefix(last) for name in written.names if name.startswith(f"{last}.")}
    assert {name.removeprefix(first) for name in written.names if name.startswith(f"{first}.")} == {
        *of_a_layer,
        *(f".{name}.weight" for name in own),
    }
    for theirs, ours in (
        ("model.layers.3.eh_proj.weight", "mtp.0.project.weight"),
        ("model.layers.4.hnorm.weight", "mtp.1.hidden_norm.weight"),
        ("model.layers.4.shared_head.head.weight", "head.score.weight"),
        ("model.layers.3.self_attn.kv_b_proj.weight", "mtp.0.block.attention.kv_b.weight"),
        ("model.layers.3.mlp.gate.e_score_correction_bias", "mtp.0.block.mlp.router.bias_E"),
    ):
        assert torch.equal(written.read(theirs), tensors[ours]), theirs
    assert torch.equal(
        written.read("model.layers.4.mlp.experts.2.up_proj.weight"), tensors["mtp.1.block.mlp.experts.up"][2].T
    )
    assert json.loads((tmp_path / "export" / "config.json").read_text())["num_nextn_predict_layers"] == 2
    found = compare_logits(tmp_path / "export", plain, lambda: load_decoder(plain, tensors.__getitem__, torch.float32))
    assert found.max_difference <= LOGIT_TOLERANCE


def test_modules_of_multi_token_prediction_come_back_if_asked_for(tmp_path: Path) -> None:
    plain = import_hf(make_hf(tmp_path / "source", "deepseek v3"), tmp_path / "out").model
    model = plain.model_copy(update={"mtp": Mtp(depth=2)})
    shapes = weight_shapes(model, FAMILIES["deepseek_v3"])
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    export_hf(model, tensors.__getitem__, tmp_path / "export")
    imported = import_hf(tmp_path / "export", tmp_path / "again", mtp=True)
    assert imported.model.mtp == Mtp(depth=2)
    assert imported.left_out == ""
    again = _weights(tmp_path / "again")
    assert set(again.names) == set(tensors)
    assert all(torch.equal(again.read(name), tensor) for name, tensor in tensors.items())
    without = import_hf(tmp_path / "export", tmp_path / "without")
    assert without.left_out.startswith("layers for multi-token prediction")
    assert without.model.mtp is None


def test_a_module_with_a_table_of_its_own_is_refused(tmp_path: Path) -> None:
    plain = import_hf(make_hf(tmp_path / "source", "deepseek v3"), tmp_path / "out").model
    model = plain.model_copy(update={"mtp": Mtp()})
    tensors = {name: torch.randn(shape) for name, shape in weight_shapes(model, FAMILIES["deepseek_v3"]).items()}
    export_hf(model, tensors.__getitem__, tmp_path / "export")
    (file,) = (tmp_path / "export").glob("*.safetensors")
    written = load_file(file)
    name = f"model.layers.{model.layers}.embed_tokens.weight"
    save_file(written | {name: written[name] + 1}, file)
    with pytest.raises(SpecError, match=r"differs from model\.embed_tokens\.weight"):
        import_hf(tmp_path / "export", tmp_path / "again", mtp=True)
    assert import_hf(tmp_path / "export", tmp_path / "again").model.mtp is None


def test_modules_that_are_not_there_cannot_be_imported(tmp_path: Path) -> None:
    source = make_hf(tmp_path / "source", "deepseek v3")
    _change(source, {"num_nextn_predict_layers": 0})
    with pytest.raises(SpecError, match="no module of multi-token prediction to import"):
        import_hf(source, tmp_path / "out", mtp=True)
    with pytest.raises(SpecError, match="has no modules of multi-token prediction"):
        import_hf(make_hf(tmp_path / "llama", "llama"), tmp_path / "out", mtp=True)


@pytest.mark.parametrize(
    ("changes", "key", "says"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config", "no support for it"),
        ({"scoring_func": "softmax"}, "scoring_func", 'only "sigmoid"'),
        ({"topk_method": "greedy"}, "topk_method", 'only "noaux_tc"'),
        ({"rope_interleave": False}, "rope_interleave", "only true"),
        ({"moe_layer_freq": 2}, "moe_layer_freq", "only 1"),
        ({"attention_bias": True}, "attention_bias", "none here"),
        ({"kv_lora_rank": "x"}, "kv_lora_rank", "must be a number above 0"),
        ({"topk_group": 5}, "moe", "`topk_group` must be at most `n_group`"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0}},
            "rope_parameters",
            "with original_max_position_embeddings",
        ),
    ],
)
def test_what_cannot_be_computed_is_refused(changes: dict[str, Any], key: str, says: str, tmp_path: Path) -> None:
    source = make_hf(tmp_path / "source", "deepseek v3")
    _change(source, changes)
    with pytest.raises(SpecError) as refused:
        import_hf(source, tmp_path / "out")
    problem = refused.value.problems[0]
    assert problem.key == key
    assert says in problem.message
    if key == "quantization_config":
        assert "a copy of the model in bf16" in problem.suggestion


def test_models_that_no_family_has_say_what_is_too_much() -> None:
    model = load_model("tiny-mla")
    found = find_family(model)
    assert found is not None
    assert found.model_type == "deepseek_v3"
    assert model.moe is not None
    softmax = model.model_copy(update={"moe": model.moe.model_copy(update={"score": "softmax"})})
    assert find_family(softmax) is None
    assert unsupported_trait(softmax)
    dense = model.model_copy(update={"moe": None})
    assert find_family(dense) is None
