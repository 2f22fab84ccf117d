"""What a kernel declares: its arguments, its tiles best first, and what a tile needs of the chip.

A declaration names no chip. `tiles_for` compares its needs with the traits of a target, so that one source has large
tiles where there is much shared memory and small ones where there is little. No Triton is needed to read one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from danlu.chips.kernel_targets import KernelTarget

Shapes = Mapping[str, int]
"""Sizes that a kernel's tiles depend on, by name: `{"rows": 4096, "width": 2048}`."""

TYPES = {"bf16": 2, "fp16": 2, "fp32": 4, "u8": 1, "i32": 4, "i64": 8}
"""Types of arguments, with their bytes."""

OPTIONS = {"enable_fp_fusion": True}
"""Of every compilation: a product and a sum may round once. Said, because Triton's own default changes in 3.10."""

_MOST_THREADS = 1024
_REGISTERS_FOR_VALUES = 0.75
"""Share of a thread's registers for the values of a tile; the rest is for addresses, masks and what is between."""


@dataclass(frozen=True)
class Tile:
    """One choice of a kernel: sizes of its blocks, threads that work on one, and loads that are under way at once."""

    sizes: Mapping[str, int] = field(default_factory=dict)
    """Constants of the kernel, by the names of its parameters."""
    threads: int = 128
    stages: int = 1

    def warps(self, target: KernelTarget) -> int:
        """The threads as the target counts them; the interpreter has none."""
        return max(1, self.threads // target.lanes)


@dataclass(frozen=True)
class TileNeeds:
    """What one block of threads takes for a tile, as an estimate before it is compiled; over all threads."""

    values: int
    """Of 32 bits, on which threads compute."""
    sums: int = 0
    """Of 32 bits, to which a matrix unit adds."""
    operands: int = 0
    """Of 32 bits, two of bf16 in one: factors of matrix products."""
    shared_bytes: int = 0

    def registers(self, target: KernelTarget) -> int:
        """Values, and what else a target has no other place for."""
        sums = 0 if target.accumulators else self.sums
        return self.values + sums + (self.operands if target.operands_in_registers else 0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Kernel:
    """A kernel and everything needed to launch it, compile it for any target, and judge what came out."""

    name: str
    function: Any
    """Decorated with `triton.jit`."""
    arguments: Mapping[str, str]
    """Type of every parameter that is no constant. `*x` is a pointer to the dtype of the data, `*fp32` to fp32."""
    grid: Callable[[Shapes, Mapping[str, int]], tuple[int, ...]]
    """Programs along each axis, by shapes and constants."""
    tiles: tuple[Tile, ...]
    """Choices, best first: of these the first that a target has room for is taken."""
    needs: Callable[[Shapes, Mapping[str, int], Tile, int], TileNeeds]
    """By shapes, constants, tile, and bytes of an element of the data."""
    example: Shapes
    """Shapes of a real model, at which it is compiled and its resources are bounded."""
    constants: Callable[[Shapes, Tile, KernelTarget], Mapping[str, int]] = lambda shapes, tile, target: tile.sizes
    """All parameters that are constants, if there are more than the sizes of the tile."""
    uses_matrix_unit: bool = False
    unaligned: frozenset[str] = frozenset()
    """Integers that are no multiple of 16 in real models."""

    def why_not(self, target: KernelTarget, shapes: Shapes, tile: Tile, element_bytes: int = 2) -> str:
        """What a target lacks for a tile; empty if it fits."""
        needs = self.needs(shapes, self.constants(shapes, tile, target), tile, element_bytes)
        room = int((target.registers - target.accumulators) * _REGISTERS_FOR_VALUES)
        taken = ceil(needs.registers(target) / tile.threads)
        if tile.threads > _MOST_THREADS or tile.threads % target.lanes:
            return f"{tile.threads} threads are no multiple of {target.lanes} up to {_MOST_THREADS}"
        if taken > room:
            return f"{taken} registers a thread, of {room}"
        if target.accumulators and needs.sums > tile.threads * target.accumulators:
            return f"{needs.sums // tile.threads} sums a thread, of {target.accumulators}"
        if needs.shared_bytes > target.shared_bytes:
            return f"{needs.shared_bytes} bytes of shared memory, of {target.shared_bytes}"
        return ""


def tiles_for(kernel: Kernel, target: KernelTarget, shapes: Shapes, element_bytes: int = 2) -> Tile:
    """The best tile of a kernel that a target has room for."""
    reasons = []
    for tile in kernel.tiles:
        if not (reason := kernel.why_not(target, shapes, tile, element_bytes)):
            return tile
        reasons.append(f"{dict(tile.sizes)}: {reason}")
    raise ValueError(f"no tile of {kernel.name} fits {target.name} for {dict(shapes)}: " + "; ".join(reasons))


def power_above(size: int) -> int:
    """The power of two that is not below a size: blocks are powers of two."""
    return 1 << max(0, size - 1).bit_length()
