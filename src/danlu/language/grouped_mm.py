"""Products of tokens that are sorted by expert with every expert's own matrix.

Shapes: T tokens, E experts, K features in, N features out. `ends_E`, int32, is where the tokens of every expert end, as
`offs` of `torch.nn.functional.grouped_mm`. They stay on the device: no program asks the host how many there are.
"""

# Triton reads the annotations of a kernel, so its parameters have none but `constexpr`.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from collections.abc import Mapping

import triton
import triton.language as tl
from torch import Tensor

from danlu.chips.kernel_targets import KernelTarget
from danlu.language.declaration import Kernel, Shapes, Tile, TileNeeds, power_above
from danlu.language.dot import dot
from danlu.language.launch import launch


@triton.jit
def _place(ends_ptr, number, experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Expert, first and last token of tile `number`, where every expert's tokens begin a new tile.

    The expert is how many have all their tiles before this one; one sum over the experts, in registers.
    """
    expert = tl.arange(0, EXPERTS)
    start = tl.load(ends_ptr + expert - 1, mask=(expert > 0) & (expert < experts), other=0)
    end = tl.load(ends_ptr + expert, mask=expert < experts, other=0)
    tiles = (end - start + ROWS - 1) // ROWS
    through = tl.cumsum(tiles, 0)
    chosen = tl.sum((through <= number).to(tl.int32), 0)
    before = tl.sum(tl.where(expert < chosen, tiles, 0), 0)
    first = tl.sum(tl.where(expert == chosen, start, 0), 0) + (number - before) * ROWS
    last = tl.sum(tl.where(expert == chosen, end, 0), 0)
    return chosen, first, last


@triton.jit
def _forward(
    x_ptr, weight_ptr, y_ptr, ends_ptr, experts, width, columns,
    TRANSPOSED: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """One tile of `y`: tokens of one expert times its matrix, (width, columns), or (columns, width) if transposed."""
    chosen, first, last = _place(ends_ptr, tl.program_id(1), experts, EXPERTS, ROWS)
    if first < last:  # tiles are counted as if every expert had a partial one: some are beyond the end
        row = tl.arange(0, ROWS)[:, None]  # places in a tile have 32 bits, where tiles begin 64
        left = last - first
        x_ptr += first.to(tl.int64) * width
        y_ptr += first.to(tl.int64) * columns
        column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
        weight_ptr += chosen.to(tl.int64) * width * columns
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, width, DEPTH):
            across = start + tl.arange(0, DEPTH)[None, :]
            down = start + tl.arange(0, DEPTH)[:, None]
            x = tl.load(x_ptr + row * width + across, mask=(row < left) & (across < width), other=0.0)
            place = column * width + down if TRANSPOSED else down * columns + column
            weight = tl.load(weight_ptr + place, mask=(down < width) & (column < columns), other=0.0)
            total = dot(x, weight, total)
        inside = (row < left) & (column < columns)
        tl.store(y_ptr + row * columns + column, total.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _weight_gradient(
    x_ptr, gradient_ptr, weight_gradient_ptr, ends_ptr, width, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """One tile of one expert's matrix: the sum over its tokens, in their order; 0 for an expert without any."""
    expert = tl.program_id(2)
    first, last = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0), tl.load(ends_ptr + expert)
    feature = (tl.program_id(1) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    across, down = tl.arange(0, DEPTH)[None, :], tl.arange(0, DEPTH)[:, None]
    x_ptr += first.to(tl.int64) * width
    gradient_ptr += first.to(tl.int64) * columns
    for left in range(last - first, 0, -DEPTH):
        x = tl.load(x_ptr + across * width + feature, mask=(across < left) & (feature < width), other=0.0)
        gradient = tl.load(gradient_ptr + down * columns + column, mask=(down < left) & (column < columns), other=0.0)
        x_ptr += DEPTH * width
        gradient_ptr += DEPTH * columns
        total = dot(x, gradient, total)
    weight_gradient_ptr += expert.to(tl.int64) * width * columns
    inside = (feature < width) & (column < columns)
    total = total.to(weight_gradient_ptr.dtype.element_ty)
    tl.store(weight_gradient_ptr + feature * columns + column, total, mask=inside)


def _constants(shapes: Shapes, tile: Tile, target: KernelTarget) -> dict[str, int]:
    return {**tile.sizes, "EXPERTS": power_above(shapes["experts"]), "TRANSPOSED": shapes["transposed"]}


def _needs(shapes: Shapes, constants: Mapping[str, int], tile: Tile, element_bytes: int) -> TileNeeds:
    """The sum; both factors of every stage in shared memory, and of one where the matrix unit reads them."""
    rows, columns, depth = constants["ROWS"], constants["COLUMNS"], constants["DEPTH"]
    factors = depth * (rows + columns) * element_bytes
    return TileNeeds(values=0, sums=rows * columns, operands=factors // 4, shared_bytes=tile.stages * factors)


def _tiles_of_rows(shapes: Shapes, constants: Mapping[str, int]) -> int:
    """At most so many tiles have the tokens of all experts: each may have a partial one."""
    return triton.cdiv(shapes["tokens"], constants["ROWS"]) + min(shapes["experts"], shapes["tokens"]) - 1


_TILES = tuple(
    Tile({"ROWS": rows, "COLUMNS": columns, "DEPTH": depth}, threads, stages)
    for rows, columns, depth, threads, stages in (
        (128, 256, 64, 256, 4),
        (128, 256, 64, 256, 3),
        (128, 128, 64, 256, 4),
        (128, 128, 64, 256, 2),
        (64, 128, 32, 128, 3),
        (64, 64, 32, 128, 2),
        (16, 16, 16, 64, 1),
    )
)
_EXAMPLE = {"tokens": 65536, "experts": 64, "width": 2048, "columns": 1408, "transposed": 0}

GROUPED_MM = Kernel(
    name="grouped_mm",
    function=_forward,
    arguments={"x_ptr": "*x", "weight_ptr": "*x", "y_ptr": "*x", "ends_ptr": "*i32", "experts": "i32",
               "width": "i32", "columns": "i32"},
    grid=lambda shapes, constants: (
        triton.cdiv(shapes["columns"], constants["COLUMNS"]), _tiles_of_rows(shapes, constants)
    ),
    tiles=_TILES,
    constants=_constants,
    needs=_needs,
    example=_EXAMPLE,
    uses_matrix_unit=True,
)  # fmt: skip

GROUPED_MM_INPUT = Kernel(
    name="grouped_mm_input_gradient",
    function=_forward,
    arguments=GROUPED_MM.arguments,
    grid=GROUPED_MM.grid,
    tiles=_TILES,
    constants=_constants,
    needs=_needs,
    example=_EXAMPLE | {"width": 1408, "columns": 2048, "transposed": 1},
    uses_matrix_unit=True,
)

GROUPED_MM_WEIGHT = Kernel(
    name="grouped_mm_weight_gradient",
    function=_weight_gradient,
    arguments={"x_ptr": "*x", "gradient_ptr": "*x", "weight_gradient_ptr": "*x", "ends_ptr": "*i32",
               "width": "i32", "columns": "i32"},
    grid=lambda shapes, constants: (
        triton.cdiv(shapes["columns"], constants["COLUMNS"]), triton.cdiv(shapes["width"], constants["ROWS"]),
        shapes["experts"],
    ),
    tiles=_TILES,
    needs=_needs,
    example=_EXAMPLE,
    uses_matrix_unit=True,
)  # fmt: skip


def grouped_mm(x_TK: Tensor, weight_EKN: Tensor, ends_E: Tensor) -> Tensor:
    """Every token times the matrix of its expert."""
    return _multiply(GROUPED_MM, x_TK, weight_EKN, ends_E, transposed=False)


def grouped_mm_input_gradient(gradient_TN: Tensor, weight_EKN: Tensor, ends_E: Tensor) -> Tensor:
    """The gradient of the tokens: every gradient times the transpose of its expert's matrix."""
    return _multiply(GROUPED_MM_INPUT, gradient_TN, weight_EKN, ends_E, transposed=True)


def grouped_mm_weight_gradient(x_TK: Tensor, gradient_TN: Tensor, ends_E: Tensor) -> Tensor:
    """The gradient of the matrices, in the dtype of the tokens."""
    shapes = _shapes(len(x_TK), len(ends_E), x_TK.shape[1], gradient_TN.shape[1])
    weight_gradient_EKN = x_TK.new_empty(shapes["experts"], shapes["width"], shapes["columns"])
    tensors = x_TK.contiguous(), gradient_TN.contiguous(), weight_gradient_EKN, ends_E
    launch(GROUPED_MM_WEIGHT, shapes, x_TK, *tensors, shapes["width"], shapes["columns"])
    return weight_gradient_EKN


def grouped_mm_gradient(gradient_TN: Tensor, other: Tensor, ends_E: Tensor) -> Tensor:
    """The gradient of the tokens if `other` is the matrices, and that of the matrices if it is the tokens."""
    if other.dim() == 3:
        return grouped_mm_input_gradient(gradient_TN, other, ends_E)
    return grouped_mm_weight_gradient(other, gradient_TN, ends_E)


def _multiply(kernel: Kernel, x: Tensor, weight_EKN: Tensor, ends_E: Tensor, transposed: bool) -> Tensor:
    columns = weight_EKN.shape[1 if transposed else 2]
    shapes = _shapes(len(x), len(weight_EKN), x.shape[1], columns) | {"transposed": int(transposed)}
    y = x.new_empty(len(x), columns)
    tensors = x.contiguous(), weight_EKN.contiguous(), y, ends_E
    launch(kernel, shapes, x, *tensors, shapes["experts"], shapes["width"], columns)
    return y


def _shapes(tokens: int, experts: int, width: int, columns: int) -> dict[str, int]:
    return {"tokens": tokens, "experts": experts, "width": width, "columns": columns}
