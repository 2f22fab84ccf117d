"""`native/cpu_ops.c` and `native/cpu_grouped_mm.c` as functions of tensors."""

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


@cache
def _grouped_mm_library() -> ctypes.CDLL | None:
    cost = "experts on a CPU are multiplied one after another, or padded, which takes about twice as long"
    return native_or_portable("cpu_grouped_mm", lambda library: library, lambda: None, cost)


def why_no_grouped_mm() -> str | None:
    """Why there is no compiled product of experts, if so."""
    return None if _grouped_mm_library() else "danlu was installed without a C compiler"


def grouped_mm(kind: int, x_ND: Tensor, weight_EDF: Tensor, y_NF: Tensor, ends_E: Tensor) -> None:
    """One of the three products of `cpu_grouped_mm.c`, into the tensor that it is for."""
    library = _grouped_mm_library()
    assert library is not None
    experts, width, hidden = weight_EDF.shape
    threads = threads_for(weight_EDF)
    tensors = [_as_c(each) for each in (x_ND, weight_EDF, y_NF, ends_E)]
    sizes = [ctypes.c_int64(size) for size in (experts, width, hidden)]
    if library.danlu_grouped_mm(kind, *tensors, *sizes, _DTYPES[x_ND.dtype], threads):
        raise MemoryError(f"no memory for blocks of a product of experts on {threads} threads")


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
