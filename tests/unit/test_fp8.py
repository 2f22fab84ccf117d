"""Block-scaled fp8: what is quantized to what, the three products, and runs that train with them.

The oracle here knows e4m3 by its definition (four bits of exponent, three of fraction) and multiplies in Python's own
numbers; it shares nothing with the code.
"""

from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise
from math import inf, isnan, nan

import pytest
import torch
from deviations import relative, whole_parameters
from made_loops import MOE, SHAPE, Run, one_rank, recipe, samples_of
from torch import Tensor, nn

from danlu.chips.scaled_matmul import block_scaled_mm, swizzle_scales
from danlu.framework.fp8.apply import apply_block_scaling, emulated_formats, linear_layers, unquantized
from danlu.framework.fp8.linear import BlockScaledProduct
from danlu.framework.fp8.quantize import BlockFormat, Quantized
from danlu.ops.operators.quantize import block_scales, to_e4m3
from danlu.parallel.fsdp import local_shard
from danlu.planner import PlanRequest
from danlu.planner.missing import missing_features
from danlu.planner.search import price_plan
from danlu.report.precision_text import slow_precision_note
from danlu.spec.load import load_cluster, load_model
from danlu.spec.model import Model
from danlu.spec.plan import Degrees, Plan
from danlu.spec.recipe import BatchConfig, DataConfig, LayerPrecision, MatmulFormat, PrecisionConfig, Recipe

E4M3 = sorted(
    {
        sign * Fraction(fraction + 8 * (exponent > 0), 8) * Fraction(2) ** (max(exponent, 1) - 7)
        for sign in (1, -1)
        for exponent in range(16)
        for fraction in range(8)
        if (exponent, fraction) != (15, 7)  # NaN
    }
)
"""Every number of e4m3, by its definition."""
FORMATS: list[MatmulFormat] = ["fp8", "mxfp8"]


def rounded(x: float) -> Fraction:
    """The nearest number of e4m3; of two, the one with the even fraction."""
    exact = Fraction(x)
    distance = min(abs(exact - each) for each in E4M3)
    near = [each for each in E4M3 if abs(exact - each) == distance]
    return near[0] if len(near) == 1 else next(each for each in near if _is_even(each))


def _is_even(value: Fraction) -> bool:
    magnitudes = sorted({abs(each) for each in E4M3})
    return magnitudes.index(abs(value)) % 2 == 0


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    with one_rank():
        yield


def test_e4m3_has_the_numbers_of_its_definition() -> None:
    bits = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert {Fraction(each) for each in bits.tolist() if not isnan(each)} == set(E4M3)
    assert max(E4M3) == 448


def test_a_cast_rounds_to_the_nearest_ties_to_even_and_saturates() -> None:
    magnitudes = sorted({abs(each) for each in E4M3})
    ties = [float((a + b) / 2) for a, b in pairwise(magnitudes)]
    given = [float(each) for each in E4M3] + ties + [-each for each in ties]
    given += [nudged for each in ties for nudged in (each * (1 + 2**-20), each * (1 - 2**-20))]
    given += [448.1, 464.0, 500.0, -1e30, 2.0**-10, 2.0**-10 * 1.001, 2.0**-11]
    found = to_e4m3(torch.tensor(given, dtype=torch.float32)).float().tolist()
    assert [Fraction(each) for each in found] == [rounded(max(-448.0, min(448.0, each))) for each in given]


def blocks_of(width: int, block: int) -> list[range]:
    return [range(start, min(start + block, width)) for start in range(0, width, block)]


def oracle_scale(largest: float, matmul: MatmulFormat) -> float:
    if matmul == "fp8":
        return float(torch.tensor(largest) / 448)
    exponent = -126
    while Fraction(2) ** exponent * 448 < Fraction(largest):
        exponent += 1
    return 2.0**exponent


@pytest.mark.parametrize("matmul", FORMATS)
@pytest.mark.parametrize("width", [32, 41])
def test_rows_are_quantized_block_by_block(matmul: MatmulFormat, width: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, width) * torch.logspace(-3, 3, 5)[:, None]
    x[1, :16] = 0
    x[2, 0], x[3, 16] = 7.0, 448 * 2.0**-4  # the largest of its block exactly a power of 2 of 448
    found = BlockFormat(matmul, 16).quantize_rows(x)
    for row in range(5):
        for number, columns in enumerate(blocks_of(width, 16)):
            values = [float(x[row, column]) for column in columns]
            scale = oracle_scale(max(map(abs, values)), matmul)
            assert float(found.scales_RC.float()[row, number]) == pytest.approx(max(scale, 2.0**-126), rel=1e-7)
            exact = float(found.scales_RC.float()[row, number])
            expected = [rounded(float(torch.tensor(value) / exact)) for value in values]
            assert [Fraction(float(each)) for each in found.values_RK.float()[row, list(columns)]] == expected


