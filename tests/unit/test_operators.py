"""Operators against their references in fp64: results and gradients, over drawn shapes, dtypes and values."""

import ctypes
import math
import platform
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from danlu import native
from danlu.framework.decoder.attention import Documents
from danlu.framework.decoder.decoder import Decoder
from danlu.framework.decoder.moe import MoeLayer
from danlu.memory.recompute import RecomputeRegion, apply_recompute
from danlu.ops.operators import cpu, experts, gated, masked_attention, norm, quantize, rotary
from danlu.ops.operators import cross_entropy as loss
from danlu.ops.operators.operator import Implementation, Operator
from danlu.parallel.batch import IGNORE_INDEX
from danlu.parallel.loss import cross_entropy_sum
from danlu.spec.model import Model, Moe
from danlu.torch_compat import grouped_mm

needs_grouped_mm = pytest.mark.skipif(grouped_mm is None, reason="torch 2.9 has no grouped product")
DRAWN = settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
widths = st.integers(1, 70) | st.sampled_from([255, 512, 513, 1024, 1500])
seeds = st.integers(0, 2**31)
NEXT_TO_NOTHING = 1e-6
"""What smaller values count as: in the tail of an activation e^-x has a relative error that grows with x."""


@pytest.fixture(params=["native", "torch"], autouse=True, scope="module")
def implementation(request: pytest.FixtureRequest) -> object:
    """The compiled kernels, and what runs in their place where there are none."""
    if request.param == "native":
        assert cpu.cpu_library() is not None
        yield
        return
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cpu, "cpu_library", lambda: None)
        patched.setattr(cpu, "_grouped_mm_library", lambda: None)
        yield


