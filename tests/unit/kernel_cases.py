"""Every kernel in Triton's interpreter against its reference in fp64, a case a function.

    TRITON_INTERPRET=1 python tests/unit/kernel_cases.py

writes a line of JSON for every case: what is wrong, empty if nothing. `test_language.py` runs it once, in a process of
its own, because Triton decides when it is imported whether it interprets.
"""

import json
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from danlu.language.checking import check_implementation, relative_error
from danlu.ops.operators.masked_attention import MASKED_ATTENTION

ROUNDINGS = {torch.float32: 2.0**-19, torch.bfloat16: 2.0**-6}
"""Allowed of products of matrices, where the operators of this package say nothing."""


def values(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.to(dtype).double().requires_grad_()


def beyond(found: dict[str, tuple[Tensor, Tensor]], allowed: float) -> list[str]:
    errors = {name: relative_error(got, wanted) for name, (got, wanted) in found.items()}
    return [f"{name} is off by {error:.1e}" for name, error in errors.items() if not error <= allowed]


def operator_case(number: int, dtype: torch.dtype) -> list[str]:
    from danlu.language.register import _kernels, checked_implementation

    operator, forward, backward = _kernels()[number]
    implementation = checked_implementation(operator, forward, backward, "cpu")
    return [str(each) for each in check_implementation(operator, implementation, "cpu", dtype)]


def attention_case(dtype: torch.dtype, length: int, heads: int, groups: int, width: int, kind: str) -> list[str]:
    from danlu.language.attention import attention, attention_backward

    first = torch.zeros(2, length, dtype=torch.int32)
    if kind == "documents":
        first[0, 23:], first[0, 40:], first[1, length - 1 :] = 23, 40, length - 1
    if kind == "window":
        # 33: the last query that sees the last key of a tile is then the first of its own tile.
        first[:] = (torch.arange(length) - 33).clamp(min=0)
    q, k, v, upstream = (
        values(2, length, count, width, dtype=dtype, seed=count + number)
        for number, count in enumerate((heads, groups, groups, heads))
    )
    y = MASKED_ATTENTION.reference(q, k, v, first, 0.3)
    gradients = torch.autograd.grad(y, (q, k, v), upstream.detach())
    mine = [each.detach().to(dtype) for each in (q, k, v)]
    my_y, my_logsumexp = attention(*mine, first, 0.3)
    my_gradients = attention_backward(upstream.detach().to(dtype), *mine, my_y, my_logsumexp, first, 0.3)
    found = {"y": (my_y, y)}
    pairs = zip(my_gradients, gradients, strict=True)
    found |= {f"gradient of {name}": pair for name, pair in zip("qkv", pairs, strict=True)}
    return beyond(found, ROUNDINGS[dtype])


def grouped_mm_case(dtype: torch.dtype, counts: list[int], width: int, columns: int) -> list[str]:
    from danlu.language.grouped_mm import grouped_mm, grouped_mm_input_gradient, grouped_mm_weight_gradient

    tokens, experts = sum(counts), len(counts)
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    x, weight = values(tokens, width, dtype=dtype, seed=1), values(experts, width, columns, dtype=dtype, seed=2)
    upstream = values(tokens, columns, dtype=dtype, seed=3).detach()
    y = torch.cat([rows @ weight[expert] for expert, rows in enumerate(x.split(counts))])
    gradients = torch.autograd.grad(y, (x, weight), upstream)
    mine = x.detach().to(dtype), weight.detach().to(dtype), upstream.to(dtype)
    found = {
        "y": (grouped_mm(mine[0], mine[1], ends), y),
        "gradient of x": (grouped_mm_input_gradient(mine[2], mine[1], ends), gradients[0]),
        "gradient of the weight": (grouped_mm_weight_gradient(mine[0], mine[2], ends), gradients[1]),
    }
    return beyond(found, ROUNDINGS[dtype])


def adamw_case(dtype: torch.dtype) -> list[str]:
    from danlu.language.adamw import adamw_update

    settings: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    parameter = values(37, 61, dtype=torch.float32, seed=1).detach()
    exact = torch.nn.Parameter(parameter.clone())
    optimizer = torch.optim.AdamW([exact], **settings)
    mine = parameter.float()
    mean, square = torch.zeros_like(mine), torch.zeros_like(mine)
    for step in (1, 2, 3):
        gradient = values(37, 61, dtype=dtype, seed=step).detach()
        exact.grad = gradient.clone()
        optimizer.step()
        adamw_update(mine, gradient.to(dtype), mean, square, **settings, step=step)
    state = optimizer.state[exact]
    found = {
        "parameter": (mine, exact.detach()),
        "mean": (mean, state["exp_avg"]),
        "square": (square, state["exp_avg_sq"]),
    }
    return beyond(found, 2.0**-20)


def fp8_all_values_case() -> list[str]:
    """Every value between two neighbors of e4m3, and the middle, where a tie is decided."""
    from danlu.language.fp8_cast import fp8_cast

    grid = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    between = torch.cat([grid, (grid[1:] + grid[:-1]) / 2, grid[1:] * 0.9999, grid[:-1] * 1.0001 + 2.0**-12])
    between = torch.cat([between, -between])
    rows = torch.full((len(between), 128), 448.0)  # so that every scale is 1
    rows[:, 5] = between
    cast, scales = fp8_cast(rows)
    wrong = int((cast[:, 5].view(torch.uint8) != between.to(torch.float8_e4m3fn).view(torch.uint8)).sum())
    return [f"{wrong} bytes differ"] * bool(wrong) + ["a scale is not 1"] * bool((scales != 1).any())


def not_a_number_case() -> list[str]:
    from danlu.language.cross_entropy import softmax_sums
    from danlu.language.fp8_cast import fp8_cast
    from danlu.language.gated import gated_product
    from danlu.language.grouped_mm import grouped_mm
    from danlu.language.norm import rms_norm

    x = torch.randn(4, 200)
    x[1, 199], x[2, 0] = float("nan"), float("inf")
    one = torch.ones(200)
    problems = []
    if rms_norm(x, one, 1e-6, 0.0)[0].isnan().any(1).tolist() != [False, True, True, False]:
        problems.append("rms_norm hides it")
    for activation in ("swiglu", "geglu", "clamped_swiglu"):
        if not gated_product(x, torch.ones_like(x), activation)[1, 199].isnan():
            problems.append(f"{activation} hides it")
    sums = softmax_sums(x, torch.zeros(4, dtype=torch.int64), 0)[1]
    if sums.isnan().tolist() != [False, True, True, False]:
        problems.append("softmax_sums hides it")
    for block, powers in ((128, False), (32, True)):
        cast, scales = fp8_cast(x, block, powers)
        dequantized = cast.float() * scales.repeat_interleave(block, 1)[:, :200]
        if dequantized.isfinite().all(1).tolist() != [True, False, False, True]:
            problems.append(f"fp8_cast in blocks of {block} hides it")
    products = grouped_mm(x, torch.ones(2, 200, 24), torch.tensor([2, 4], dtype=torch.int32))
    if products.isfinite().all(1).tolist() != [True, False, False, True]:
        problems.append("grouped_mm hides it, or shows it elsewhere")
    hidden = torch.full((2, 70), float("-inf"))  # a vocabulary of which almost all is masked
    hidden[:, 3] = 1.0
    highest, sums, _ = softmax_sums(hidden, torch.full((2,), 3), 0)
    if highest.tolist() != [1.0, 1.0] or sums.tolist() != [1.0, 1.0]:
        problems.append("softmax_sums of -inf is wrong")
    return problems


def nothing_case() -> list[str]:
    from danlu.language.gated import gated_product
    from danlu.language.grouped_mm import grouped_mm, grouped_mm_weight_gradient
    from danlu.language.norm import rms_norm, rms_norm_backward

    x, weight = torch.ones(0, 40), torch.ones(40)
    y, rstd = rms_norm(x, weight, 1e-6, 0.0)
    empty, total = rms_norm_backward(x, x, weight, rstd, 0.0)
    ends = torch.zeros(2, dtype=torch.int32)
    matrices = grouped_mm_weight_gradient(x, torch.ones(0, 20), ends)
    products = grouped_mm(x, torch.ones(2, 40, 20), ends)
    good = y.numel() == empty.numel() == gated_product(x, x, "swiglu").numel() == products.numel() == 0
    return [] if good and not total.any() and not matrices.any() else ["nothing is not nothing"]


def registered_case() -> list[str]:
    """Operators run their kernels, autograd included, and a second registration changes nothing."""
    from danlu.language import register_kernels
    from danlu.ops.operators.norm import RMS_NORM, rms_norm

    names = register_kernels("cpu")
    known = len(RMS_NORM.implementations)
    problems = [] if register_kernels("cpu") == names and len(RMS_NORM.implementations) == known else ["twice"]
    x = torch.randn(5, 33, requires_grad=True)
    if (chosen := RMS_NORM.implementation(x).name) != "triton":
        problems.append(f"{chosen} runs: {RMS_NORM.implementations[-1].why_not()}")
    weight = torch.ones(33, requires_grad=True)
    rms_norm(x, weight, 1e-6).sum().backward()
    if x.grad is None or not x.grad.isfinite().all():
        problems.append("no gradient")
    del RMS_NORM.implementations[-1]
    return problems if names == list(OPERATORS) else [*problems, str(names)]


def wrong_mask() -> tuple[Any, Callable[..., Any], Callable[..., Any]]:
    """RMS norm whose mask lets the first element beyond a row in, as `<=` for `<` does."""
    import kernel_with_wrong_mask

    from danlu.language import norm
    from danlu.ops.operators.norm import RMS_NORM

    kernel = replace(norm.RMS_NORM_FORWARD, function=kernel_with_wrong_mask.forward)

    def forward(x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
        good, norm.RMS_NORM_FORWARD = norm.RMS_NORM_FORWARD, kernel
        try:
            return norm.rms_norm(x, weight, eps, offset)
        finally:
            norm.RMS_NORM_FORWARD = good

    return RMS_NORM, forward, norm.rms_norm_backward


def planted_check_case() -> list[str]:
    """What the comparison says of the wrong mask."""
    from danlu.language.register import checked_implementation

    operator, forward, backward = wrong_mask()
    implementation = checked_implementation(operator, forward, backward, "cpu")
    return [str(each) for each in check_implementation(operator, implementation, "cpu", torch.float32)]


def planted_use_case() -> list[str]:
    """What is warned of when the wrong mask is about to be used, and what runs instead."""
    from danlu.language.register import checked_implementation

    operator, forward, backward = wrong_mask()
    operator.implementations.append(checked_implementation(operator, forward, backward, "cpu"))
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            runs = {operator.implementation(torch.ones(2, 2)).name for _ in range(2)}
    finally:
        operator.implementations.pop()
    return [f"{each.category.__name__}: {each.message}" for each in said] + sorted(runs)


FP32, BF16 = torch.float32, torch.bfloat16
OPERATORS = ("rms_norm", "gated_product", "rotate", "cross_entropy", "masked_attention", "grouped_mm", "quantize_rows")
CASES: dict[str, Callable[[], list[str]]] = {
    **{
        f"{name} in {dtype}": (lambda number=number, dtype=dtype: operator_case(number, dtype))
        for number, name in enumerate(OPERATORS)
        for dtype in (FP32, BF16)
    },
    "attention": lambda: attention_case(BF16, 77, 3, 3, 40, "causal"),
    "attention of documents in fp32": lambda: attention_case(FP32, 150, 4, 2, 24, "documents"),
    "attention in a window in fp32": lambda: attention_case(FP32, 141, 2, 1, 16, "window"),
    "grouped_mm in fp32": lambda: grouped_mm_case(FP32, [0, 19, 1, 0, 53], 37, 70),
    "grouped_mm in bf16": lambda: grouped_mm_case(BF16, [80, 0, 3], 37, 70),
    "adamw in fp32": lambda: adamw_case(FP32),
    "adamw of gradients in bf16": lambda: adamw_case(BF16),
    "fp8_cast of every value": fp8_all_values_case,
    "what is not a number": not_a_number_case,
    "nothing": nothing_case,
    "registered": registered_case,
}
PLANTED: dict[str, Callable[[], list[str]]] = {"wrong mask": planted_check_case, "wrong mask in use": planted_use_case}


def main() -> None:
    np.seterr(all="ignore")  # chips say nothing either of exp that is inf, or of rows that are masked
    for name, case in {**CASES, **PLANTED}.items():
        if len(sys.argv) > 1 and sys.argv[1] not in name:
            continue
        began = time.perf_counter()
        try:
            problems = case()
        except Exception as error:
            problems = [f"{type(error).__name__}: {error}"]
        seconds = round(time.perf_counter() - began, 1)
        print(json.dumps({"case": name, "problems": problems, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
