"""Small C files, compiled when the package is installed (`build.py`); without them portable code, with a warning."""

import ctypes
import warnings
from collections.abc import Callable
from typing import TypeVar

from danlu.native import build

Native = TypeVar("Native")
Portable = TypeVar("Portable")


class NativeUnavailableError(Exception):
    """A C file cannot be used here; the message says why."""


def load_library(name: str) -> ctypes.CDLL:
    """The library of `name`.c; calls through it release the GIL. `NativeUnavailableError` if there is none."""
    path = build.library_path(name)
    if not path.exists():
        raise NativeUnavailableError(
            f"{name}.c was not compiled when danlu was installed; with a C compiler (Debian: gcc), install it again "
            f"or run `python {build.__file__}`"
        )
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailableError(f"{path.name} cannot be loaded: {error}") from error


def native_or_portable(
    name: str, native: Callable[[ctypes.CDLL], Native], portable: Callable[[], Portable], cost: str
) -> Native | Portable:
    """What `native` makes of the library of `name`.c; without one `portable()`, with a warning that says its cost."""
    try:
        return native(load_library(name))
    except NativeUnavailableError as reason:
        warnings.warn(f"{cost}: {reason}", RuntimeWarning, stacklevel=2)
        return portable()
