"""Modules that users bring: what is found in them, and what is said when an axis needs more than they offer."""

from pathlib import Path
from typing import Any

import made_modules
import pytest
import torch
from safetensors.torch import save_file

from danlu.framework.custom.adapter import CustomModelAdapter, materialize
from danlu.framework.custom.construct import CustomModelError, build_meta_module, build_module
from danlu.framework.custom.forward_trace import trace_forward
from danlu.framework.custom.module_structure import find_layers
from danlu.framework.model_size import model_size_and_flops
from danlu.framework.weights import load_weights, open_weights
from danlu.memory.recompute import RecomputeRegion, apply_recompute
from danlu.spec.check import load_run_spec
from danlu.spec.custom_model import CustomModel
from danlu.spec.plan import Degrees, PipelineConfig, Plan
from danlu.spec.problem import SpecError
from danlu.spec.recipe import BatchConfig, DataConfig, LayerPrecision, PrecisionConfig, Recipe
from danlu.spec.recompute import RecomputeLayers

HERE = str(Path(__file__).parent)


def own(name: str, **settings: Any) -> CustomModel:
    return CustomModel(factory=f"made_modules:{name}", path=HERE, vocabulary=made_modules.VOCABULARY, **settings)


def recipe(model: CustomModel, **settings: Any) -> Recipe:
    return Recipe(
        name="own",
        steps=1,
        model=model,
        data=DataConfig(shards="none"),
        batch=BatchConfig(sequences=4, length=6),
        **settings,
    )


def brought(name: str, plan: Plan | None = None, **settings: Any) -> CustomModelAdapter:
    return CustomModelAdapter(recipe(own(name, **settings)), plan or Plan())


PIPELINE = Plan(degrees=Degrees(pp=2), microbatches=2)
TENSOR = Plan(degrees=Degrees(tp=2))

WRONG: dict[str, tuple[str, Plan, dict[str, Any], str]] = {
    "no such module": ("made_modulez", Plan(), {"factory": "made_modulez:Chain"}, r"model\.factory.*made_modulez"),
    "no such function": ("Chian", Plan(), {}, r"model\.factory.*Chian.*not found"),
    "not a module": ("not_a_module", Plan(), {}, r"returned str, but must return an nn\.Module"),
    "not callable": ("VOCABULARY", Plan(), {}, r"is int, but must be callable"),
    "other scores": ("Pair", Plan(), {}, r"returns dict, but must return a tensor of logits"),
    "other vocabulary": ("Chain", Plan(), {"vocabulary": 17}, r"model\.vocabulary.*\[4, 6, 17\].*\[4, 6, 16\]"),
    "no such list": ("Chain", Plan(), {"blocks": "layer"}, r"model\.blocks.*did you mean `layers`"),
    "recompute of a layer it lacks": (
        "Chain",
        Plan(recompute=RecomputeLayers(full="0, 9")),
        {},
        r"recompute\.full.*names layer 9, but the model has layers 0 to \d",
    ),
    "recompute without layers": ("NoLayers", Plan(recompute="full"), {}, r"recompute.*nn\.ModuleList"),
    "compile without layers": ("NoLayers", Plan(compile=True), {}, r"compile.*nn\.ModuleList"),
    "pipeline without layers": ("NoLayers", PIPELINE, {}, r"degrees\.pp.*nn\.ModuleList"),
    "pipeline of few layers": ("Chain", Plan(degrees=Degrees(pp=8), microbatches=8), {}, r"8 stages.*4 layers"),
    "pipeline of other layers": (
        "Chain",
        Plan(degrees=Degrees(pp=2), microbatches=2, pipeline=PipelineConfig(layers=(1, 2))),
        {},
        r"pipeline\.layers.*adds up to 3 layers, but `layers` has 4",
    ),
    "pipeline around layers": ("SkipsAround", PIPELINE, {}, r"not sequential: layer layers\.1 was not given"),
    "pipeline past a layer": ("SkipsLayer", PIPELINE, {}, r"not sequential: 3 of its 4 layers were called"),
    "pipeline and a loose parameter": ("LooseParameter", PIPELINE, {}, r"parameter `shift`.*module of its own"),
    "pipeline of tied ends": ("Tied", PIPELINE, {}, r"`token\.weight` and `score\.weight` are one parameter"),
    "no map": ("Chain", TENSOR, {}, r"degrees\.tp.*nothing says.*\[model\.tensor\]"),
    "pattern without modules": (
        "Chain",
        TENSOR,
        {"tensor": {"layers.*.upp": "column"}},
        r"did you mean `layers\.0\.up`",
    ),
    "odd outputs": (
        "Chain",
        Plan(degrees=Degrees(tp=3)),
        {"tensor": {"layers.*.up": "column"}},
        r"tp.*3, but must divide the 16 outputs",
    ),
    "other matrix": (
        "OtherMatrix",
        TENSOR,
        {"tensor": {"score": "column"}},
        r"Bilinear, not nn\.Embedding or nn\.Linear",
    ),
    "row of a table": ("Chain", TENSOR, {"tensor": {"token": "row"}}, r"Embedding, not nn\.Linear"),
    "a tie split in one place": ("Tied", TENSOR, {"tensor": {"token": "column"}}, r"share a parameter.*alike"),
    "pipeline of what cannot be seen": ("Uncountable", PIPELINE, {}, r"degrees\.pp.*is unknown: DataDependent"),
    "a plan with other styles": ("mixtral", TENSOR, {}, r"tp_plan.*MixtralForCausalLM.*packed_colwise"),
}


