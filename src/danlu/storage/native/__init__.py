"""Small C files that are compiled on the machine they run on, when they are first needed.

A wheel would have to be built for the oldest processor anybody has; the compiler here knows this one. The library is
kept in `~/.cache/danlu/native`, under a name made of its source, the command and the processor, so that a home folder
shared by different machines holds one for each. Whoever can write there can run code as this user: the folder and the
file must be this user's own and closed to others, else the library is made anew in a private folder that goes with
the process.
"""

import ctypes
import hashlib
import os
import platform
import stat
import subprocess
import tempfile
from pathlib import Path

COMPILER = ("cc", "-O3", "-march=native", "-shared", "-fPIC")
_PATIENCE = 120.0  # seconds; a second is usual


class NoNativeError(Exception):
    """A C file cannot be used here; the text says why."""


def load(name: str, cache: Path | None = None, compiler: tuple[str, ...] = COMPILER) -> ctypes.CDLL:
    """Load the library made of `name`.c in this folder, compiling it if need be; `NoNativeError` says why it cannot be.

    Functions called through the result release the interpreter's lock.
    """
    source = Path(__file__).parent / f"{name}.c"
    key = hashlib.sha256("\0".join([source.read_text("utf-8"), *compiler, _processor()]).encode()).hexdigest()[:24]
    folder = cache or _home_cache()
    if folder is not None and _make_private(folder):
        library = folder / f"{name}-{key}.so"
        if not _is_private(library):
            _compile(source, library, compiler)
        return _opened(library)
    with tempfile.TemporaryDirectory(prefix="danlu-native-") as private:
        library = Path(private) / f"{name}.so"
        _compile(source, library, compiler)
        return _opened(library)  # stays in memory after its file has gone


def _home_cache() -> Path | None:
    try:
        return Path.home() / ".cache" / "danlu" / "native"
    except RuntimeError:  # a user without a home
        return None


def _processor() -> str:
    """What of a processor decides the code made for it: its kind and what it can do."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    telling = ("model name", "flags", "Features", "CPU part", "isa")
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(telling)}))


def _make_private(folder: Path) -> bool:
    """Whether the folder is there, is this user's, and is closed to others' writing."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return False
    return _is_private(folder) and os.access(folder, os.W_OK)


def _is_private(path: Path) -> bool:
    try:
        what = path.lstat()
    except OSError:
        return False
    return not stat.S_ISLNK(what.st_mode) and what.st_uid == os.getuid() and not what.st_mode & 0o022


def _compile(source: Path, library: Path, compiler: tuple[str, ...]) -> None:
    """Many processes may do this at once: each writes its own file, and the last rename wins with the same content."""
    descriptor, unfinished = tempfile.mkstemp(suffix=".so", prefix=".", dir=library.parent)
    os.close(descriptor)
    try:
        command = [*compiler, "-o", unfinished, str(source)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=False)
        if done.returncode:
            raise NoNativeError(f"`{' '.join(compiler)}` failed: {done.stderr.strip()[-500:]}")
        Path(unfinished).chmod(0o700)
        Path(unfinished).replace(library)
    except FileNotFoundError:
        raise NoNativeError(f"there is no C compiler `{compiler[0]}`") from None
    except subprocess.TimeoutExpired:
        raise NoNativeError(f"`{compiler[0]}` did not finish within {_PATIENCE:.0f} s") from None
    finally:
        Path(unfinished).unlink(missing_ok=True)


def _opened(library: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise NoNativeError(f"{library.name} cannot be loaded: {error}") from error
