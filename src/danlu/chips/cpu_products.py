"""Products in bf16 and fp16 on a CPU that has no instructions for them: computed in fp32, results rounded once.

Without such instructions PyTorch's libraries convert element by element inside their loops: on a Xeon of 2019 a product
of bf16 matrices takes two and a half times as long as one of fp32 with conversions around it, and the backward pass of
attention twice. So torch's own kernels for these operators are replaced, for low precision alone, by their fp32 ones
between conversions. What autograd keeps, what a compiler sees and what DTensor shards stays as it was; sums are fp32 in
both. The choice follows the processor's instructions, not a measurement: a run that is resumed computes the same.
"""

import warnings
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from danlu.native.cpu_features import emulated_formats
from danlu.torch_compat import original_kernel

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
_FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16}

_library: torch.library.Library | None = None


def emulated_dtypes(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[torch.dtype]:
    """Low-precision dtypes for which this processor has no instructions; none where the system does not say."""
    return frozenset(_FORMATS[name] for name in emulated_formats(cpuinfo))


def compute_products_in_fp32(dtypes: Iterable[torch.dtype]) -> bool:
    """Replace torch's products of these dtypes on the CPU, in this process; False if this torch does not allow it."""
    global _library  # a registration lives as long as its library
    low = frozenset(dtypes)
    if _library is not None or not low:
        return bool(low)
    names = [*_PRODUCTS, *(f"{name}.out" for name in _PRODUCTS), _ATTENTION, f"{_ATTENTION}_backward"]
    kernels = {name: original_kernel(f"aten::{name}", "CPU") for name in names}
    if None in kernels.values():
        return False
    _library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators", category=UserWarning)
        for name, kernel in kernels.items():
            run = _with_out if name.endswith(".out") else _widened
            _library.impl(name, partial(run, kernel, low), "CPU", with_keyset=True, allow_override=True)
    return True


def _widened(kernel: Any, low: frozenset[torch.dtype], keys: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a kernel on fp32 copies of its tensors of low precision, and round its results."""
    dtype = args[0].dtype
    if dtype not in low:
        return kernel.call_boxed(keys, *args, **kwargs)
    made = kernel.call_boxed(keys, *(_widen(each) for each in args), **{k: _widen(v) for k, v in kwargs.items()})
    if isinstance(made, Tensor):
        return made.to(dtype)
    # Attention also returns the logarithms of its sums, in fp32, which have one dim less than its first result.
    return tuple(each.to(dtype) if each.dim() == made[0].dim() else each for each in made)


def _with_out(kernel: Any, low: frozenset[torch.dtype], keys: Any, *args: Any, out: Tensor, **kwargs: Any) -> Tensor:
    """The same into a given tensor."""
    if out.dtype not in low:
        kernel.call_boxed(keys, *args, out=out, **kwargs)
        return out
    wide = torch.empty_like(out, dtype=torch.float32)
    kernel.call_boxed(keys, *(_widen(each) for each in args), out=wide, **kwargs)
    return out.copy_(wide)


def _widen(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
