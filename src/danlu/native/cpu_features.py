"""What a processor has instructions for, as the system says."""

import platform
import re
from pathlib import Path

_INSTRUCTIONS = {"bf16": {"avx512_bf16", "amx_bf16", "bf16"}, "fp16": {"avx512_fp16", "amx_fp16", "fphp"}}
"""Of products in a format, by the names that Linux gives them: of Intel and AMD, and of ARM."""


def emulated_formats(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Formats of 16 bits for whose products this processor has no instructions; none where the system does not say."""
    if platform.machine() not in ("x86_64", "aarch64") or not cpuinfo.exists():
        return frozenset()
    found = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
    flags = set(found[1].split()) if found else set()
    return frozenset(name for name, wanted in _INSTRUCTIONS.items() if flags and not flags & wanted)
