"""How much of a chip's data sheet training really gets: one entry a chip, in `calibration.toml`.

Written by `benchmarks/fit_cost.py` from the rows of `published/` whose set begins with `fit-`, and read by every other
file of this room. A chip that has no entry of its own takes the default one, and `Calibration.known` says so.
"""

import tomllib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from danlu.spec.cluster import Chip

NATIVE = " native"
"""Ends the name of an entry for libraries written for a chip's own generation."""
PATH = Path(__file__).parent / "calibration.toml"


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """What one chip gets out of its data sheet; every field is a fraction of it unless it says otherwise."""

    matmul: float
    """Of the matrix peak, by a product that fills the chip."""
    weight_gradient: float
    """Of `matmul`, by the product that gives the gradients of weights and adds them up in fp32."""
    grouped: float
    """Of `matmul`, by the products of many experts in one call."""
    fp8: float
    """Of the fp8 peak as `matmul` is of the half-precision one; casts are counted apart."""
    wave: float
    """How much of the last, half-filled wave of tiles is lost: 1 all, 0 nothing."""
    depth: float
    """Inner length at which a product reaches half its speed: what a tile costs before and after its main loop."""
    attention_forward: float
    """Of the matrix peak, by flash attention; FLOPs of the causal half."""
    attention_backward: float
    attention_fill: float
    """Waves of blocks at which flash attention reaches half its speed."""
    memory: float
    """Of the memory bandwidth, by element-wise kernels."""
    launch: float
    """Seconds that a kernel takes at least."""
    inner: float
    """Of the bandwidth inside a node, by large collectives."""
    outer: float
    """Of the bandwidth between nodes."""
    cores: int
    """Processors that work on tiles at the same time."""
    measured_on: str = ""
    """The sets of rows that the figures were fitted on."""


@dataclass(frozen=True, kw_only=True)
class Habits:
    """What training programs do on every chip: fitted once over all of them."""

    elementwise: float
    """Bytes moved by norms, activations and residuals, of what unfused kernels in half precision would move."""
    scores: float
    """Bytes moved an attention score by the kernels that came before flash attention, forward."""
    scores_backward: float
    logits: float
    """Bytes moved a logit by the loss, forward and backward."""
    optimizer: float
    """Bytes moved a parameter by the optimiser's step: gradients, clipping, states, both copies of the parameter."""
    dispatch: float
    """Bytes moved a routed token and feature by sorting tokens to experts and back, forward."""
    contention: float
    """How much of hidden traffic still slows the compute that hides it."""
    collective: float
    """Seconds that a collective takes at least."""
    host: float
    """Seconds that the host takes to launch a kernel: what small layers wait for."""
    tensor_hidden: float
    """Of the tensor-parallel traffic, hidden where a program overlaps it."""
    spread: float
    """Standard deviation of the speed of chips of one kind; a step waits for the slowest of all."""
    step: float
    """Seconds of a step outside the model: batch, loss, log."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Everything that was fitted."""

    chips: dict[str, Efficiency]
    habits: Habits
    default: Efficiency = field(repr=False)

    def known(self, chip: str) -> bool:
        """Whether a chip of this name was calibrated; its name need only contain an entry's."""
        return self._entry(chip) is not None

    def of(self, chip: str, native: bool = False) -> Efficiency:
        """The entry whose name is contained in the chip's (the longest if several are), or the default one.

        With `native`, the entry of libraries written for this chip's generation, where there is one.
        """
        entry = self._entry(chip)
        if entry is None:
            return self.default
        return self.chips.get(f"{entry}{NATIVE}" if native else entry) or self.chips[entry]

    def notes(self, chip: Chip, dtype: str) -> tuple[str, ...]:
        """What stands in for figures of a chip that nobody measured."""
        if dtype in chip.operators or (self.known(chip.name) and not chip.operators):
            return ()
        if chip.operators:
            probed = ", ".join(chip.operators)
            return (f"{chip.name} was probed in {probed}, not in {dtype}: the default efficiencies are taken",)
        return (f"no calibration for {chip.name}: the default efficiencies are taken",)

    def _entry(self, chip: str) -> str | None:
        found = [name for name in self.chips if name.lower() in chip.lower()]
        return max(found, key=len) if found else None


@cache
def calibration(path: Path = PATH) -> Calibration:
    """Read the constants of this room."""
    with path.open("rb") as file:
        table = tomllib.load(file)
    default = Efficiency(**table["default"])
    chips = {name: Efficiency(**{**table["default"], **entry}) for name, entry in table["chips"].items()}
    return Calibration(chips=chips, habits=Habits(**table["habits"]), default=default)
