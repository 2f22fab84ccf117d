"""Blocks of every recipe, made small, compiled with every graph pass: equal to eager ones, and no pass is refused."""

from pathlib import Path

import pytest
import torch
from test_graph_passes import EVERY_PASS
from torch import nn

from danlu.compiler import blocks as blocks_module
from danlu.compiler.blocks import apply_compile
from danlu.compiler.pass_manager import PassManager
from danlu.framework.custom.construct import build_seeded_module
from danlu.framework.decoder.block import Block
from danlu.framework.precision import compute_dtype
from danlu.spec import load_recipe
from danlu.spec.custom_model import CustomModel
from danlu.spec.model import Model
from danlu.spec.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
pytestmark = [
    pytest.mark.full,
    # What torch says while it loads its compiler and traces; none of it is about the blocks.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*torch.autograd.function.Function.* should not be instantiated"),
]


def small(model: Model) -> Model:
    """The same kinds of layers, attention, experts and norms, in sizes that a test can afford."""
    grouped = model.kv_heads not in (None, model.heads)
    sizes = {"vocabulary": 64, "layers": 2, "width": 64, "heads": 4, "mlp_width": 96, "sequence": 32, "mtp": None}
    sizes |= {"kv_heads": 2 if grouped else None, "head_width": None}
    if model.mla:
        latent = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
        sizes["mla"] = model.mla.model_copy(update=latent | ({"q_lora_rank": 24} if model.mla.q_lora_rank else {}))
    if model.moe:
        experts = {"experts": 16, "top_k": min(4, model.moe.top_k), "width": 32}
        experts |= {"dense_layers": min(1, model.moe.dense_layers)}
        experts |= {"n_group": min(4, model.moe.n_group), "topk_group": min(2, model.moe.topk_group)}
        sizes["moe"] = model.moe.model_copy(update=experts)
    return Model.model_validate(model.model_dump() | sizes)


def small_blocks(recipe: Recipe) -> list[nn.Module]:
    if isinstance(recipe.model, CustomModel):
        custom = recipe.model.model_copy(update={"path": str(ROOT / "examples")})
        return list(build_seeded_module(custom, 0).get_submodule("layers").children())[:2]
    model = small(recipe.decoder)
    torch.manual_seed(0)
    blocks = [Block(model, layer) for layer in range(model.layers)]
    with torch.no_grad():
        for parameter in (each for block in blocks for each in block.parameters()):
            noise = torch.randn(parameter.shape)
            parameter.copy_(noise * parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 1 + 0.1 * noise)
    return [block.to(compute_dtype(recipe.precision, f"blocks.{number}")) for number, block in enumerate(blocks)]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_passes_keep_what_a_recipe_computes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: Path) -> None:
    blocks, managers = small_blocks(load_recipe(path)), []
    torch.compiler.reset()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # what is cached is not rewritten again

    def watched(passes: object) -> PassManager:
        managers.append(PassManager(EVERY_PASS))
        return managers[0]

    monkeypatch.setattr(blocks_module, "PassManager", watched)
    checks = apply_compile(blocks, passes=EVERY_PASS)
    for block in blocks:
        parameter = next(block.parameters())
        x = torch.randn(2, 32, parameter.shape[-1]).to(parameter.dtype).requires_grad_()
        block(x).float().square().mean().backward()
    assert checks.done
    assert [(check.runs_eagerly, check.not_checked) for check in checks.done] == len(checks.done) * [(False, "")]
    assert managers[0].refused == []
    # A product with a bias is another operator, which no pass matches in fp32.
    assert managers[0].rewrites or path.stem == "own-model"
