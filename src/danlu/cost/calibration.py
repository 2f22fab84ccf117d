"""How much of a chip's data sheet training achieves: one entry per chip, in `calibration.toml`.

Written by `benchmarks/fit_cost.py` from the rows of `benchmarks/validation/published` whose set begins with `fit-`. A
chip without an entry uses the default one, and `Calibration.assumptions` says so.
"""

import tomllib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from danlu.spec.cluster import Chip

SAME_ARCHITECTURE = {
    "A800": "A100",
    "H200": "H100",
    "H800": "H100",
    "H20": "H100",
    "GH200": "H100",
    "910C": "Ascend-910B",
}
"""Chips without a run to fit on, and the entry of the chip whose cores they have; their data sheets are their own."""
SAME_KIND = {"rocm": "MI3", "ascend": "Ascend-910B"}
"""The entry of a chip that is only known by the descriptor that drives it."""
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
    fsdp_contention: float
    """The same for sharded parameters and gradients, gathered and reduced layer by layer all through the passes."""
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

    def efficiency_of(self, chip: Chip, native: bool = False) -> ChipEfficiency:
        """The entry of a chip, of its architecture or of its kind; the default one if there is none.

        With `native`, the entry of libraries written for this chip's generation, where there is one.
        """
        entry = self._entry(chip)[0]
        if entry is None:
            return self.default
        return self.chips.get(f"{entry}{VENDOR_SUFFIX}" if native else entry) or self.chips[entry]

    def assumptions(self, chip: Chip, dtype: str) -> tuple[str, ...]:
        """What was assumed for a chip that was neither calibrated nor probed."""
        if dtype in chip.operators:
            return ()
        entry, why = self._entry(chip)
        using = "the default efficiencies, an A100's" if entry is None else f"those of {entry}"
        if chip.operators:
            probed = ", ".join(chip.operators)
            return (f"{chip.name} was probed in {probed}, not in {dtype}: using {using}",)
        if entry is not None and not why:
            return ()
        because = f" ({why})" if why else ""
        return (f"no calibration for {chip.name}: using {using}{because}",)

    def _entry(self, chip: Chip) -> tuple[str | None, str]:
        """The entry, and why another chip's: the longest whose name the chip's contains comes first."""
        name = chip.name.lower()
        for names, why in ((self.chips, ""), (SAME_ARCHITECTURE, "the same architecture")):
            found = [entry for entry in names if entry.lower() in name]
            if found:
                longest = max(found, key=len)
                return SAME_ARCHITECTURE.get(longest, longest), why
        if chip.kind in SAME_KIND:
            return SAME_KIND[chip.kind], f"both are driven by {chip.kind}"
        return None, ""


@cache
def load_calibration(path: Path = CALIBRATION_FILE) -> Calibration:
    """Read the constants."""
    with path.open("rb") as file:
        table = tomllib.load(file)
    default = ChipEfficiency(**table["default"])
    chips = {name: ChipEfficiency(**{**table["default"], **entry}) for name, entry in table["chips"].items()}
    return Calibration(chips=chips, overheads=Overheads(**table["overheads"]), default=default)
