"""Time of one operator on one chip: a roofline whose compute side knows tiles and waves.

A matrix product is cut into tiles, one a core at a time; the last wave of tiles leaves cores idle, and every tile pays
for its prologue and epilogue (NVIDIA, "Matrix multiplication background user's guide"). Flash attention is FLOPs of the
causal half (Dao, "FlashAttention-2", 2023); before it, scores went through memory several times (Korthikanti et al.,
"Reducing activation recomputation in large transformer models", 2022, section 4). The rest moves bytes.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from danlu.cost.calibration import Efficiency
from danlu.cost.curves import OperatorTimes, operator_times
from danlu.spec.cluster import Chip, Operator

_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.82), (64, 128, 0.82), (64, 64, 0.65))
"""Tiles that libraries choose among, with how well each re-uses what it loads."""
_ALIGNED = 64
"""Elements to which rows must be aligned for full speed (128 bytes; same guide, section on tensor cores)."""
_BY_ALIGNMENT = {64: 1.0, 32: 0.97, 16: 0.92, 8: 0.85, 4: 0.12, 2: 0.1, 1: 0.08}
"""Share of full speed by the largest power of two that divides a row: below 8 the matrix units stay idle."""
_WIDTH = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 2, "fp4": 2}
"""Bytes of an activation by precision of compute: below half precision, activations stay in it."""
_MEASURED_HEAD = 64
"""Width of the heads that attention is measured with, as `Operator` says."""


@dataclass(frozen=True)
class Device:
    """One chip as operators see it: data sheet and efficiency for one precision."""

    peak: float
    """FLOP/s of matrix products in the precision of linear layers."""
    half_peak: float
    """FLOP/s of matrix products in half precision, in which attention stays."""
    bandwidth: float
    """Bytes a second of the memory."""
    width: int
    """Bytes of an element of activations."""
    efficiency: Efficiency
    measured: OperatorTimes | None = None
    """Times of the operators themselves, where the chip was probed; they stand in for everything above."""

    @property
    def fp8(self) -> bool:
        """Whether linear layers run faster than half precision."""
        return self.peak > self.half_peak


def device_of(chip: Chip, dtype: str, efficiency: Efficiency) -> Device:
    """A chip in one precision of compute."""
    half = chip.peak.get("bf16") or chip.peak.get("fp16") or chip.peak.get("fp32") or max(chip.peak.values())
    if dtype in ("fp32", "tf32", "fp64"):
        half = chip.peak.get(dtype, half)  # type: ignore[call-overload]
    peak = chip.peak.get("fp8", half) if dtype in ("fp8", "fp4") else half
    return Device(peak, half, chip.memory_bandwidth, _WIDTH[dtype], efficiency, operator_times(chip, dtype))


@lru_cache(maxsize=65536)
def matmul(
    device: Device, m: int, n: int, k: int, *, groups: int = 1, weight_gradient: bool = False, fused: bool = False
) -> float:
    """Seconds of `groups` products of m × k by k × n; `weight_gradient` adds its result to one in fp32.

    `fused` groups are one kernel whose tiles do not mind which group they belong to, as fast as one product of as many
    tiles; the others are calls of their own, one a group.
    """
    if device.measured:
        return device.measured.of("matmul", 2.0 * m * n * k, groups)
    chip = device.efficiency
    rows_of = (m, n) if weight_gradient else (n, k)  # the other length counts tokens, which no row is made of
    best = device.peak * chip.matmul * (chip.fp8 if device.fp8 else 1.0) * _alignment(*rows_of)
    if weight_gradient:
        best *= chip.weight_gradient
    if groups > 1 and not fused:
        best *= chip.grouped
    compute = min(
        _waves(ceil(m / rows) * ceil(n / columns) * groups, chip) * 2.0 * rows * columns * (k + chip.depth) / reuse
        for rows, columns, reuse in _TILES
    ) * (chip.cores / best)
    out = 4 if weight_gradient else device.width
    moved = groups * (device.width * (m * k + k * n) + out * m * n * (2 if weight_gradient else 1))
    return max(compute, moved / (device.bandwidth * chip.memory), chip.launch)


def _waves(tiles: float, chip: Efficiency) -> float:
    """Rounds in which the cores take the tiles, each core-second counted; the last round is partly lost."""
    rounds = tiles / chip.cores
    return (1 - chip.wave) * rounds + chip.wave * ceil(rounds)


def _alignment(*sizes: int) -> float:
    """Share of full speed by the worst-aligned row."""
    return min(_BY_ALIGNMENT[min(size & -size, _ALIGNED)] for size in sizes)


@lru_cache(maxsize=65536)
def flash_attention(
    device: Device, sequences: float, heads: float, queries: int, keys: float, head: float, *, backward: bool = False
) -> float:
    """Seconds of causal attention of `queries` tokens over `keys` (equal without context parallelism).

    `head` is the mean of the widths of keys and values. The backward pass does 2.5 times the FLOPs.
    """
    if device.measured:
        operator: Operator = "attention_backward" if backward else "attention"
        share = queries / keys * head / _MEASURED_HEAD
        return device.measured.of(operator, keys, sequences * heads * share)
    chip = device.efficiency
    flops = 2.0 * sequences * heads * queries * keys * head * (2.5 if backward else 1.0)
    best = chip.attention_backward if backward else chip.attention_forward
    narrow = min(1.0, 0.55 + 0.45 * head / 128)
    blocks = sequences * heads * queries / 128 / chip.cores
    fill = chip.attention_fill * (0.4 if backward else 1.0)
    return flops / (device.half_peak * best * narrow * blocks / (blocks + fill)) + chip.launch


def fused_attention(
    device: Device, sequences: int, heads: int, length: int, head: int, moved: float, *, backward: bool = False
) -> float:
    """Seconds of attention with its scores in memory: two batched products and kernels that move `moved` bytes a score.

    What Megatron-LM and DeepSpeed did before flash attention, mask or not: all scores are computed.
    """
    half = Device(device.half_peak, device.half_peak, device.bandwidth, device.width, device.efficiency)
    batch = sequences * heads
    products = _batched(half, length, length, head, batch) + _batched(half, length, head, length, batch)
    scores = batch * length * length * moved / (device.bandwidth * device.efficiency.memory)
    return (2 if backward else 1) * products + scores + 3 * device.efficiency.launch


@lru_cache(maxsize=65536)
def _batched(device: Device, m: int, n: int, k: int, batch: int) -> float:
    """Seconds of a batched product: plain tiles, one product after another in the same launch."""
    chip = device.efficiency
    best = device.peak * chip.matmul * _alignment(n, k)
    compute = min(
        _waves(ceil(m / rows) * ceil(n / columns) * batch, chip) * 2.0 * rows * columns * (k + chip.depth) / reuse
        for rows, columns, reuse in _TILES
    ) * (chip.cores / best)
    moved = batch * device.width * (m * k + k * n + m * n)
    return max(compute, moved / (device.bandwidth * chip.memory), chip.launch)


def elementwise(device: Device, moved: float, kernels: int = 1) -> float:
    """Seconds of kernels that only move bytes."""
    return moved / (device.bandwidth * device.efficiency.memory) + kernels * device.efficiency.launch