@pytest.mark.parametrize("matmul", FORMATS)
def test_scales_never_clip_and_use_the_range(matmul: MatmulFormat) -> None:
    largest = torch.cat([torch.logspace(-30, 30, 999), 448 * 2.0 ** torch.arange(-20, 20)])
    share = largest / block_scales(largest, powers=matmul == "mxfp8") / 448
    assert float(share.max()) <= 1 + 1e-6
    assert float(share.min()) > (0.999 if matmul == "fp8" else 0.5 - 1e-6)


def test_a_weight_and_its_transpose_have_the_same_values_in_fp8() -> None:
    torch.manual_seed(1)
    weight = torch.randn(40, 24)
    weight[0, 0] = 90.0
    form = BlockFormat("fp8", 16)
    here, there = form.quantize_weight(weight), form.quantize_weight(weight.t())
    assert torch.equal(here.values_RK.float(), there.values_RK.float().t())
    for rows in blocks_of(40, 16):
        for number, columns in enumerate(blocks_of(24, 16)):
            largest = float(weight[list(rows)][:, list(columns)].abs().max())
            assert here.scales_RC[list(rows), number].tolist() == [float(torch.tensor(largest) / 448)] * len(rows)


@pytest.mark.parametrize("matmul", FORMATS)
@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_what_is_not_finite_stays_so(matmul: MatmulFormat, bad: float) -> None:
    form = BlockFormat(matmul, 16)
    x, weight = torch.ones(2, 32), torch.ones(4, 32)
    x[0, 3] = bad
    x[0, 4] = 0
    rows = form.quantize_rows(x)
    y = multiply(form, rows, form.quantize_weight(weight))
    assert bool(y[0].isnan().all()) and y[1].tolist() == pytest.approx([32.0] * 4)
    tokens = form.quantize_tokens(x)
    assert bool(multiply(form, tokens, tokens)[3].isnan().any())


def multiply(form: BlockFormat, a: Quantized, b: Quantized) -> Tensor:
    product: Tensor = block_scaled_mm(
        a.values_RK, a.scales_RC, b.values_RK, b.scales_RC, form.block, torch.float32, False
    )
    return product


@pytest.mark.parametrize("matmul", FORMATS)
def test_products_are_summed_exactly_by_block_and_in_fp32_over_blocks(matmul: MatmulFormat) -> None:
    torch.manual_seed(2)
    form = BlockFormat(matmul, 16)
    a, b = form.quantize_rows(torch.randn(3, 40)), form.quantize_weight(torch.randn(5, 40))
    found = multiply(form, a, b)
    for m in range(3):
        for n in range(5):
            total = torch.zeros((), dtype=torch.float32)
            for number, columns in enumerate(blocks_of(40, 16)):
                exact = sum(
                    (Fraction(float(a.values_RK[m, k])) * Fraction(float(b.values_RK[n, k])) for k in columns),
                    Fraction(0),
                )
                scale = a.scales_RC[m, number].float() * b.scales_RC[n, number].float()
                total += torch.tensor(float(exact), dtype=torch.float32) * scale
            assert float(found[m, n]) == float(total)


@pytest.mark.parametrize("matmul", FORMATS)
@pytest.mark.parametrize("bias", [False, True])
def test_the_three_products_of_a_linear_layer(matmul: MatmulFormat, bias: bool) -> None:
    """Against the same quantized matrices multiplied in fp64."""
    torch.manual_seed(3)
    form = BlockFormat(matmul, 16)
    layer = nn.Linear(48, 20, bias=bias)
    x = torch.randn(2, 21, 48, requires_grad=True)
    y = BlockScaledProduct(form).forward_linear(layer, x)
    grad = torch.randn(2, 21, 20)
    y.backward(grad)
    weight = layer.weight.detach()

    def exact(quantized: Quantized) -> Tensor:
        return quantized.dequantize(16).double()

    forward = exact(form.quantize_rows(x.detach().flatten(0, 1))) @ exact(form.quantize_weight(weight)).t()
    if bias:
        forward += layer.bias.detach()
    torch.testing.assert_close(y.detach().flatten(0, 1).double(), forward, rtol=1e-5, atol=1e-5)
    of_input = exact(form.quantize_rows(grad.flatten(0, 1))) @ exact(form.quantize_weight(weight.t())).t()
    assert x.grad is not None and layer.weight.grad is not None
    torch.testing.assert_close(x.grad.flatten(0, 1).double(), of_input, rtol=1e-5, atol=1e-5)
    tokens = [(form.quantize_tokens(grad[i]), form.quantize_tokens(x.detach()[i])) for i in range(2)]
    of_weight = sum((exact(g) @ exact(a).t() for g, a in tokens), torch.zeros(20, 48, dtype=torch.float64))
    torch.testing.assert_close(layer.weight.grad.double(), of_weight, rtol=1e-5, atol=1e-5)
    if bias:
        assert layer.bias.grad is not None and torch.equal(layer.bias.grad, grad.sum((0, 1)))
    plain = layer(x).detach()
    apart = (y.detach() - plain).norm() / plain.norm()
    assert 0.005 < float(apart) < 0.06, "three bits of fraction: a few percent of noise, and not none"


