"""Architectures that kernels are compiled for: what a block of threads may use on each.

A kernel states what a tile needs (`danlu.language`), and gets the largest that fits. No chip is needed to read this.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class KernelTarget:
    """One architecture, with the limits that a vendor documents for a block of threads."""

    name: str
    """The vendor's own: `sm_90`, `gfx942`."""
    backend: str
    """Triton's name of its compiler."""
    arch: int | str
    """Triton's name of the architecture."""
    lanes: int
    """Threads that run together: a warp or a wavefront."""
    shared_bytes: int
    """Memory that the threads of a block share, at most."""
    registers: int
    """Of 32 bits, of one thread, at most."""
    accumulators: int = 0
    """Of these, how many hold sums of the matrix unit and nothing else."""
    operands_in_registers: bool = False
    """Its matrix unit reads factors from registers; else from shared memory."""
    compute_units: int
    """Blocks that run at the same time, at least: multiprocessors of the largest chip of this architecture."""
    matrix_unit: str = ""
    """What its matrix instructions begin with in assembly; empty: it has none."""
    formats: frozenset[str] = frozenset()
    """Formats below 16 bits that it converts to by an instruction."""
    torch_grouped_mm: str = ""
    """The first torch whose own product of experts is one kernel on it. Empty: on all it is a loop, for which the host
    reads the loads of experts from the device (pytorch/pytorch#186620 of NVIDIA's older, #170159 of AMD's)."""


_NVIDIA: dict[str, Any] = {"backend": "cuda", "lanes": 32, "registers": 255}
_AMD: dict[str, Any] = {
    "backend": "hip",
    "lanes": 64,
    "registers": 512,
    "accumulators": 256,
    "operands_in_registers": True,
}

TARGETS: dict[str, KernelTarget] = {
    target.name: target
    for target in (
        KernelTarget(
            name="sm_80",
            arch=80,
            shared_bytes=163 << 10,
            compute_units=108,
            matrix_unit="mma.sync",
            operands_in_registers=True,
            **_NVIDIA,
        ),
        KernelTarget(
            name="sm_90",
            arch=90,
            shared_bytes=227 << 10,
            compute_units=132,
            matrix_unit="wgmma.mma_async",
            formats=frozenset({"e4m3"}),
            torch_grouped_mm="2.10",
            **_NVIDIA,
        ),
        KernelTarget(
            name="sm_100",
            arch=100,
            shared_bytes=227 << 10,
            compute_units=148,
            matrix_unit="tcgen05.mma",
            formats=frozenset({"e4m3"}),
            torch_grouped_mm="2.13",
            **_NVIDIA,
        ),
        # The e4m3 of gfx942 is another one (FNUZ, up to 240): it converts to the common one by arithmetic.
        KernelTarget(
            name="gfx942", arch="gfx942", shared_bytes=64 << 10, compute_units=304, matrix_unit="v_mfma", **_AMD
        ),
        KernelTarget(
            name="gfx950",
            arch="gfx950",
            shared_bytes=160 << 10,
            compute_units=256,
            matrix_unit="v_mfma",
            formats=frozenset({"e4m3"}),
            **_AMD,
        ),
    )
}
"""By name. NVIDIA's programming guide, table of compute capabilities; AMD's "GPU specifications" of ROCm (units, lanes,
shared memory) and its ISA guides of CDNA 3 and 4 (registers)."""

INTERPRETER = KernelTarget(
    name="interpreter", backend="", arch="", lanes=1, shared_bytes=48 << 10, registers=128, compute_units=3
)
"""Triton's interpreter, which computes on the host. Its limits are low, so that small inputs have several tiles."""


def target_of(backend: str, arch: int | str) -> KernelTarget:
    """The target of a device that Triton reports, or the nearest older one of its vendor.

    A chip of the same family that is not listed (sm_89, sm_103, gfx90a) has its limits asked of the nearest older.
    """
    same = [target for target in TARGETS.values() if target.backend == backend]
    if not same:
        raise ValueError(f"kernels are compiled for {', '.join(TARGETS)}, but this device is {backend} {arch}")
    older = [target for target in same if _generation(target.arch) <= _generation(arch)]
    if not older:
        raise ValueError(f"kernels need {same[0].name} or newer, but this device is {arch}")
    return max(older, key=lambda target: _generation(target.arch))


def _generation(arch: int | str) -> int:
    """A number that grows with the generation: 90 of 90, 0x942 of "gfx942:sramecc+"."""
    return arch if isinstance(arch, int) else int(arch.partition(":")[0].removeprefix("gfx"), 16)
