"""How much of a chip's data sheet training achieves: one entry per chip, in `calibration.toml`.

Written by `benchmarks/fit_cost.py` from the rows of `benchmarks/validation/published` whose set begins with `fit-`. A
chip without an entry uses the default one, and `Calibration.assumptions` says so.
"""

import tomllib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from danlu.spec.cluster import Chip

VENDOR_SUFFIX = " native"
"""Suffix of an entry for libraries written for a chip's own generation."""
CALIBRATION_FILE = Path(__file__).parent / "calibration.toml"


@dataclass(frozen=True, kw_only=True)
class ChipEfficiency:
    """What one chip achieves; every field is a fraction of its data sheet unless stated otherwise."""

    matmul: float
    """Of the matmul peak, by a matmul that fills the chip."""
    weight_gradient: float
    """Of `matmul`, by the weight-gradient matmul that accumulates in fp32."""
    grouped_gemm: float
    """Of `matmul`, by a grouped GEMM over many experts."""
    fp8: float
    """Of the fp8 peak, as `matmul` is of the half-precision one; casts are counted separately."""
    wave_quantization: float
    """How much of the last, partly filled wave of tiles is lost: 1 all, 0 nothing."""
    half_speed_k: float
    """Inner length at which a matmul reaches half its speed: prologue and epilogue of a tile."""
    attention_forward: float
    """Of the matmul peak, by flash attention; FLOPs of the causal half."""
    attention_backward: float
    attention_fill: float
    """Waves of blocks at which flash attention reaches half its speed."""
    memory_bandwidth: float
    """Of the memory bandwidth, by element-wise kernels."""
    kernel_latency: float
    """Least seconds of a kernel."""
    intra_node: float
    """Of the bandwidth inside a node, by large collectives."""
    inter_node: float
    """Of the bandwidth between nodes."""
    cores: int
    """Streaming multiprocessors (or their like) that work on tiles at the same time."""
    measured_on: str = ""
    """The sets of rows that these values were fitted on."""


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """Software overheads common to all chips: fitted once over all of them."""

    elementwise_traffic: float
    """Bytes moved by norms, activations and residuals, of what unfused kernels in half precision would move."""
    score_bytes_moved: float
    """Bytes moved per attention score by kernels before flash attention, forward."""
    score_bytes_moved_backward: float
    logit_bytes_moved: float
    """Bytes moved per logit by the loss, forward and backward."""
    optimizer_bytes_moved: float
    """Bytes moved per parameter by the optimizer step: gradients, clipping, states, both copies of the parameter."""
    dispatch_bytes_moved: float
    """Bytes moved per routed token and feature by permuting tokens to experts and back, forward."""
    contention: float
    """Share of overlapped traffic that still slows the compute."""
    collective_latency: float
    """Least seconds of a collective."""
    launch_overhead: float
    """Seconds the host takes to launch a kernel: what small layers wait for."""
    tp_overlap: float
    """Share of tensor-parallel traffic that is hidden if the software overlaps it."""
    spread: float
    """Standard deviation of the speed of chips of one kind; a step waits for the slowest."""
    step_overhead: float
    """Seconds of a step outside the model: batch, loss, logging."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """All fitted constants."""

    chips: dict[str, ChipEfficiency]
    overheads: Overheads
    default: ChipEfficiency = field(repr=False)

    def has_chip(self, chip: str) -> bool:
        """Whether a chip of this name was calibrated; its name need only contain an entry's."""
        return self._entry(chip) is not None

    def efficiency_of(self, chip: str, native: bool = False) -> ChipEfficiency:
        """The entry whose name is contained in the chip's (the longest if several are), or the default one.

        With `native`, the entry of libraries written for this chip's generation, where there is one.
        """
        entry = self._entry(chip)
        if entry is None:
            return self.default
        return self.chips.get(f"{entry}{VENDOR_SUFFIX}" if native else entry) or self.chips[entry]

    def assumptions(self, chip: Chip, dtype: str) -> tuple[str, ...]:
        """What was assumed for a chip that was neither calibrated nor probed."""
        if dtype in chip.operators or (self.has_chip(chip.name) and not chip.operators):
            return ()
        if chip.operators:
            probed = ", ".join(chip.operators)
            return (f"{chip.name} was probed in {probed}, not in {dtype}: using default efficiencies",)
        return (f"no calibration for {chip.name}: using default efficiencies",)

    def _entry(self, chip: str) -> str | None:
        found = [name for name in self.chips if name.lower() in chip.lower()]
        return max(found, key=len) if found else None


@cache
def load_calibration(path: Path = CALIBRATION_FILE) -> Calibration:
    """Read the constants."""
    with path.open("rb") as file:
        table = tomllib.load(file)
    default = ChipEfficiency(**table["default"])
    chips = {name: ChipEfficiency(**{**table["default"], **entry}) for name, entry in table["chips"].items()}
    return Calibration(chips=chips, overheads=Overheads(**table["overheads"]), default=default)
