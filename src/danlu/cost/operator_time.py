"""Time of one operator on one chip: a roofline whose compute side models tiles and waves.

A matmul is split into tiles, one per core at a time; the last wave of tiles leaves cores idle, and every tile pays for
its prologue and epilogue (NVIDIA, "Matrix multiplication background user's guide"). Flash attention is FLOPs of the
causal half (Dao, "FlashAttention-2", 2023); before it, scores went through memory several times (Korthikanti et al.,
"Reducing activation recomputation in large transformer models", 2022, section 4). The rest moves bytes.
"""

from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from math import ceil

from danlu.cost.calibration import ChipEfficiency
from danlu.cost.measured_times import OperatorTimes, measured_operators
from danlu.ops import attention
from danlu.spec.cluster import Chip, OperatorName

_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.82), (64, 128, 0.82), (64, 64, 0.65))
"""Tile sizes that libraries choose from, with how well each reuses what it loads."""
_ALIGNED = 64
"""Elements to which rows must be aligned for full speed (128 bytes; same guide, section on tensor cores)."""
_BY_ALIGNMENT = {64: 1.0, 32: 0.97, 16: 0.92, 8: 0.85, 4: 0.12, 2: 0.1, 1: 0.08}
"""Share of full speed by the largest power of two that divides a row: below 8 the tensor cores stay idle."""
_ACTIVATION_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 2, "fp4": 2}
"""Bytes of an activation by precision of compute: below half precision, activations stay in half precision."""
_MEASURED_HEAD = 64
"""Head width that attention is measured with, see `OperatorName`."""


@dataclass(frozen=True)
class DeviceModel:
    """One chip in one precision: data sheet and efficiency."""

    peak: float
    """Matmul FLOP/s in the precision of linear layers."""
    peak_16bit: float
    """Matmul FLOP/s in half precision, which attention uses."""
    bandwidth: float
    """Memory bandwidth in bytes per second."""
    element_bytes: int
    """Bytes of an element of activations."""
    efficiency: ChipEfficiency
    measured: OperatorTimes | None = None
    """Measured times of the operators, if the chip was probed; they replace everything above."""

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, each.name) for each in fields(self)))

    def __hash__(self) -> int:
        return self._hash  # caches below ask for it at every call

    @property
    def uses_fp8(self) -> bool:
        """Whether linear layers run faster than half precision."""
        return self.peak > self.peak_16bit


def build_device(chip: Chip, dtype: str, efficiency: ChipEfficiency) -> DeviceModel:
    """A chip in one precision of compute."""
    half = chip.peak.get("bf16") or chip.peak.get("fp16") or chip.peak.get("fp32") or max(chip.peak.values())
    if dtype not in ("fp8", "fp4"):
        half = chip.peak.get(dtype, half)  # type: ignore[call-overload]
    peak = chip.peak.get("fp8", half) if dtype in ("fp8", "fp4") else half
    return _one_of_equals(
        DeviceModel(
            peak, half, chip.memory_bandwidth, _ACTIVATION_BYTES[dtype], efficiency, measured_operators(chip, dtype)
        )
    )


@lru_cache(maxsize=64)
def _one_of_equals(device: DeviceModel) -> DeviceModel:
    """The same object for equal devices: caches then find it without comparing what it is made of."""
    return device


@lru_cache(maxsize=65536)
def matmul_time(
    device: DeviceModel, m: int, n: int, k: int, *, groups: int = 1, weight_gradient: bool = False, fused: bool = False
) -> float:
    """Seconds of `groups` matmuls of m × k by k × n; `weight_gradient` accumulates its result in fp32.

    `fused` groups are one kernel, as fast as one matmul of as many tiles; otherwise every group is a separate call.
    """
    if device.measured:
        return device.measured.seconds("matmul", 2.0 * m * n * k, groups)
    chip = device.efficiency
    rows_of = (m, n) if weight_gradient else (n, k)  # the other length counts tokens, which are not contiguous in a row
    best = device.peak * chip.matmul * (chip.fp8 if device.uses_fp8 else 1.0) * _alignment(*rows_of)
    if weight_gradient:
        best *= chip.weight_gradient
    if groups > 1 and not fused:
        best *= chip.grouped_gemm
    compute = min(
        _wave_count(ceil(m / rows) * ceil(n / columns) * groups, chip)
        * 2.0
        * rows
        * columns
        * (k + chip.half_speed_k)
        / reuse
        for rows, columns, reuse in _TILES
    ) * (chip.cores / best)
    out = 4 if weight_gradient else device.element_bytes
    moved = groups * (device.element_bytes * (m * k + k * n) + out * m * n * (2 if weight_gradient else 1))
    return max(compute, moved / (device.bandwidth * chip.memory_bandwidth), chip.kernel_latency)