def values(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def assert_within(
    operator: Operator, run: Callable[..., Tensor], exact: Callable[..., Tensor], inputs: Sequence[Tensor],
    dtype: torch.dtype, cancels: float = 0.0, summed: int = 0,
) -> None:  # fmt: skip
    """Result and gradients of inputs of a dtype are as near to those in fp64 as the operator says.

    `cancels`: how large the terms are, for an upstream gradient of one, of which a gradient is the difference;
    `summed`: how many rows the last gradient is a sum over.
    """
    rounded = [each.to(dtype).requires_grad_() for each in inputs]
    precise = [each.detach().double().requires_grad_() for each in rounded]
    found, expected = run(*rounded), exact(*precise)
    upstream = values(7, *expected.shape).to(found.dtype)
    found_gradients = torch.autograd.grad(found, rounded, upstream)
    gradients = torch.autograd.grad(expected, precise, upstream.double())
    terms = [cancels] * len(gradients) + [max(cancels, summed)]
    pairs = zip((found.detach(), *found_gradients), (expected.detach(), *gradients), terms, strict=True)
    for got, wanted, term in pairs:
        assert got.isfinite().all()
        if wanted.numel() and upstream.numel():
            largest = max(float(wanted.abs().max()), term * float(upstream.abs().max()), NEXT_TO_NOTHING)
            assert float((got.double() - wanted).abs().max()) <= operator.allowed_error[dtype] * largest


@DRAWN
@given(st.integers(0, 40), widths, st.sampled_from([0.0, 1.0]), dtypes, st.sampled_from([1e-3, 1.0, 1e3]), seeds)
def test_rms_norm(rows: int, width: int, offset: float, dtype: torch.dtype, scale: float, seed: int) -> None:
    inputs = values(seed, rows, width, scale=scale), values(seed + 1, width)
    assert_within(
        norm.RMS_NORM,
        lambda x, weight: norm.rms_norm(x, weight, 1e-6, offset),
        lambda x, weight: norm.reference(x, weight, 1e-6, offset),
        inputs,
        dtype,
        cancels=float((inputs[0].square().mean(-1).add(1e-6).rsqrt() * (inputs[1] + offset).abs().max()).max())
        if rows
        else 0.0,
        summed=rows,
    )


@DRAWN
@given(st.sampled_from(["swiglu", "geglu", "clamped_swiglu"]), st.integers(0, 9), widths, dtypes,
       st.sampled_from([0.1, 1.0, 30.0]), seeds)  # fmt: skip
def test_gated_product(activation: str, rows: int, width: int, dtype: torch.dtype, scale: float, seed: int) -> None:
    inputs = values(seed, rows, width, scale=scale), values(seed + 1, rows, width, scale=scale)
    assert_within(
        gated.GATED_PRODUCT,
        lambda gate, up: gated.gated_product(gate, up, activation),
        lambda gate, up: gated.reference(gate, up, activation),
        inputs,
        dtype,
        cancels=max(1.0, scale),  # GELU's tail is x times the difference of one and a tanh near one
    )


@DRAWN
@given(st.integers(1, 3), st.integers(1, 9), st.integers(1, 4), st.integers(1, 40), st.booleans(), dtypes, seeds)
def test_rotate(
    sequences: int, length: int, heads: int, half: int, per_token: bool, dtype: torch.dtype, seed: int
) -> None:
    angle = values(seed + 1, *((sequences,) if per_token else ()), length, half, scale=3.0)
    cos, sin = angle.cos().float(), angle.sin().float()
    assert_within(
        rotary.ROTATE,
        lambda x: rotary.rotate(x, cos, sin),
        lambda x: rotary.reference(x, cos.double(), sin.double()),
        [values(seed, sequences, length, heads, 2 * half)],
        dtype,
    )


def first_keys(seed: int, sequences: int, length: int, mean: int, window: int | None) -> Tensor:
    """Of documents whose lengths are drawn, seen through a window."""
    random, rows = np.random.default_rng(seed), []
    for _ in range(sequences):
        begins = np.unique(np.append(0, random.integers(0, length, length // mean)))
        rows.append(np.repeat(begins, np.diff(np.append(begins, length))))
    first_BS = np.stack(rows)
    if window is not None:
        first_BS = np.maximum(first_BS, np.arange(length) - (window - 1))
    return torch.from_numpy(first_BS).to(torch.int32)


@DRAWN
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 300), st.sampled_from([(1, 1), (4, 2), (3, 1)]), st.integers(1, 40)),
    st.sampled_from([2, 30, 100, 1000]), st.sampled_from([None, None, 1, 5, 70, 200]), st.booleans(),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]), seeds,
)  # fmt: skip
def test_masked_attention(
    sizes: tuple[int, int, tuple[int, int], int], mean: int, window: int | None, alike: bool, dtype: torch.dtype,
    seed: int,
) -> None:  # fmt: skip
    sequences, length, (heads, groups), width = sizes
    first = first_keys(seed, 1 if alike else sequences, length, mean, window)
    assert_within(
        masked_attention.MASKED_ATTENTION,
        lambda q, k, v: masked_attention.masked_attention(q, k, v, first, width**-0.5, window),
        lambda q, k, v: masked_attention.reference(q, k, v, first, width**-0.5),
        [
            values(seed + number, sequences, length, count, width)
            for number, count in enumerate((heads, groups, groups))
        ],
        dtype,
        cancels=width**0.5,
    )


@pytest.mark.parametrize(
    ("mean", "window", "at_most"), [(1000, None, 1.01), (100, None, 1.8), (8000, 1024, 1.3), (1000, 128, 2.0)]
)
def test_little_is_attended_to_that_nobody_sees(mean: int, window: int | None, at_most: float) -> None:
    first = first_keys(3, 1, 8192, mean, window)[0].numpy()
    computed = 0
    for piece in masked_attention.pieces(first):
        queries, keys = (each.stop - each.start for each in (piece.queries, piece.keys))
        computed += queries * (queries + 1) // 2 if piece.causal else queries * keys
    assert 1 <= computed / float((np.arange(8192) - first + 1).sum()) <= at_most


