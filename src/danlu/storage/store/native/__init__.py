"""Small C files, compiled at first use on the machine they run on.

A wheel would have to target the oldest supported processor; the local compiler knows this one. The library is kept in
`~/.cache/danlu/native`, under a hash of its source, the command and the processor, so that a home folder shared by
different machines holds one for each. Anyone who can write there can run code as this user: folder and file must belong
to this user and be closed to others, else the library is compiled again in a private temporary folder.
"""

import ctypes
import hashlib
import os
import platform
import stat
import subprocess
import tempfile
from pathlib import Path

COMPILE_COMMAND = ("cc", "-O3", "-march=native", "-shared", "-fPIC")
_COMPILE_TIMEOUT = 120.0  # seconds; a second is usual


class NativeUnavailableError(Exception):
    """A C file cannot be used here; the message says why."""


def load_library(name: str, cache: Path | None = None, compiler: tuple[str, ...] = COMPILE_COMMAND) -> ctypes.CDLL:
    """Load the library of `name`.c in this folder, compiled if need be; `NativeUnavailableError` if that fails.

    Functions called through the result release the GIL.
    """
    source = Path(__file__).parent / f"{name}.c"
    key = hashlib.sha256("\0".join([source.read_text("utf-8"), *compiler, _processor_id()]).encode()).hexdigest()[:24]
    folder = cache or _home_cache()
    if folder is not None and _make_private(folder):
        library = folder / f"{name}-{key}.so"
        if not _is_private(library):
            _compile(source, library, compiler)
        return _open_library(library)
    with tempfile.TemporaryDirectory(prefix="danlu-native-") as private:
        library = Path(private) / f"{name}.so"
        _compile(source, library, compiler)
        return _open_library(library)  # stays in memory after its file is removed


def _home_cache() -> Path | None:
    try:
        return Path.home() / ".cache" / "danlu" / "native"
    except RuntimeError:  # a user without a home
        return None


def _processor_id() -> str:
    """What decides the code compiled for a processor: its model and its features."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    relevant = ("model name", "flags", "Features", "CPU part", "isa")
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(relevant)}))


def _make_private(folder: Path) -> bool:
    """Create the folder; whether it belongs to this user and others cannot write to it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return False
    return _is_private(folder) and os.access(folder, os.W_OK)


def _is_private(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return not stat.S_ISLNK(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


def _compile(source: Path, library: Path, compiler: tuple[str, ...]) -> None:
    """Many processes may do this at once: each writes its own file, and the last rename wins, with the same content."""
    descriptor, unfinished = tempfile.mkstemp(suffix=".so", prefix=".", dir=library.parent)
    os.close(descriptor)
    try:
        command = [*compiler, "-o", unfinished, str(source)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT, check=False)
        if done.returncode:
            raise NativeUnavailableError(f"`{' '.join(compiler)}` failed: {done.stderr.strip()[-500:]}")
        Path(unfinished).chmod(0o700)
        Path(unfinished).replace(library)
    except FileNotFoundError:
        raise NativeUnavailableError(f"there is no C compiler `{compiler[0]}`") from None
    except subprocess.TimeoutExpired:
        raise NativeUnavailableError(f"`{compiler[0]}` did not finish within {_COMPILE_TIMEOUT:.0f} s") from None
    finally:
        Path(unfinished).unlink(missing_ok=True)


def _open_library(library: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise NativeUnavailableError(f"{library.name} cannot be loaded: {error}") from error
