"""The product of two tiles, summed in fp32: on the matrix unit, and in the interpreter with the same numbers."""

# Triton reads the annotations of a kernel, so its parameters have none but `constexpr`.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

_INTERPRETED: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def dot(a, b, total):
    """`total` plus the product of `a` and `b`; fp32 factors are not rounded to fewer bits."""
    if _INTERPRETED:  # it multiplies the bits of bf16 as integers; in fp32 their products are the same, and exact
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")