def test_a_sequence_is_quantized_alone_so_that_ranks_and_microbatches_agree() -> None:
    torch.manual_seed(4)
    form, x = BlockFormat("fp8", 16), torch.randn(4, 20, 8)
    whole = form.quantize_tokens(x)
    halves = [form.quantize_tokens(x[:2]), form.quantize_tokens(x[2:])]
    for part in (0, 1):
        assert torch.equal(whole[part].float(), torch.cat([each[part].float() for each in halves], dim=1))


def test_one_copy_of_an_input_is_kept_in_one_byte_an_element() -> None:
    class Projections(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(64, 64, bias=False) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.q(x) + self.k(x) + self.v(x)

    block = Projections()
    dtypes = PrecisionConfig(matmul="fp8", block=32)
    apply_block_scaling(linear_layers("blocks.0", block), dtypes, torch.device("cpu"))
    weights = {each.untyped_storage().data_ptr() for each in block.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = torch.randn(2, 32, 64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = block(x * 1.0)
    assert sum(kept.values()) == 2 * 32 * 64 * (1 + 4 / 32)
    y.sum().backward()
    with unquantized([block]):
        plain = x @ block.q.weight.t() + x @ block.k.weight.t() + x @ block.v.weight.t()
        assert torch.equal(block(x), plain)


def test_an_input_changed_in_place_is_quantized_again() -> None:
    layer, product = nn.Linear(16, 16, bias=False), BlockScaledProduct(BlockFormat("fp8", 16))
    x = torch.ones(1, 16)
    first = product.forward_linear(layer, x)
    x.mul_(2)
    assert torch.equal(product.forward_linear(layer, x), 2 * first)


def test_scales_in_the_chips_order() -> None:
    rows, columns = 130, 6
    values = torch.arange(rows * columns, dtype=torch.int64).view(rows, columns) % 251
    found = swizzle_scales(values.to(torch.uint8).view(torch.float8_e8m0fnu)).view(torch.uint8)
    assert len(found) == 256 * 8
    for row in (0, 1, 31, 32, 127, 128, 129):
        for column in range(columns):
            tile = row // 128 * 2 + column // 4
            within = 16 * (row % 32) + 4 * (row % 128 // 32) + column % 4
            assert int(found[512 * tile + within]) == int(values[row, column])


def trained(precision: PrecisionConfig, moe: bool = False, plan: Plan | None = None) -> Run:
    made = recipe(Model(**SHAPE, moe=MOE if moe else None), precision=precision)
    run = Run(made, plan or Plan(), samples_of(made))
    run.train()
    return run


def losses_of(run: Run) -> list[float]:
    return [report.loss for report in run.reports]


@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize("matmul", FORMATS)
def test_a_run_learns_as_one_without_quantization(matmul: MatmulFormat, moe: bool) -> None:
    quantized = trained(PrecisionConfig(compute="bf16", matmul=matmul, block=16), moe)
    plain = trained(PrecisionConfig(compute="bf16"), moe)
    assert losses_of(quantized) != losses_of(plain)
    assert relative(losses_of(quantized), losses_of(plain)) < 2e-2


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("moe", [False, True])
def test_recompute_changes_no_bit(recompute: str, moe: bool) -> None:
    precision = PrecisionConfig(matmul="fp8", block=16)
    runs = [trained(precision, moe, Plan.model_validate({"recompute": each})) for each in ("none", recompute)]
    assert losses_of(runs[0]) == losses_of(runs[1])
    for name, value in whole_parameters(runs[0].state).items():
        assert torch.equal(value, whole_parameters(runs[1].state)[name]), name


def test_groups_of_layers_may_stay_unquantized() -> None:
    every = LayerPrecision(match="blocks.*", matmul="none")
    assert losses_of(trained(PrecisionConfig(matmul="fp8", block=16, layers=(every,)))) == losses_of(
        trained(PrecisionConfig(layers=(every,)))
    )
    some = LayerPrecision(match="blocks.0", matmul="none")
    assert losses_of(trained(PrecisionConfig(matmul="fp8", block=16, layers=(some,)))) != losses_of(
        trained(PrecisionConfig(matmul="fp8", block=16))
    )


def test_routers_and_the_head_are_not_quantized() -> None:
    run = trained(PrecisionConfig(matmul="fp8", block=16), moe=True)
    quantized = {
        name
        for name, module in run.state.stage_modules[0].named_modules()
        if isinstance(module, nn.Linear) and "forward" in vars(module)
    }
    linear = {name for name, each in run.state.stage_modules[0].named_modules() if isinstance(each, nn.Linear)}
    kept = linear - quantized
    assert kept == {name for name in linear if name.endswith("router.gate")} | {"head.score"}
    assert quantized


def test_experts_are_quantized() -> None:
    """With everything but the experts unquantized, the losses still change."""
    experts = LayerPrecision(match="blocks.*.mlp.experts", matmul="fp8")
    found = losses_of(trained(PrecisionConfig(block=16, layers=(experts,)), moe=True))
    assert found != losses_of(
        trained(PrecisionConfig(layers=(experts.model_copy(update={"matmul": "none"}),)), moe=True)
    )


def test_a_resumed_run_equals_one_that_was_not_stopped() -> None:
    """Nothing of a quantized run is outside of its state: after three steps another process's state continues it."""
    made = recipe(Model(**SHAPE), precision=PrecisionConfig(compute="bf16", matmul="mxfp8", block=16))
    whole, first, second = (Run(made, Plan(), samples_of(made)) for _ in range(3))
    whole.train()
    first.train(stop_after=3)
    second.state.restore_scalars(first.state.scalars())
    with torch.no_grad():
        for name, tensor in second.state.tensors().items():
            tensor.copy_(first.state.tensors()[name])
    second.train()
    assert losses_of(first) + losses_of(second) == losses_of(whole)
    for name, value in whole_parameters(whole.state).items():
        assert torch.equal(value, whole_parameters(second.state)[name]), name


def test_a_plan_prices_products_at_the_peak_of_fp8() -> None:
    model, cluster = load_model("llama3-8b"), load_cluster("h100-pod")
    base = Recipe(
        name="priced",
        steps=1,
        model=model,
        data=DataConfig(shards="none"),
        batch=BatchConfig(sequences=64, length=8192),
        precision=PrecisionConfig(compute="bf16"),
    )
    plan = Plan(degrees=Degrees(shard=16))
    half, eight = (
        price_plan(PlanRequest(recipe=each, cluster=cluster, chips=16), plan)
        for each in (base, base.model_copy(update={"precision": PrecisionConfig(compute="bf16", matmul="fp8")}))
    )
    assert eight.request.peak == cluster.chip.peak["fp8"] > half.request.peak == cluster.chip.peak["bf16"]
    assert 0.5 < eight.seconds / half.seconds < 0.95
    assert eight.prediction.memory.activations < half.prediction.memory.activations
    assert eight.request.recipe.precision.label == "fp8 (bf16 elsewhere)"
    assert [each.name for each in missing_features(half) if "fp8" in each.name] == ["fp8 matmuls"]
    assert not [each.name for each in missing_features(eight) if "fp8" in each.name]


def test_a_chip_without_fp8_is_warned_of() -> None:
    cluster = load_cluster("dgx-a100")
    quantized = recipe(load_model("llama3-8b"), precision=PrecisionConfig(compute="bf16", matmul="mxfp8"))
    note = slow_precision_note(quantized, Plan(), cluster)
    assert "mxfp8 (bf16 elsewhere): the chip has no fp8 peak" in note and "emulated" in note
    assert emulated_formats(quantized.precision, torch.device("cpu")) == ["mxfp8"]
    assert not emulated_formats(PrecisionConfig(compute="bf16"), torch.device("cpu"))


def test_a_step_that_is_not_finite_is_skipped() -> None:
    made = recipe(Model(**SHAPE), precision=PrecisionConfig(matmul="fp8", block=16), steps=1)
    run = Run(made, Plan(), samples_of(made))
    with torch.no_grad():
        weight = run.state.stage_modules[0].get_parameter("blocks.0.mlp.up.weight")
        local_shard(weight)[0][0, 0] = nan
    before = {name: value.clone() for name, value in whole_parameters(run.state).items()}
    run.train()
    assert not run.reports[0].committed
    for name, value in whole_parameters(run.state).items():
        assert torch.equal(value.nan_to_num(), before[name].nan_to_num()), name
