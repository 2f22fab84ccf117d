"""Times of operators: limits of the roofline, tiles and waves, alignment, attention."""

from dataclasses import replace

import pytest

from danlu.cost.calibration import Efficiency
from danlu.cost.operators import Device, elementwise, flash_attention, fused_attention, matmul

IDEAL = Efficiency(
    matmul=1.0,
    weight_gradient=1.0,
    grouped=1.0,
    fp8=1.0,
    wave=1.0,
    depth=0.0,
    attention_forward=1.0,
    attention_backward=1.0,
    attention_fill=0.0,
    memory=1.0,
    launch=0.0,
    inner=1.0,
    outer=1.0,
    cores=100,
)
CHIP = Device(peak=100e12, half_peak=100e12, bandwidth=1e12, width=2, efficiency=IDEAL)


def test_a_product_that_fills_every_wave_runs_at_the_peak() -> None:
    m, n, k = 10 * 256, 10 * 128, 4096  # one hundred tiles on one hundred cores
    assert matmul(CHIP, m, n, k) == pytest.approx(2 * m * n * k / 100e12)


def test_a_wave_that_is_hardly_filled_costs_most_of_a_whole_one() -> None:
    full = matmul(CHIP, 2560, 1280, 4096)
    assert matmul(CHIP, 2560 + 256, 1280, 4096) > 1.4 * full  # a tenth more to do; smaller tiles save some of the wave
    smooth = replace(CHIP, efficiency=replace(IDEAL, wave=0.0))
    assert matmul(smooth, 2560 + 256, 1280, 4096) == pytest.approx(1.1 * full)


def test_a_thin_product_is_bound_by_memory() -> None:
    m, n, k = 64, 65536, 64
    assert matmul(CHIP, m, n, k) == pytest.approx(2 * (m * k + k * n + m * n) / 1e12)


def test_a_short_inner_length_pays_for_the_ends_of_its_tiles() -> None:
    deep = replace(CHIP, efficiency=replace(IDEAL, depth=512.0))
    assert matmul(deep, 2560, 1280, 512) == pytest.approx(2 * matmul(CHIP, 2560, 1280, 512))


def test_rows_that_are_not_aligned_leave_the_matrix_units_idle() -> None:
    aligned, eight, four = (matmul(CHIP, 2560, 1280, k) for k in (4096, 4104, 4100))
    assert aligned < eight < 2 * aligned < four


def test_the_tokens_of_a_weight_gradient_need_no_alignment() -> None:
    even = matmul(CHIP, 2560, 1280, 4096, weight_gradient=True)
    assert matmul(CHIP, 2560, 1280, 4097, weight_gradient=True) == pytest.approx(even, rel=0.01)


def test_fp8_doubles_the_peak_of_products_alone() -> None:
    fast = replace(CHIP, peak=200e12)
    assert fast.fp8 and matmul(fast, 2560, 1280, 8192) == pytest.approx(matmul(CHIP, 2560, 1280, 8192) / 2)
    assert flash_attention(fast, 1, 8, 4096, 4096, 128) == flash_attention(CHIP, 1, 8, 4096, 4096, 128)


def test_flash_attention_counts_the_causal_half() -> None:
    # two products of s × s × d for every head, half of each: 2 · 2 · s² · d / 2
    assert flash_attention(CHIP, 1, 8, 4096, 4096, 128) == pytest.approx(2 * 8 * 4096**2 * 128 / 100e12)
    assert flash_attention(CHIP, 1, 8, 4096, 4096, 128, backward=True) == pytest.approx(5 * 8 * 4096**2 * 128 / 100e12)


def test_few_heads_do_not_fill_the_chip() -> None:
    filling = replace(CHIP, efficiency=replace(IDEAL, attention_fill=1.0))
    one, many = (flash_attention(filling, 1, heads, 4096, 4096, 128) / heads for heads in (1, 128))
    assert one > 2 * many


def test_attention_with_scores_in_memory_moves_them() -> None:
    scores = 8 * 2048**2
    less, more = (fused_attention(CHIP, 1, 8, 2048, 128, moved) for moved in (10, 20))
    assert more - less == pytest.approx(10 * scores / 1e12)


def test_bytes_over_bandwidth() -> None:
    late = replace(CHIP, efficiency=replace(IDEAL, memory=0.5, launch=3e-6))
    assert elementwise(late, 1e9, kernels=2) == pytest.approx(2e-3 + 6e-6)
