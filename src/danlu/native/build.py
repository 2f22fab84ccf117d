"""Compile the C files of this folder, each to a library beside it that `danlu.native` loads.

    python src/danlu/native/build.py

pip runs this when it installs Danlu or builds its wheel. In a checkout on the path, run it after a change of a C file.
Only Python's own library is imported: pip's build environment has nothing else.
"""

import hashlib
import platform
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
COMPILE_COMMAND = ("cc", "-O3", "-shared", "-fPIC")
# For every processor of an architecture: what only some of them have is asked for when it runs.
_VECTORS = ["-fopenmp", "-fno-math-errno", "-fno-trapping-math"]
_FLAGS = {
    ("copy_hash", "x86_64"): ["-msse4.2"],
    ("copy_hash", "aarch64"): ["-march=armv8-a+crc"],
    ("cpu_ops", "x86_64"): [*_VECTORS, "-mprefer-vector-width=512"],
    ("cpu_ops", "aarch64"): _VECTORS,
    ("cpu_grouped_mm", "x86_64"): [*_VECTORS, "-mprefer-vector-width=512"],
    ("cpu_grouped_mm", "aarch64"): _VECTORS,
}


def library_path(name: str) -> Path:
    """The library of `name`.c as it is now: one that was compiled from another text has another name."""
    texts = (FOLDER / f"{name}.c", *sorted(FOLDER.glob("*.h")))
    digest = hashlib.sha256(b"".join(text.read_bytes() for text in texts))
    return FOLDER / f"{name}-{digest.hexdigest()[:12]}.so"


def build(compiler: tuple[str, ...] = COMPILE_COMMAND) -> dict[str, str]:
    """Compile every C file, and remove libraries of earlier ones; returns why a file could not be compiled."""
    failures: dict[str, str] = {}
    for name in sorted(source.stem for source in FOLDER.glob("*.c")):
        for old in FOLDER.glob(f"{name}-*.so"):
            old.unlink()
        unfinished = library_path(name).with_suffix(".tmp")
        flags = _FLAGS.get((name, platform.machine()), [])
        try:
            subprocess.run(
                [*compiler, *flags, "-o", unfinished, FOLDER / f"{name}.c", "-lm"],
                check=True,
                capture_output=True,
                text=True,
            )
            unfinished.replace(library_path(name))
        except FileNotFoundError:
            failures[name] = f"there is no C compiler `{compiler[0]}`"
        except subprocess.CalledProcessError as error:
            failures[name] = f"`{' '.join(compiler)}` failed: {error.stderr.strip()[-500:]}"
        finally:
            unfinished.unlink(missing_ok=True)
    return failures


if __name__ == "__main__":
    sys.exit("\n".join(f"{name}.c: {reason}" for name, reason in build().items()) or None)
