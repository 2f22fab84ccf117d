"""Times of operators: limits of the roofline, tiles and waves, alignment, attention."""

from dataclasses import replace

import pytest

from danlu.cost.calibration import ChipEfficiency
from danlu.cost.operator_time import (
    DeviceModel,
    elementwise_time,
    flash_attention_time,
    matmul_time,
    unfused_attention_time,
)

IDEAL = ChipEfficiency(
    matmul=1.0,
    weight_gradient=1.0,
    grouped_gemm=1.0,
    fp8=1.0,
    wave_quantization=1.0,
    half_speed_k=0.0,
    attention_forward=1.0,
    attention_backward=1.0,
    attention_fill=0.0,
    memory_bandwidth=1.0,
    kernel_latency=0.0,
    intra_node=1.0,
    inter_node=1.0,
    cores=100,
)
CHIP = DeviceModel(peak=100e12, peak_16bit=100e12, bandwidth=1e12, element_bytes=2, efficiency=IDEAL)


def test_a_product_that_fills_every_wave_runs_at_the_peak() -> None:
    m, n, k = 10 * 256, 10 * 128, 4096  # one hundred tiles on one hundred cores
    assert matmul_time(CHIP, m, n, k) == pytest.approx(2 * m * n * k / 100e12)


def test_a_wave_that_is_hardly_filled_costs_most_of_a_whole_one() -> None:
    full = matmul_time(CHIP, 2560, 1280, 4096)
    assert (
        matmul_time(CHIP, 2560 + 256, 1280, 4096) > 1.4 * full
    )  # a tenth more to do; smaller tiles save some of the wave
    smooth = replace(CHIP, efficiency=replace(IDEAL, wave_quantization=0.0))
    assert matmul_time(smooth, 2560 + 256, 1280, 4096) == pytest.approx(1.1 * full)


def test_a_thin_product_is_bound_by_memory() -> None:
    m, n, k = 64, 65536, 64
    assert matmul_time(CHIP, m, n, k) == pytest.approx(2 * (m * k + k * n + m * n) / 1e12)


def test_a_short_inner_length_pays_for_the_ends_of_its_tiles() -> None:
    deep = replace(CHIP, efficiency=replace(IDEAL, half_speed_k=512.0))
    assert matmul_time(deep, 2560, 1280, 512) == pytest.approx(2 * matmul_time(CHIP, 2560, 1280, 512))


def test_rows_that_are_not_aligned_leave_the_matrix_units_idle() -> None:
    aligned, eight, four = (matmul_time(CHIP, 2560, 1280, k) for k in (4096, 4104, 4100))
    assert aligned < eight < 2 * aligned < four


def test_the_tokens_of_a_weight_gradient_need_no_alignment() -> None:
    even = matmul_time(CHIP, 2560, 1280, 4096, weight_gradient=True)
    assert matmul_time(CHIP, 2560, 1280, 4097, weight_gradient=True) == pytest.approx(even, rel=0.01)


def test_fp8_doubles_the_peak_of_products_alone() -> None:
    fast = replace(CHIP, peak=200e12)
    assert fast.uses_fp8 and matmul_time(fast, 2560, 1280, 8192) == pytest.approx(
        matmul_time(CHIP, 2560, 1280, 8192) / 2
    )
    assert flash_attention_time(fast, 1, 8, 4096, 4096, 128) == flash_attention_time(CHIP, 1, 8, 4096, 4096, 128)


def test_flash_attention_counts_the_causal_half() -> None:
    # two products of s × s × d for every head, half of each: 2 · 2 · s² · d / 2
    assert flash_attention_time(CHIP, 1, 8, 4096, 4096, 128) == pytest.approx(2 * 8 * 4096**2 * 128 / 100e12)
    assert flash_attention_time(CHIP, 1, 8, 4096, 4096, 128, backward=True) == pytest.approx(
        5 * 8 * 4096**2 * 128 / 100e12
    )


def test_few_heads_do_not_fill_the_chip() -> None:
    filling = replace(CHIP, efficiency=replace(IDEAL, attention_fill=1.0))
    one, many = (flash_attention_time(filling, 1, heads, 4096, 4096, 128) / heads for heads in (1, 128))
    assert one > 2 * many


def test_attention_with_scores_in_memory_moves_them() -> None:
    scores = 8 * 2048**2
    less, more = (unfused_attention_time(CHIP, 1, 8, 2048, 128, moved) for moved in (10, 20))
    assert more - less == pytest.approx(10 * scores / 1e12)


def test_bytes_over_bandwidth() -> None:
    late = replace(CHIP, efficiency=replace(IDEAL, memory_bandwidth=0.5, kernel_latency=3e-6))
    assert elementwise_time(late, 1e9, kernels=2) == pytest.approx(2e-3 + 6e-6)