def test_selective_recompute_keeps_what_attention_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    attended: list[str] = []
    runs = masked_attention.MASKED_ATTENTION.implementations[0]

    def forward(*inputs: Any) -> Any:
        attended.append("once")
        return runs.forward(*inputs)

    monkeypatch.setattr(masked_attention.MASKED_ATTENTION, "implementations", [replace(runs, forward=forward)])
    model = Model.model_validate(
        {"vocabulary": 9, "layers": 1, "width": 16, "heads": 2, "kv_heads": 1, "sequence": 8, "window": 3}
    )
    block = Decoder(model).blocks["0"]
    apply_recompute([RecomputeRegion(block, "selective")])
    documents = Documents.causal(8, torch.device("cpu"), 3)
    block(torch.randn(2, 8, 16, requires_grad=True), documents).sum().backward()
    assert len(attended) == 1


@DRAWN
@given(st.integers(1, 20), widths, dtypes, st.sampled_from([1.0, 20.0]), st.booleans(), seeds)
def test_cross_entropy(rows: int, vocabulary: int, dtype: torch.dtype, scale: float, ignored: bool, seed: int) -> None:
    logits = values(seed, 1, rows, vocabulary, scale=scale).to(dtype)
    targets = torch.randint(vocabulary, (1, rows), generator=torch.Generator().manual_seed(seed))
    if ignored:
        targets[0, ::2] = IGNORE_INDEX
    counted = targets[0] != IGNORE_INDEX
    mine, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    found = cross_entropy_sum(mine, targets, None)
    expected = loss.reference(exact[0][counted], targets[0][counted]).sum()
    (found * 3.0).backward()
    (expected * 3.0).backward()
    assert mine.grad is not None
    assert exact.grad is not None
    assert abs(float(found.detach()) - float(expected.detach())) <= 2.0**-20 * rows * max(
        1.0, float(exact.detach().abs().max())
    )
    bound = loss.CROSS_ENTROPY.allowed_error[dtype] * 3.0
    assert float((mine.grad.double() - exact.grad).abs().max()) <= bound


def test_what_is_not_a_number_stays_visible() -> None:
    x = torch.randn(4, 600)
    x[1, 599] = math.nan
    x[2, 0] = math.inf
    weight = torch.ones(600)
    assert norm.rms_norm(x, weight, 1e-6).isnan().any(1).tolist() == [False, True, True, False]
    assert gated.gated_product(x, torch.ones_like(x), "swiglu").isnan().sum() == 1
    targets = torch.zeros(1, 4, dtype=torch.int64)
    assert cross_entropy_sum(x[None], targets, None).isnan()
    assert cross_entropy_sum(x[None, :1], targets[:, :1], None).isfinite()
    assert gated.gated_product(x.bfloat16(), torch.ones_like(x).bfloat16(), "geglu").isnan().sum() == 1
    for counts in ([2, 2], [0, 4]):  # padded, and not
        products = experts.GroupedProducts(counts)(x, torch.ones(2, 600, 8), None)
        assert products.isfinite().all(1).tolist() == [True, False, False, True]


def test_logits_of_minus_infinity_add_nothing() -> None:
    logits = torch.randn(3, 1700)
    logits[0, :700] = logits[1, 900:] = -math.inf  # whole blocks of a kernel, at either end
    targets = torch.tensor([800, 10, 1699])
    mine, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    found, expected = cross_entropy_sum(mine[None], targets[None], None), loss.reference(exact, targets).sum()
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-5)
    found.backward()
    expected.backward()
    assert mine.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(mine.grad.double(), exact.grad, rtol=1e-5, atol=1e-7)
    masked = torch.full((1, 1, 700), -math.inf)
    assert cross_entropy_sum(masked, targets[None, 1:2], None).isnan(), "a target that cannot be is no number"
    assert loss.softmax_sums(masked[0], targets[1:2], 0)[1].tolist() == [0.0]