@pytest.mark.filterwarnings("ignore:.*does not run on FakeTensors")
@pytest.mark.parametrize("case", WRONG)
def test_what_is_missing_is_said(case: str) -> None:
    name, plan, settings, message = WRONG[case]
    model = own(name).model_copy(update=settings)
    with pytest.raises(CustomModelError, match=message) as raised:
        CustomModelAdapter(recipe(model), plan)
    assert raised.value.suggestion


def test_a_module_that_looks_at_values_is_trained_without_a_rehearsal() -> None:
    with pytest.warns(RuntimeWarning, match="does not run on FakeTensors"):
        model = brought("Uncountable")
    part = model.stage_module(0)
    materialize(part, torch.device("cpu"))
    assert part(torch.arange(6)[None]).shape == (1, 6, made_modules.VOCABULARY)
    with pytest.warns(RuntimeWarning, match="6 FLOPs per parameter"):
        size, work = model_size_and_flops(recipe(own("Uncountable")))
    assert work == 6 * size


def test_a_pattern_of_precision_that_matches_nothing_is_said() -> None:
    layers = (LayerPrecision(match="blocks.0", compute="bf16"),)
    with pytest.raises(CustomModelError, match=r"matches no module.*layers\.0"):
        CustomModelAdapter(recipe(own("Chain"), precision=PrecisionConfig(layers=layers)), Plan())


def test_layers_and_what_is_around_them_are_found() -> None:
    anatomy = find_layers(build_meta_module(own("Chain")))
    assert (anatomy.layer_list, len(anatomy.blocks)) == ("layers", 4)
    assert anatomy.outer_modules == ("token", "score")
    seen = trace_forward(own("Chain"), anatomy, sequences=2, length=3)
    assert list(seen.called_before) == ["token"]
    assert seen.called_after == ["score"]
    assert [tuple(stream.shape) for stream in seen.hidden_states] == [(2, 3, 8)] * 5


def test_parameters_take_no_memory_and_ties_stay() -> None:
    empty = build_meta_module(own("Tied"))
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert empty.get_parameter("score.weight") is empty.get_parameter("token.weight")
    materialize(empty, torch.device("cpu"))
    assert empty.get_parameter("score.weight") is empty.get_parameter("token.weight")
    assert not any(parameter.is_meta for parameter in empty.parameters())


def test_stages_of_a_pipeline_make_up_the_whole() -> None:
    """Every stage by itself, one after the other, is the module."""
    made, plan = build_module(own("Chain")), Plan(degrees=Degrees(pp=4), microbatches=4)
    model = brought("Chain", plan)
    parts = [model.stage_module(stage) for stage in range(4)]
    names = [name for part in parts for name, _ in part.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in made.named_parameters()), "every parameter on one stage"
    tokens = torch.arange(6)[None]
    stream = tokens
    for part in parts:
        materialize(part, torch.device("cpu"))
        part.load_state_dict({name: made.state_dict()[name] for name in part.state_dict()})
        stream = part(stream)
    assert torch.equal(stream, made(tokens))


def test_recompute_draws_the_same_dropout_again() -> None:
    plain, again = (
        build_module(own("Chain", arguments={"dropout": 0.5})),
        build_module(own("Chain", arguments={"dropout": 0.5})),
    )
    again.load_state_dict(plain.state_dict())
    apply_recompute(RecomputeRegion(layer, "full", uses_rng=True) for layer in again.get_submodule("layers").children())
    tokens = torch.arange(12).view(2, 6)
    for module in (plain, again):
        torch.manual_seed(3)
        module(tokens).square().sum().backward()
    for one, other in zip(plain.parameters(), again.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_size_and_work_are_counted_from_the_module() -> None:
    size, work = model_size_and_flops(recipe(own("Chain")))
    made = build_module(own("Chain"))
    assert size == sum(parameter.numel() for parameter in made.parameters())
    matrices = 4 * (2 * 8 * 16) + 8 * made_modules.VOCABULARY
    assert work == 6 * matrices


def test_weights_are_read_under_the_names_of_the_module(tmp_path: Path) -> None:
    made, model = build_module(own("Chain")), brought("Chain")
    save_file(made.state_dict(), tmp_path / "model.safetensors")
    part = model.stage_module(0)
    materialize(part, torch.device("cpu"))
    load_weights([part], own("Chain"), tmp_path)
    assert all(torch.equal(value, made.state_dict()[name]) for name, value in part.state_dict().items())
    with pytest.raises(SpecError, match=r"layers\.4\.up\.weight: is missing"):
        open_weights(tmp_path, own("Chain", arguments={"layers": 5}))


def test_a_misspelt_setting_of_an_own_model_is_found(tmp_path: Path) -> None:
    from danlu.spec.load import load_recipe

    file = tmp_path / "recipe.toml"
    file.write_text(
        'name = "x"\nsteps = 1\n[model]\nfactry = "a:b"\nvocabulary = 4\narguments = {}\n'
        '[data]\nshards = "x"\n[batch]\nsequences = 1\nlength = 1\n'
    )
    with pytest.raises(SpecError, match=r"recipe.toml:4: model.factry: is not a setting\n.*did you mean `factory`"):
        load_recipe(file)


def test_inputs_that_are_not_gathered_cannot_be_gathered_again() -> None:
    """The hidden states of a custom model are replicated over `tp`."""
    model = own("Chain", tensor={"layers.*.up": "column", "layers.*.down": "row"})
    with pytest.raises(SpecError, match=r"regather_inputs: is true, but the hidden states of a custom model"):
        load_run_spec(recipe(model), TENSOR.model_copy(update={"regather_inputs": True}))
    load_run_spec(recipe(model), TENSOR)
