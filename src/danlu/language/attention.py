"""Causal attention that keeps no scores: forward with the logsumexp of every query, which backward starts from.

Shapes: B sequences, S tokens of each, H heads of queries, G heads of keys and values (H a multiple of G), W width of a
head. `first_BS`, int32, is the first key that each query may see, never lower than that of the query before it: 0
without documents or a window, the first token of its document, or its own place less the window. Powers are of 2.
"""

# Triton reads the annotations of a kernel, so its parameters have none but `constexpr`.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from danlu.chips.kernel_targets import KernelTarget
from danlu.language.attention_backward import KEYS_BACKWARD, QUERIES_BACKWARD
from danlu.language.declaration import Kernel, Shapes, Tile, TileNeeds, power_above
from danlu.language.dot import dot
from danlu.language.launch import launch

_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _attend(
    total, highest, sums, q, k_ptr, v_ptr, query, first, begin, end,
    length, stride, width, scale, KEYS: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the keys from `begin` to `end` to the running sums of a tile of queries; masked where a query may not see."""
    feature = tl.arange(0, WIDTH)
    # A place in a tile has 32 bits, where the tile begins 64: half the registers of places with 64.
    place = tl.arange(0, KEYS)[:, None] * stride + feature[None, :]
    wide_stride = tl.cast(stride, tl.int64)
    for start in range(begin, end, KEYS):
        key = start + tl.arange(0, KEYS)
        inside = (feature < width)[None, :]
        if MASKED:
            inside = inside & (key < length)[:, None]
        k = tl.load(k_ptr + start * wide_stride + place, mask=inside, other=0.0)
        score = dot(q, tl.trans(k), tl.zeros([q.shape[0], KEYS], tl.float32)) * scale
        if MASKED:
            seen = (key[None, :] <= query[:, None]) & (key[None, :] >= first[:, None]) & (key < length)[None, :]
            score = tl.where(seen, score, float("-inf"))
        above = tl.maximum(highest, tl.max(score, 1))
        shift = tl.where(above == float("-inf"), 0.0, above)  # a query that has seen no key yet
        share = tl.exp2(score - shift[:, None])
        fade = tl.exp2(highest - shift)
        v = tl.load(v_ptr + start * wide_stride + place, mask=inside, other=0.0)
        sums = sums * fade + tl.sum(share, 1)
        total = dot(share.to(v.dtype), v, total * fade[:, None])
        highest = above
    return total, highest, sums


@triton.jit
def _forward(
    q_ptr, k_ptr, v_ptr, first_ptr, y_ptr, logsumexp_ptr, length, heads,
    groups, width, scale, QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A tile of queries of one head; tiles with most keys are started first."""
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES
    sequence, head = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    group = head // (heads // groups)
    query, feature = start + tl.arange(0, QUERIES), tl.arange(0, WIDTH)
    inside = (query < length)[:, None] & (feature < width)[None, :]
    base = ((sequence * length + start) * heads + head) * width
    place = tl.arange(0, QUERIES)[:, None] * (heads * width) + feature[None, :]
    q = tl.load(q_ptr + base + place, mask=inside, other=0.0)
    first = tl.load(first_ptr + sequence * length + query, mask=query < length, other=2147483647)
    k_ptr += (sequence * length * groups + group) * width
    v_ptr += (sequence * length * groups + group) * width
    # Blocks between `low` and `high` are seen whole by all queries of the tile: only the others need a mask.
    begin, end = tl.min(first, 0) // KEYS * KEYS, tl.minimum(start + QUERIES, length)
    high = tl.maximum(start // KEYS * KEYS, begin)
    latest = tl.max(tl.where(query < length, first, 0), 0)
    low = tl.minimum((latest + KEYS - 1) // KEYS * KEYS, high)
    total, sums = tl.zeros([QUERIES, WIDTH], tl.float32), tl.zeros([QUERIES], tl.float32)
    highest = tl.full([QUERIES], float("-inf"), tl.float32)
    stride, factor = groups * width, scale * _LOG2_E
    total, highest, sums = _attend(total, highest, sums, q, k_ptr, v_ptr, query, first, begin, low, length, stride,
                                   width, factor, KEYS, WIDTH, True)  # fmt: skip
    total, highest, sums = _attend(total, highest, sums, q, k_ptr, v_ptr, query, first, low, high, length, stride,
                                   width, factor, KEYS, WIDTH, False)  # fmt: skip
    total, highest, sums = _attend(total, highest, sums, q, k_ptr, v_ptr, query, first, high, end, length, stride,
                                   width, factor, KEYS, WIDTH, True)  # fmt: skip
    tl.store(y_ptr + base + place, (total / sums[:, None]).to(y_ptr.dtype.element_ty), mask=inside)
    logsumexp = (highest + tl.log2(sums)) / _LOG2_E
    tl.store(logsumexp_ptr + (sequence * heads + head) * length + query, logsumexp, mask=query < length)


def _constants(shapes: Shapes, tile: Tile, target: KernelTarget) -> dict[str, int]:
    return {**tile.sizes, "WIDTH": max(16, power_above(shapes["width"]))}


def _needs(shapes: Shapes, constants: Mapping[str, int], tile: Tile, element_bytes: int) -> TileNeeds:
    """Two tiles of scores and the sum; queries, and keys and values of every stage, in shared memory."""
    queries, keys, width = constants["QUERIES"], constants["KEYS"], constants["WIDTH"]
    factors = (queries + 2 * keys) * width + queries * keys
    return TileNeeds(
        values=2 * queries * keys,
        sums=queries * width,
        operands=factors * element_bytes // 4,
        shared_bytes=(queries + 2 * tile.stages * keys) * width * element_bytes,
    )


ATTENTION_FORWARD = Kernel(
    name="attention",
    function=_forward,
    arguments={"q_ptr": "*x", "k_ptr": "*x", "v_ptr": "*x", "first_ptr": "*i32", "y_ptr": "*x",
               "logsumexp_ptr": "*fp32", "length": "i32", "heads": "i32", "groups": "i32", "width": "i32",
               "scale": "fp32"},
    grid=lambda shapes, constants: (
        triton.cdiv(shapes["length"], constants["QUERIES"]), shapes["sequences"] * shapes["heads"]
    ),
    tiles=tuple(
        Tile({"QUERIES": queries, "KEYS": keys}, threads, stages)
        for queries, keys, threads, stages in (
            (128, 128, 256, 2), (128, 64, 256, 3), (128, 64, 256, 2), (128, 64, 256, 1), (128, 32, 256, 3),
            (64, 32, 256, 2), (64, 32, 256, 1), (16, 16, 64, 1),
        )
    ),
    constants=_constants,
    needs=_needs,
    example={"sequences": 2, "length": 8192, "heads": 32, "width": 128},
    uses_matrix_unit=True,
)  # fmt: skip


def attention(q_BSHW: Tensor, k_BSGW: Tensor, v_BSGW: Tensor, first_BS: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """What every query gathers from the keys it may see, and its logsumexp, (B, H, S) in fp32."""
    sequences, length, heads, width = q_BSHW.shape
    q_BSHW, k_BSGW, v_BSGW = q_BSHW.contiguous(), k_BSGW.contiguous(), v_BSGW.contiguous()
    y_BSHW = torch.empty_like(q_BSHW)
    logsumexp_BHS = q_BSHW.new_empty(sequences, heads, length, dtype=torch.float32)
    shapes = {"sequences": sequences, "length": length, "heads": heads, "width": width}
    tensors = q_BSHW, k_BSGW, v_BSGW, _of_every_sequence(first_BS, sequences), y_BSHW, logsumexp_BHS
    launch(ATTENTION_FORWARD, shapes, q_BSHW, *tensors, length, heads, k_BSGW.shape[2], width, scale)
    return y_BSHW, logsumexp_BHS


def attention_backward(
    gradient_BSHW: Tensor,
    q_BSHW: Tensor,
    k_BSGW: Tensor,
    v_BSGW: Tensor,
    y_BSHW: Tensor,
    logsumexp_BHS: Tensor,
    first_BS: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values: a pass over queries, then one over keys. No atomics."""
    sequences, length, heads, width = q_BSHW.shape
    gradient_BSHW, y_BSHW = gradient_BSHW.contiguous(), y_BSHW.contiguous()
    q_BSHW, k_BSGW, v_BSGW = q_BSHW.contiguous(), k_BSGW.contiguous(), v_BSGW.contiguous()
    gradients = torch.empty_like(q_BSHW), torch.empty_like(k_BSGW), torch.empty_like(v_BSGW)
    delta_BHS = torch.empty_like(logsumexp_BHS)
    first_BS = _of_every_sequence(first_BS, sequences)
    key_S = torch.arange(length, device=q_BSHW.device, dtype=torch.int32)
    # Queries that see a key end where the first key that a query may see is beyond it.
    last_BS = torch.searchsorted(first_BS, key_S.expand(sequences, -1).contiguous(), right=True, out_int32=True)
    sizes = length, heads, k_BSGW.shape[2], width, scale
    shapes = {"sequences": sequences, "length": length, "heads": heads, "groups": sizes[2], "width": width}
    inputs = gradient_BSHW, q_BSHW, k_BSGW, v_BSGW
    launch(QUERIES_BACKWARD, shapes, q_BSHW, *inputs, y_BSHW, logsumexp_BHS, first_BS, gradients[0], delta_BHS, *sizes)
    launch(KEYS_BACKWARD, shapes, q_BSHW, *inputs, logsumexp_BHS, delta_BHS, first_BS, last_BS, *gradients[1:], *sizes)
    return gradients


def _of_every_sequence(first_BS: Tensor, sequences: int) -> Tensor:
    return first_BS.to(torch.int32).expand(sequences, -1).contiguous()