def test_extremes_of_the_activation() -> None:
    gate = torch.tensor([-1e30, -200.0, -88.0, -1e-30, 0.0, 1e-30, 88.0, 200.0, 1e30])
    expected = gated.reference(gate.double(), torch.ones(9).double(), "swiglu").float()
    torch.testing.assert_close(gated.gated_product(gate, torch.ones(9), "swiglu"), expected, rtol=1e-6, atol=1e-35)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_torch_accepts_the_operators(dtype: torch.dtype) -> None:
    def of(*shape: int) -> Tensor:
        return values(1, *shape).to(dtype).requires_grad_()

    ops, checks = torch.ops.danlu, ("test_schema", "test_autograd_registration", "test_faketensor")
    angle = torch.linspace(0, 3, 20).view(5, 4)
    targets, sums, ends = torch.arange(4), torch.ones(4), torch.tensor([2, 5], dtype=torch.int32)
    first = torch.tensor([[0, 0, 0, 3, 3], [0, 1, 1, 1, 1]], dtype=torch.int32)
    q, k, v = of(2, 5, 4, 8).detach(), of(2, 5, 2, 8).detach(), of(2, 5, 2, 8).detach()
    attended = of(2, 5, 4, 8).detach(), q, k, v, *ops.masked_attention(q, k, v, first, 0.3, 0)
    cases: list[tuple[object, tuple[object, ...]]] = [
        (ops.rms_norm.default, (of(3, 8), of(8), 1e-6, 0.0)),
        (ops.rms_norm_backward.default, (of(3, 8).detach(), of(3, 8).detach(), of(8).detach(), torch.ones(3), 0.0)),
        (ops.gated_product.default, (of(3, 8), of(3, 8), "swiglu")),
        (ops.gated_product_backward.default, (*(of(3, 8).detach() for _ in range(3)), "geglu")),
        (ops.rotate.default, (of(2, 5, 3, 8), angle.cos(), angle.sin())),
        (ops.masked_attention.default, (of(2, 5, 4, 8), of(2, 5, 2, 8), of(2, 5, 2, 8), first, 0.3, 0)),
        (ops.masked_attention_backward.default, (*attended, first, 0.3, 0)),
        (ops.quantize_rows.default, (of(3, 40).detach(), 16, True)),
        (ops.softmax_sums.default, (of(4, 9).detach(), targets, 0)),
        (ops.cross_entropy_backward.default, (of(4, 9).detach(), targets, sums, sums, sums, 0)),
        (ops.grouped_mm.default, (of(5, 8), of(2, 8, 4), ends)),
        (ops.grouped_mm_input_gradient.default, (of(5, 4).detach(), of(2, 8, 4).detach(), ends)),
        (ops.grouped_mm_weight_gradient.default, (of(5, 4).detach(), of(5, 8).detach(), ends)),
    ]
    for operator, arguments in cases:
        torch.library.opcheck(operator, arguments, test_utils=checks)


