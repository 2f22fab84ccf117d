"""Compile a kernel for a chip that is not here, and read what it uses: registers, spills, shared memory.

That a kernel compiles within its budget says that it fits the chip, not that it is right or fast there.
"""

import re
import subprocess
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from danlu.chips.kernel_targets import TARGETS, KernelTarget
from danlu.language.catalog import KERNELS
from danlu.language.declaration import OPTIONS, TYPES, Kernel, Tile, tiles_for


class ReadError(RuntimeError):
    """What a compiler wrote lacks a number that is expected there."""


@dataclass(frozen=True)
class ResourceUse:
    """What a compiled kernel takes of a chip."""

    registers: int
    """Of one thread."""
    spill_bytes: int
    """Of one thread, that did not fit into registers and go through memory."""
    shared_bytes: int
    """Of a block of threads."""
    matrix_instructions: int
    """Instructions of the matrix unit in the code, each counted once however often it runs."""
    seconds: float
    """To compile it."""


@dataclass(frozen=True)
class Budget:
    """What a kernel may take of a target."""

    registers: int
    shared_bytes: int
    spill_bytes: int = 0
    matrix_instructions: int = 0
    """At least."""

    def breaches(self, use: ResourceUse) -> list[str]:
        """What is beyond it, in words."""
        found = [
            f"{taken} {what}, of {most}"
            for what, taken, most in (
                ("registers a thread", use.registers, self.registers),
                ("bytes of shared memory", use.shared_bytes, self.shared_bytes),
                ("bytes of spills a thread", use.spill_bytes, self.spill_bytes),
            )
            if taken > most
        ]
        if use.matrix_instructions < self.matrix_instructions:
            found.append(f"{use.matrix_instructions} matrix instructions, of at least {self.matrix_instructions}")
        return found


def target_budget(kernel: Kernel, target: KernelTarget, spill_bytes: int = 0) -> Budget:
    """All of what a target has, no spills, and its matrix unit if the kernel is for that."""
    return Budget(target.registers, target.shared_bytes, spill_bytes, int(kernel.uses_matrix_unit))


ALLOWED_SPILLS: dict[tuple[str, str], int] = {}
"""Bytes of spills a thread that are known and accepted, by names of kernel and target."""

BUDGETS: dict[tuple[str, str], Budget] = {
    (kernel.name, target.name): target_budget(kernel, target, ALLOWED_SPILLS.get((kernel.name, target.name), 0))
    for kernel in KERNELS.values()
    for target in TARGETS.values()
}
"""Of every kernel on every target, at its example's shapes in bf16."""


def compile_kernel(
    kernel: Kernel, target: KernelTarget, *, dtype: str = "bf16", tile: Tile | None = None
) -> ResourceUse:
    """Compile a kernel at its example's shapes, with the target's tile or the one given, and read what it uses."""
    tile = tile or tiles_for(kernel, target, kernel.example, TYPES[dtype])
    constants = kernel.constants(kernel.example, tile, target)
    types = {name: f"*{dtype}" if kind == "*x" else kind for name, kind in kernel.arguments.items()}
    source = ASTSource(
        kernel.function,
        {name: types.get(name, "constexpr") for name in kernel.function.arg_names},
        constexprs=dict(constants),
        attrs=_alignment(kernel, types),
    )
    options = {"num_warps": tile.warps(target), "num_stages": tile.stages, **OPTIONS}
    began = time.perf_counter()
    compiled = triton.compile(source, target=GPUTarget(target.backend, target.arch, target.lanes), options=options)
    seconds = time.perf_counter() - began
    registers, spill_bytes, assembly = _read(compiled.asm, target)
    count = len(re.findall(rf"(?m)^[^/;]*\b{re.escape(target.matrix_unit)}", assembly)) if target.matrix_unit else 0
    return ResourceUse(registers, spill_bytes, int(compiled.metadata.shared), count, seconds)


def _alignment(kernel: Kernel, types: dict[str, str]) -> dict[tuple[int], list[list[Any]]]:
    """That pointers and sizes are multiples of 16, as torch's allocations and the shapes of real models are."""
    names = kernel.function.arg_names
    return {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, kind in types.items()
        if kind.startswith(("*", "i")) and name not in kernel.unaligned
    }


def _read(asm: Any, target: KernelTarget) -> tuple[int, int, str]:
    """Registers and bytes of spills of a thread, and the assembly."""
    if "ptx" in asm:
        return _read_ptx(asm["ptx"], target)
    text: str = asm["amdgcn"]
    spilled = 4 * _number(r"\.vgpr_spill_count: *(\d+)", text)
    stack = _number(r"\.private_segment_fixed_size: *(\d+)", text)
    return _number(r"\.vgpr_count: *(\d+)", text), max(spilled, stack), text


def _read_ptx(ptx: str, target: KernelTarget) -> tuple[int, int, str]:
    """What the vendor's assembler says of registers; Triton asks it too, and does not keep the answer."""
    tools = triton.knobs.nvidia
    newest = getattr(tools, "ptxas_blackwell", tools.ptxas)  # one assembler for all before Triton 3.6
    assembler = (newest if isinstance(target.arch, int) and target.arch >= 90 else tools.ptxas).path
    found = re.search(r"\.target (\w+)", ptx)
    if not found:
        raise ReadError("the assembly names no target")
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [assembler, "-v", "--gpu-name", found[1], file.name, "-o", "/dev/null"]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    return _number(r"Used (\d+) registers", said), _number(r"(\d+) bytes spill stores", said), ptx


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if not found:
        raise ReadError(f"`{pattern}` is not in what the compiler wrote")
    return int(found[1])
