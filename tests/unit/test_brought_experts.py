"""Experts of transformers' mixtures: computed as the module itself does, divided over ranks, refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from danlu.dryrun.api import dryrun
from danlu.dryrun.operator_tuning import operator_calls
from danlu.framework.custom.adapter import CustomModelAdapter
from danlu.framework.custom.construct import CustomModelError
from danlu.framework.custom.experts import EXPERT_FAMILIES, compute_at_once, known_experts
from danlu.framework.custom.kernels import apply_kernels
from danlu.framework.model_size import model_size_and_flops
from danlu.spec.check import load_run_spec
from danlu.spec.custom_model import CustomModel
from danlu.spec.plan import Degrees, Plan
from danlu.spec.problem import SpecError
from danlu.spec.recipe import BatchConfig, DataConfig, Recipe
from danlu.spec.recompute import RecomputeLayers

EXPERTS, TOP_K = 4, 2
SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": TOP_K,
    "max_position_embeddings": 32,
    "pad_token_id": None,
    "eos_token_id": None,
    "bos_token_id": None,
}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "MixtralExperts": ("Mixtral", {"num_local_experts": EXPERTS}),
    "Qwen2MoeExperts": ("Qwen2Moe", {"num_experts": EXPERTS, "moe_intermediate_size": 8}),
    "Qwen3MoeExperts": ("Qwen3Moe", {"num_experts": EXPERTS, "moe_intermediate_size": 8, "head_dim": 8}),
    "OlmoeExperts": ("Olmoe", {"num_experts": EXPERTS}),
    "DeepseekV3Experts": (
        "DeepseekV3",
        {
            "n_routed_experts": EXPERTS,
            "moe_intermediate_size": 8,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 8,
        },
    ),
    "GptOssExperts": ("GptOss", {"num_local_experts": EXPERTS, "head_dim": 8, "sliding_window": 8}),
}


def mixture(name: str, top_k: int = TOP_K) -> nn.Module:
    """A model with experts of a class, as transformers has it."""
    import transformers

    model, more = MIXTURES[name]
    more = more | {"num_experts_per_tok": top_k}
    return getattr(transformers, f"{model}ForCausalLM")(getattr(transformers, f"{model}Config")(**SIZES | more))


class OtherExperts(nn.Module):
    """Stacked experts of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.Parameter(torch.randn(EXPERTS, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrices.mean(0)


class OtherMixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(32, 8)
        self.layers = nn.ModuleList(OtherExperts() for _ in range(2))
        self.score = nn.Linear(8, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.score(x)


def recipe(factory: str, **arguments: Any) -> Recipe:
    model = CustomModel(
        factory=f"test_brought_experts:{factory}", path=str(Path(__file__).parent), vocabulary=32, arguments=arguments
    )
    return Recipe(
        name="mixture",
        steps=1,
        model=model,
        data=DataConfig(shards="none"),
        batch=BatchConfig(sequences=8, length=16),
    )


def plan(ep: int, **settings: Any) -> Plan:
    return Plan(degrees=Degrees(shard=ep, ep=ep), **settings)


@pytest.mark.parametrize("name", EXPERT_FAMILIES)
def test_copies_sorted_by_expert_give_what_the_module_computes(name: str) -> None:
    torch.manual_seed(1)
    module, tokens = mixture(name), torch.randint(32, (2, 16))
    with torch.no_grad():  # some are initialized with zeros, as a bias
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    module.zero_grad()
    expected = module(tokens).logits
    expected.square().sum().backward()
    gradients = {
        key: parameter.grad.clone() for key, parameter in module.named_parameters() if parameter.grad is not None
    }
    module.zero_grad()
    found = known_experts(module)
    assert len(found) == (1 if name == "DeepseekV3Experts" else 2)
    for experts in found.values():
        compute_at_once(experts)
    logits = module(tokens).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    logits.square().sum().backward()
    for key, parameter in module.named_parameters():
        if key in gradients:
            scale = gradients[key].abs().max().item()
            torch.testing.assert_close(parameter.grad, gradients[key], rtol=1e-4, atol=1e-5 * max(scale, 1))
    assert any("experts" in key for key in gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", EXPERT_FAMILIES)
def test_kernels_multiply_experts_at_once(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    module, tokens = mixture(name), torch.randint(32, (2, 16))
    expected = module(tokens).logits
    found = apply_kernels(module, dtype, "mixture")
    assert {each for each, operator in found.items() if operator == "grouped_mm"} == known_experts(module).keys()
    torch.testing.assert_close(module(tokens).logits, expected, rtol=1e-4, atol=1e-5)


def test_experts_that_compute_something_else_keep_their_forward() -> None:
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    class Doubled(MixtralExperts):
        def forward(self, *inputs: Tensor) -> Tensor:
            doubled: Tensor = 2 * super().forward(*inputs)
            return doubled

    module = mixture("MixtralExperts")
    experts = module.get_submodule("model.layers.1.mlp.experts")
    experts.__class__ = Doubled
    with pytest.warns(RuntimeWarning, match=r"Doubled \(`model\.layers\.1\.mlp\.experts`\) looks like .* or experts"):
        found = apply_kernels(module, torch.float32, "mixture")
    assert "forward" not in vars(experts)
    assert found["model.layers.0.mlp.experts"] == "grouped_mm"


@pytest.mark.parametrize(
    ("factory", "arguments", "its_plan", "message"),
    [
        ("OtherMixture", {}, plan(2), r"`layers\.0` \(test_brought_experts\.OtherExperts\).*MixtralExperts"),
        ("mixture", {"name": "MixtralExperts"}, plan(8), r"must divide the 4 experts of model\.layers\.0.*ep = 4"),
        ("mixture", {"name": "MixtralExperts"}, plan(2, compile=True), r"compile.*is set and `degrees\.ep` is 2"),
        (
            "mixture",
            {"name": "DeepseekV3Experts"},
            plan(2, recompute=RecomputeLayers(selective="1")),
            r"recompute.*selective for model\.layers\.1",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused(
    factory: str, arguments: dict[str, str], its_plan: Plan, message: str
) -> None:
    with pytest.raises(CustomModelError, match=message):
        CustomModelAdapter(recipe(factory, **arguments), its_plan)


def test_a_model_without_experts_has_none_to_divide() -> None:
    with pytest.raises(CustomModelError, match="the module has no experts"):
        CustomModelAdapter(recipe("dense"), plan(2))


def dense() -> nn.Module:
    return nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 32))


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ("shard = 2\ntp = 2\nep = 2", "the ranks of `tp` have the same tokens"),
        ("shard = 2\nep = 4", "must divide `shard` (2)"),
    ],
)
def test_degrees_that_do_not_fit_are_refused_by_rule(tmp_path: Path, degrees: str, message: str) -> None:
    (tmp_path / "plan.toml").write_text(f"[degrees]\n{degrees}\n")
    (tmp_path / "recipe.toml").write_text(
        'name = "r"\nsteps = 1\n[model]\nfactory = "a:b"\nvocabulary = 32\n[data]\nshards = "s"\n'
        "[batch]\nsequences = 8\nlength = 16\n"
    )
    with pytest.raises(SpecError) as error:
        load_run_spec(tmp_path / "recipe.toml", tmp_path / "plan.toml")
    assert message in str(error.value)


def test_operators_are_counted_at_an_even_load() -> None:
    one, two = (model_size_and_flops(recipe("mixture", name="MixtralExperts", top_k=k)) for k in (1, 2))
    width, hidden, layers = 16, 24, 2
    assert two[1] - one[1] == 3 * 2 * layers * 3 * width * hidden, "of one more expert for every token"
    assert two[0] == one[0]


def test_a_dry_run_multiplies_experts_at_once_and_a_plan_may_choose_how() -> None:
    made = recipe("mixture", name="MixtralExperts")
    made = made.model_copy(update={"model": made.model.model_copy(update={"use_kernels": True})})
    run = dryrun(made, plan=Plan(degrees=Degrees(shard=4)), ranks=[0])
    products = [call for call in operator_calls(run) if call.operator == "grouped_mm"]
    # two products in each of two layers; stored as matrices of linear layers, they are gradients of copies elsewhere
    assert sum(call.calls for call in products) == 3 * 2 * 2
    assert {call.inputs[1] for call in products if call.backward} >= {"fp32[4, 48, 16]", "fp32[4, 16, 24]"}


def test_a_dry_run_sends_token_copies_and_no_expert() -> None:
    made = recipe("mixture", name="MixtralExperts")
    calls = {}
    for ep in (1, 4):
        (trace,) = dryrun(made, plan=Plan(degrees=Degrees(shard=4, ep=ep)), ranks=[0]).traces
        calls[ep] = [(each.operation, each.payload, each.count) for each in trace.collectives]
    # 2 sequences of 16 tokens in 2 copies of 16 numbers; to the experts and back, forward and backward, in 2 layers
    assert ("all_to_all", 2 * 16 * TOP_K * 16 * 4, 2 * 2 * 2) in calls[4]
    assert not any(operation == "all_to_all" for operation, _, _ in calls[1])
    experts = EXPERTS * 3 * 16 * 24 * 4 // 4
    gathered = {ep: max(call[1] for call in calls[ep] if call[0] == "all_gather") for ep in calls}
    assert gathered[1] > experts > gathered[4], "experts stay where they are"
