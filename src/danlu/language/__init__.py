"""The kernel language: declare a kernel once, and compile, check and launch it on any chip that Triton knows."""

from danlu.chips.kernel_targets import INTERPRETER, TARGETS, KernelTarget
from danlu.language.declaration import Kernel, Tile, TileNeeds, tiles_for
from danlu.language.register import register_kernels

__all__ = ["INTERPRETER", "TARGETS", "Kernel", "KernelTarget", "Tile", "TileNeeds", "register_kernels", "tiles_for"]
