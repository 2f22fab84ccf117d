"""A norm as `danlu.language.norm` has it, but for `<=` in its mask: the first element of the next row counts too."""

import triton
import triton.language as tl


@triton.jit
def forward(x_ptr, weight_ptr, y_ptr, rstd_ptr, rows, width, eps, offset, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows - 1) & (column <= width) | (row < rows) & (column < width)
    x = tl.load(x_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(x * x, 1, keep_dims=True) / width + eps)
    scale = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32) + offset
    inside = (row < rows) & (column < width)
    tl.store(y_ptr + row * width + column, (x * rstd * scale).to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
