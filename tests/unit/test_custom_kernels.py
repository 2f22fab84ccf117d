"""Norms and gated MLPs of custom models: which are computed by Danlu's operators, and which keep their own forward."""

from pathlib import Path
from typing import Any

import made_hf
import pytest
import torch
import torch.nn.functional as F
from made_hf import transformers
from test_own_model import brought
from torch import Tensor, nn

from danlu.framework.custom import attention
from danlu.framework.custom.construct import CustomModelError
from danlu.framework.custom.kernels import apply_kernels
from danlu.spec.check import load_run_spec
from danlu.spec.plan import Plan
from danlu.spec.problem import SpecError

DTYPES = [torch.float32, torch.bfloat16]


class RMSNorm(nn.Module):
    def __init__(self, width: int = 20, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).type_as(x) * self.weight


class CenteredRMSNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(-1, keepdim=True))


class OuterEpsRMSNorm(RMSNorm):
    """Its epsilon is added to the root, which only small rows show."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide / (wide.square().mean(-1, keepdim=True).sqrt() + self.eps)).type_as(x) * self.weight


class LlamaMlp(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(8, 12, bias=bias), nn.Linear(8, 12, bias=bias)
        self.w2 = nn.Linear(12, 8, bias=bias)

    def activate(self, x: Tensor) -> Tensor:
        return F.silu(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.activate(self.w1(x)) * self.w3(x))


class ExactGelu(LlamaMlp):
    """Within a rounding of bf16 of the operator's, which is tanh's."""

    def activate(self, x: Tensor) -> Tensor:
        return F.gelu(x)


class WithDropout(LlamaMlp):
    def activate(self, x: Tensor) -> Tensor:
        return F.dropout(F.silu(x), 0.5, self.training)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kind", "settings"), [(RMSNorm, (20,)), (RMSNorm, (8, 1e-2)), (nn.RMSNorm, (16,)), (nn.RMSNorm, (16, 1e-5))]
)
def test_norms_are_found(kind: type[nn.Module], settings: tuple[Any, ...], dtype: torch.dtype) -> None:
    made = kind(*settings).to(dtype)
    x = torch.randn(3, 2, settings[0], dtype=dtype)
    expected = made(x)
    assert apply_kernels(nn.Sequential(made), dtype, "mine") == {"0": "rms_norm"}
    torch.testing.assert_close(made(x), expected)
    with torch.profiler.profile(acc_events=True) as profiled:  # else 2.12 warns
        made(x)
    assert any("danlu::rms_norm" in event.name for event in profiled.events())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_gated_mlps_are_found(bias: bool, dtype: torch.dtype) -> None:
    made = LlamaMlp(bias).to(dtype)
    x = torch.randn(3, 8, dtype=dtype)
    expected = made(x)
    assert apply_kernels(nn.Sequential(made), dtype, "mine") == {"0": "gated_product"}
    torch.testing.assert_close(made(x), expected, rtol=0.02, atol=1e-5 if dtype == torch.float32 else 0.01)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [CenteredRMSNorm, OuterEpsRMSNorm, ExactGelu, WithDropout])
def test_what_computes_something_else_keeps_its_forward(kind: type[nn.Module], dtype: torch.dtype) -> None:
    known, made = RMSNorm(), kind()
    with pytest.warns(RuntimeWarning, match=f"{type(made).__name__} .*computes something else"):
        assert apply_kernels(nn.Sequential(known, made), dtype, "mine") == {"0": "rms_norm"}
    assert "forward" not in vars(made)


def test_a_key_without_effect_is_an_error() -> None:
    with pytest.raises(CustomModelError, match=r"model\.use_kernels.* is true, but .*Chain.* has no RMS norm"):
        brought("Chain", use_kernels=True)


@pytest.mark.parametrize(
    ("family", "norms"), [("llama", 5), ("qwen3", 9), ("gemma", 5), ("gemma2", 9), ("mistral", 5), ("phi3", 5)]
)
def test_families_of_transformers_compute_the_same_logits(family: str, norms: int) -> None:
    kinds: dict[str, tuple[Any, Any]] = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "gemma": (transformers.GemmaConfig, transformers.GemmaForCausalLM),
        "gemma2": (transformers.Gemma2Config, transformers.Gemma2ForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
        "phi3": (transformers.Phi3Config, transformers.Phi3ForCausalLM),
    }
    config, model = kinds[family]
    torch.manual_seed(0)
    module = model(config(**made_hf.SHAPE, head_dim=8, pad_token_id=0))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * torch.randn_like(parameter)  # ones and zeros would hide an offset
    tokens = torch.arange(32).view(2, 16) % 96
    expected = module(tokens).logits
    found = list(apply_kernels(module, torch.float32, family).values())
    assert (found.count("rms_norm"), found.count("gated_product")) == (norms, 2)
    torch.testing.assert_close(module(tokens).logits, expected, rtol=1e-4, atol=1e-4)


PACKED = torch.tensor([[*range(9), *range(4), *range(3)], [*range(16)]])


def attends(family: str, **settings: Any) -> nn.Module:
    """A model with a window where its family has one, of 5 tokens."""
    torch.manual_seed(0)
    kind = getattr(transformers, f"{family}ForCausalLM")
    shape = made_hf.SHAPE | {"head_dim": 8, "pad_token_id": 0, "use_cache": False} | settings
    return kind(kind.config_class(**shape))


@pytest.mark.parametrize(
    ("family", "windows", "settings"),
    [
        ("Llama", 0, {}),
        ("Mistral", 2, {"sliding_window": 5}),
        ("Qwen3", 1, {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
        ("Gemma3", 2, {"sliding_window": 5}),
    ],
    ids=["llama", "mistral", "qwen3", "gemma3"],
)
@pytest.mark.parametrize("positions", [None, PACKED], ids=["whole", "documents"])
def test_transformers_attend_to_documents_and_windows_by_the_operator(
    monkeypatch: pytest.MonkeyPatch, family: str, windows: int, settings: dict[str, Any], positions: Tensor | None
) -> None:
    module, tokens = attends(family, **settings), torch.arange(32).view(2, 16) % 96
    given = {} if positions is None else {"position_ids": positions}
    expected = module(tokens, **given).logits
    expected.square().mean().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in module.named_parameters()}
    module.zero_grad()
    monkeypatch.setattr(attention, "_ROWS_AT_ONCE", 96)  # masks are looked at three rows at a time
    calls: list[int] = []
    attend = attention.masked_attention
    monkeypatch.setattr(attention, "masked_attention", lambda *inputs: calls.append(1) or attend(*inputs))
    assert attention.apply_attention(module)
    found = module(tokens, **given).logits
    found.square().mean().backward()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=1e-6)
    assert len(calls) == (windows if positions is None else len(module.model.layers))


def test_a_mask_that_is_no_run_of_keys_stays_a_mask() -> None:
    """Of padding, or of an image whose tokens see each other: PyTorch's attention, and the same logits."""
    module, tokens = attends("Llama"), torch.arange(32).view(2, 16) % 96
    padding = torch.ones(2, 16, dtype=torch.int64)
    padding[0, :3] = 0
    expected = module(tokens, attention_mask=padding).logits
    assert attention.apply_attention(module)
    torch.testing.assert_close(module(tokens, attention_mask=padding).logits, expected)

    def sees_the_first_token_too(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & ((key > query - 3) | (key == 0))

    given = {"batch_size": 1, "q_length": 8, "kv_length": 8, "mask_function": sees_the_first_token_too}
    mask = attention._first_keys_or_mask(**given, allow_is_causal_skip=False)
    assert mask is not None
    assert mask.shape == (1, 1, 8, 8)


def test_a_configuration_that_others_share_is_copied() -> None:
    config = attends("Llama").config
    first, second = transformers.LlamaForCausalLM(config), transformers.LlamaForCausalLM(config)
    assert attention.apply_attention(first)
    assert first.model.layers[1].self_attn.config is first.config
    assert (first.config._attn_implementation, second.config._attn_implementation) == ("danlu", "sdpa")


def test_attention_that_is_not_pytorch_s_is_left_alone() -> None:
    assert not attention.apply_attention(attends("Gemma2", attn_implementation="eager"))
    assert not attention.apply_attention(nn.Linear(2, 2))


def test_a_plan_may_choose_implementations_of_what_is_replaced(tmp_path: Path) -> None:
    recipe = Path(__file__).resolve().parents[2] / "recipes" / "own-model.toml"
    text = (
        recipe.read_text()
        .replace("[model]", "[model]\nuse_kernels = true")
        .replace('"../', f'"{recipe.parent.parent}/')
    )
    (tmp_path / "own.toml").write_text(text)
    (tmp_path / "plan.toml").write_text('operators = {rms_norm = "torch", gated_product = "torch"}')
    load_run_spec(tmp_path / "own.toml", tmp_path / "plan.toml", None, default=Plan())
    (tmp_path / "plan.toml").write_text('operators = {rotate = "torch"}')
    with pytest.raises(SpecError, match=r"operators\.rotate"):
        load_run_spec(tmp_path / "own.toml", tmp_path / "plan.toml", None, default=Plan())
    (tmp_path / "own.toml").write_text(text.replace("use_kernels = true", ""))
    (tmp_path / "plan.toml").write_text('operators = {rms_norm = "torch"}')
    with pytest.raises(SpecError, match=r"use_kernels = true"):
        load_run_spec(tmp_path / "own.toml", tmp_path / "plan.toml", None, default=Plan())
