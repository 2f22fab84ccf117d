"""Launch a declared kernel on tensors: the target of their device, the tile for it, the grid."""

from functools import cache, lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from danlu.chips.kernel_targets import INTERPRETER, KernelTarget, target_of
from danlu.language.declaration import OPTIONS, Kernel, Shapes, Tile, tiles_for


def is_interpreted() -> bool:
    """Whether Triton runs kernels on the host, as it does with TRITON_INTERPRET=1 in the environment."""
    return bool(triton.knobs.runtime.interpret)


@cache
def device_target(device_type: str, index: int) -> KernelTarget:
    """The target that kernels on a device are compiled for."""
    if is_interpreted():
        return INTERPRETER
    with torch.get_device_module(device_type).device(index):
        reported = triton.runtime.driver.active.get_current_target()
    return target_of(reported.backend, reported.arch)


def current_target(device_type: str) -> KernelTarget:
    """That of the device of this process."""
    return device_target(device_type, 0 if is_interpreted() else torch.accelerator.current_device_index())


def grid_of(kernel: Kernel, shapes: Shapes, x: Tensor) -> tuple[int, ...]:
    """How many programs a launch has: as many partial results as a kernel that sums needs memory for."""
    target = device_target(x.device.type, x.device.index or 0)
    return kernel.grid(shapes, _choice(kernel, target, tuple(shapes.items()), x.element_size())[1])


def launch(kernel: Kernel, shapes: Shapes, x: Tensor, *arguments: Any) -> None:
    """Run a kernel where `x` is, with the tile for its dtype and these shapes; `arguments` are all but constants."""
    target = device_target(x.device.type, x.device.index or 0)
    tile, constants = _choice(kernel, target, tuple(shapes.items()), x.element_size())
    grid = kernel.grid(shapes, constants)
    if 0 in grid:
        return
    if target is INTERPRETER:
        kernel.function[grid](*arguments, **constants)
        return
    with torch.accelerator.device_index(x.device.index):  # Triton launches on the current device, wherever tensors are
        threads = {"num_warps": tile.warps(target), "num_stages": tile.stages}
        kernel.function[grid](*arguments, **constants, **threads, **OPTIONS)


@lru_cache(maxsize=4096)  # a choice takes longer than a launch
def _choice(
    kernel: Kernel, target: KernelTarget, sizes: tuple[tuple[str, int], ...], element_bytes: int
) -> tuple[Tile, dict[str, int]]:
    shapes = dict(sizes)
    tile = tiles_for(kernel, target, shapes, element_bytes)
    return tile, dict(kernel.constants(shapes, tile, target))