@DRAWN
@given(
    st.integers(1, 20), widths, st.sampled_from([16, 32, 128]), st.booleans(), dtypes,
    st.sampled_from([1e-30, 1.0, 1e20]), st.booleans(), seeds,
)  # fmt: skip
def test_quantize_rows(
    rows: int, width: int, block: int, powers: bool, dtype: torch.dtype, scale: float, by_columns: bool, seed: int
) -> None:
    """Half a step of e4m3 is 1/16 of a number, and 2⁻¹⁰ of a scale for the smallest; rows may be columns in memory."""
    x = values(seed, width, rows, scale=scale).to(dtype).t() if by_columns else values(seed, rows, width).to(dtype)
    found, scales = quantize.quantize_rows(x, block, powers)
    assert (found.shape, scales.shape, found.is_contiguous()) == (x.shape, (rows, -(-width // block)), True)
    assert not powers or bool((torch.frexp(scales)[0] == 0.5).all())
    each = scales.double().repeat_interleave(block, dim=1)[:, :width]
    error = (found.double() * each - x.double()).abs()
    assert bool((error <= torch.maximum(x.double().abs() / 16, each * 2.0**-10) * (1 + 2.0**-20)).all())


@DRAWN
@given(
    st.lists(st.integers(0, 9) | st.sampled_from([0, 40]), min_size=1, max_size=6), st.integers(1, 40), widths, dtypes,
    seeds,
)  # fmt: skip
def test_grouped_mm(counts: list[int], width: int, hidden: int, dtype: torch.dtype, seed: int) -> None:
    """Experts without a token, and none at all, are among them."""
    inputs = values(seed, sum(counts), width), values(seed + 1, len(counts), width, hidden)
    assert_within(
        experts.GROUPED_MM,
        lambda x, weight: experts.GroupedProducts(counts)(x, weight, None),
        lambda x, weight: experts.reference(x, weight, torch.tensor(counts).cumsum(0)),
        inputs,
        dtype,
        cancels=float(hidden**0.5),
        summed=max(counts),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_mm_of_more_than_one_block(dtype: torch.dtype) -> None:
    """Of rows, of columns and of what is summed over."""
    counts = [250, 0, 3]
    inputs = values(1, 253, 600), values(2, 3, 600, 1100)
    assert_within(
        experts.GROUPED_MM,
        lambda x, weight: experts.GroupedProducts(counts)(x, weight, None),
        lambda x, weight: experts.reference(x, weight, torch.tensor(counts).cumsum(0)),
        inputs,
        dtype,
    )


@DRAWN
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 5), st.integers(1, 5), st.booleans(), dtypes,
    st.booleans(), seeds,
)  # fmt: skip
def test_expert_products(
    counts: list[int], inputs: int, outputs: int, biased: bool, dtype: torch.dtype, on_device: bool, seed: int
) -> None:
    """What the loop gives, of counts that the host knows and of those on a device."""
    width, hidden = 8 * inputs, 8 * outputs
    x, weight = values(seed, sum(counts), width).to(dtype), values(seed + 1, len(counts), width, hidden).to(dtype)
    bias = values(seed + 2, len(counts), hidden).to(dtype) if biased else None
    results = []
    for products in (
        experts.LoopedProducts(counts),
        experts.GroupedProducts(torch.tensor(counts) if on_device else counts),
    ):
        leaves = [each.clone().requires_grad_() for each in (x, weight, *([] if bias is None else [bias]))]
        y = products(leaves[0], leaves[1], None if bias is None else leaves[2])
        results.append((y.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y))))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=8 * torch.finfo(dtype).eps, atol=32 * torch.finfo(dtype).eps)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other architectures have vectors of one width")