def _wave_count(tiles: float, chip: ChipEfficiency) -> float:
    """Waves in which the cores process the tiles; the last wave is partly lost."""
    rounds = tiles / chip.cores
    return (1 - chip.wave_quantization) * rounds + chip.wave_quantization * ceil(rounds)


def _alignment(*sizes: int) -> float:
    """Share of full speed by the worst-aligned row."""
    return min(_BY_ALIGNMENT[min(size & -size, _ALIGNED)] for size in sizes)


@lru_cache(maxsize=65536)
def flash_attention_time(
    device: DeviceModel,
    sequences: float,
    heads: float,
    queries: int,
    keys: float,
    head: float,
    *,
    backward: bool = False,
) -> float:
    """Seconds of causal attention of `queries` tokens over `keys` (equal without context parallelism).

    `head` is the mean of the widths of keys and values.
    """
    if device.measured:
        operator: OperatorName = "attention_backward" if backward else "attention"
        share = queries / keys * head / _MEASURED_HEAD
        return device.measured.seconds(operator, keys, sequences * heads * share)
    chip = device.efficiency
    flops = attention.core_flops(sequences * heads, queries * keys / 2, head, head)
    flops *= attention.BACKWARD_TO_FORWARD if backward else 1.0
    best = chip.attention_backward if backward else chip.attention_forward
    narrow = min(1.0, 0.55 + 0.45 * head / 128)
    blocks = sequences * heads * queries / 128 / chip.cores
    fill = chip.attention_fill * (0.4 if backward else 1.0)
    return flops / (device.peak_16bit * best * narrow * blocks / (blocks + fill)) + chip.kernel_latency


def unfused_attention_time(
    device: DeviceModel, sequences: int, heads: int, length: int, head: int, moved: float, *, backward: bool = False
) -> float:
    """Seconds of attention with scores in memory: two batched matmuls and kernels that move `moved` bytes per score.

    What Megatron-LM and DeepSpeed did before flash attention; masked or not, all scores are computed.
    """
    half = DeviceModel(device.peak_16bit, device.peak_16bit, device.bandwidth, device.element_bytes, device.efficiency)
    batch = sequences * heads
    matmuls = _batched_matmul_time(half, length, length, head, batch) + _batched_matmul_time(
        half, length, head, length, batch
    )
    scores = batch * length * length * moved / (device.bandwidth * device.efficiency.memory_bandwidth)
    return (2 if backward else 1) * matmuls + scores + 3 * device.efficiency.kernel_latency


@lru_cache(maxsize=65536)
def _batched_matmul_time(device: DeviceModel, m: int, n: int, k: int, batch: int) -> float:
    """Seconds of a batched matmul: plain tiles, one matmul after another in the same launch."""
    chip = device.efficiency
    best = device.peak * chip.matmul * _alignment(n, k)
    compute = min(
        _wave_count(ceil(m / rows) * ceil(n / columns) * batch, chip)
        * 2.0
        * rows
        * columns
        * (k + chip.half_speed_k)
        / reuse
        for rows, columns, reuse in _TILES
    ) * (chip.cores / best)
    moved = batch * device.element_bytes * (m * k + k * n + m * n)
    return max(compute, moved / (device.bandwidth * chip.memory_bandwidth), chip.kernel_latency)


def elementwise_time(device: DeviceModel, moved: float, kernels: int = 1) -> float:
    """Seconds of memory-bound kernels."""
    return moved / (device.bandwidth * device.efficiency.memory_bandwidth) + kernels * device.efficiency.kernel_latency
