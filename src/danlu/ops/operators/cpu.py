"""`native/cpu_ops.c` as functions of tensors."""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from danlu.native import native_or_portable
from danlu.ops.operators.operator import Implementation

_SERIAL = 16384
"""Elements below which starting threads takes longer than they save."""
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}


@cache
def cpu_library() -> ctypes.CDLL | None:
    """The compiled operators; None, with a warning, where there are none."""
    cost = "norms, activations, rotations and losses run as several operators of torch, two to six times slower"
    return native_or_portable("cpu_ops", lambda library: library, lambda: None, cost)


def native(forward: Callable[..., Any], backward: Callable[..., Any]) -> Implementation:
    """An implementation by functions of the library."""
    return Implementation(
        "native",
        forward,
        backward,
        "in C, one pass over memory, computing in fp32",
        devices=("cpu",),
        dtypes=tuple(_DTYPES),
        why_not=lambda: None if cpu_library() else "danlu was installed without a C compiler",
    )


def call(name: str, x: Tensor, *arguments: Tensor | int | float) -> None:
    """Call a function of the library; dtype and threads, its last two arguments, are those for `x`."""
    library = cpu_library()
    assert library is not None
    getattr(library, f"danlu_{name}")(*map(_as_c, arguments), _DTYPES[x.dtype], threads_for(x))


def threads_for(x: Tensor) -> int:
    """How many threads work on a tensor."""
    return 1 if x.numel() < _SERIAL else torch.get_num_threads()


def _as_c(value: Tensor | int | float) -> Any:
    if isinstance(value, Tensor):
        return ctypes.c_void_p(value.data_ptr())
    return ctypes.c_float(value) if isinstance(value, float) else ctypes.c_int64(value)