@pytest.mark.parametrize("vectors", ["", "avx2"])
def test_narrower_vectors_multiply_as_well(vectors: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor that has these and no others; a feature is known by the length of its name."""
    lesser = f"-DCPU_HAS(feature)=(sizeof(feature) == {len(vectors) + 1})"
    source = native.build.FOLDER / "cpu_grouped_mm.c"
    command = [*native.build.COMPILE_COMMAND, "-fopenmp", lesser, "-o", str(tmp_path / "narrow.so"), str(source)]
    subprocess.run(command, check=True)
    narrow = ctypes.CDLL(str(tmp_path / "narrow.so"))
    monkeypatch.setattr(cpu, "_grouped_mm_library", lambda: narrow)
    counts = [250, 0, 3, 17]
    leaves = values(1, 270, 61).float().requires_grad_(), values(2, 4, 61, 83).float().requires_grad_()
    assert experts.GROUPED_MM.implementation(leaves[0]).name == "native"
    results = []
    for products in (experts.GroupedProducts(counts), experts.LoopedProducts(counts)):
        y = products(*leaves, None)
        results.append((y.detach(), *torch.autograd.grad(y.square().sum(), leaves)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


def test_threads_change_no_bit() -> None:
    x, weight = torch.randn(700, 130), torch.randn(5, 130, 77)
    results = []
    for threads in (1, 2, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
            y = experts.GroupedProducts([300, 10, 0, 90, 300])(*leaves, None)
            results.append((y.detach(), *torch.autograd.grad(y.square().sum(), leaves)))
        finally:
            torch.set_num_threads(before)
    if experts.GROUPED_MM.implementation(x).name == "native":
        assert all(torch.equal(a, b) for others in results[1:] for a, b in zip(results[0], others, strict=True))


@needs_grouped_mm
def test_a_chip_is_not_waited_for() -> None:
    """Tensors of the meta device stand for those of a chip: reading the value of one is an error."""
    with torch.device("meta"):
        layer = MoeLayer(16, Moe(experts=4, top_k=2, width=8), "swiglu", None).to(torch.bfloat16)
        x = torch.empty(1, 6, 16, dtype=torch.bfloat16, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert layer.experts.down.grad is not None
    with pytest.raises(RuntimeError, match="meta"):
        layer.router.load_E.tolist()


@needs_grouped_mm
def test_products_of_torch_are_chosen_for_chips_and_what_they_take() -> None:
    x, weight = torch.empty(12, 8, device="meta", dtype=torch.bfloat16), torch.empty(3, 8, 16, device="meta")

    def chosen(*tensors: Tensor) -> str:
        return experts.GROUPED_MM.implementation(*tensors).name

    assert chosen(x, weight) == "torch_grouped"
    assert chosen(x.float(), weight) == "torch", "it is for bf16"
    assert chosen(x[:, :3], weight[:, :3]) == "torch", "rows of 6 bytes"
    assert chosen(x, weight[..., :3]) == "torch", "rows of 6 bytes in its gradients"
    assert chosen(torch.ones(12, 8).bfloat16(), torch.ones(3, 8, 16)) != "torch_grouped", "it is for chips"


@needs_grouped_mm
def test_products_of_torch_are_those_of_the_loop_and_wait_for_nothing() -> None:
    """They run on a CPU, too; tensors of the meta device have no values that could be read."""
    runs = next(each for each in experts.GROUPED_MM.implementations if each.name == "torch_grouped")
    x, weight, gradient = values(1, 9, 16).bfloat16(), values(2, 3, 16, 8).bfloat16(), values(3, 9, 8).bfloat16()
    ends = torch.tensor([4, 4, 9], dtype=torch.int32)
    leaves = x.double().requires_grad_(), weight.double().requires_grad_()
    expected = experts.reference(*leaves, ends)
    gradients = torch.autograd.grad(expected, leaves, gradient.double())
    found = _three_products(runs, x, weight, gradient, ends)
    for mine, exact in zip(found, (expected.detach(), *gradients), strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=2e-2, atol=2e-2)
    without_values = [each.to("meta") for each in (x, weight, gradient, ends)]
    assert all(product.is_meta for product in _three_products(runs, *without_values))


def _three_products(runs: Implementation, x: Tensor, weight: Tensor, gradient: Tensor, ends: Tensor) -> list[Tensor]:
    return [runs.forward(x, weight, ends), runs.backward(gradient, weight, ends), runs.backward(gradient, x, ends)]


def test_selective_recompute_keeps_products_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    multiplied: list[str] = []
    runs = experts.GROUPED_MM.implementations[0]

    def forward(*inputs: Any) -> Tensor:
        multiplied.append("product")
        return runs.forward(*inputs)

    monkeypatch.setattr(experts.GROUPED_MM, "implementations", [replace(runs, forward=forward)])
    layer = MoeLayer(16, Moe(experts=4, top_k=2, width=8), "swiglu", None)
    apply_recompute([RecomputeRegion(layer, "selective")])
    layer(torch.randn(1, 6, 16, requires_grad=True)).sum().backward()
    assert len(multiplied) == 3, "up, gate and down, in the forward pass alone"


def test_a_gradient_of_experts_that_nobody_asks_for_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a pipeline whose schedule splits the backward pass."""
    computed: list[str] = []
    runs = experts.GROUPED_MM.implementations[0]

    def backward(gradient: Tensor, other: Tensor, ends: Tensor) -> Tensor:
        computed.append("copies" if other is weight else "matrices")
        return runs.backward(gradient, other, ends)

    monkeypatch.setattr(experts.GROUPED_MM, "implementations", [replace(runs, backward=backward)])
    x, weight = torch.randn(5, 8, requires_grad=True), torch.randn(2, 8, 4, requires_grad=True)
    y = experts.GroupedProducts([2, 3])(x * 1, weight, None).sum()
    torch.autograd.grad(y, x, retain_graph=True)
    torch.autograd.grad(y, weight, retain_graph=True)
    assert computed == ["copies", "matrices"]
    y.backward()
    assert computed == ["copies", "matrices"] * 2
