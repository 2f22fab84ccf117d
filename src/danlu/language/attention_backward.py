"""The two kernels of the backward pass of attention; `attention.py` launches them, and explains the shapes.

Scores are computed again from the logsumexp. A pass over queries sums their gradient over the keys, a pass over keys
sums theirs over the queries of all heads that share them: each sum has one owner, so it is the same every time.
"""

# Triton reads the annotations of a kernel, so its parameters have none but `constexpr`.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from collections.abc import Mapping

import triton
import triton.language as tl

from danlu.chips.kernel_targets import KernelTarget
from danlu.language.declaration import Kernel, Shapes, Tile, TileNeeds, power_above
from danlu.language.dot import dot

_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _queries(
    gradient_ptr, q_ptr, k_ptr, v_ptr, y_ptr, logsumexp_ptr, first_ptr,
    q_gradient_ptr, delta_ptr, length, heads, groups, width, scale,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile of queries, and `delta`: every query's gradient times its result."""
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES
    sequence, head = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    group = head // (heads // groups)
    query, feature = start + tl.arange(0, QUERIES), tl.arange(0, WIDTH)
    of_query, of_head = query < length, (sequence * heads + head) * length + query
    inside = of_query[:, None] & (feature < width)[None, :]
    base = ((sequence * length + start) * heads + head) * width
    place = tl.arange(0, QUERIES)[:, None] * (heads * width) + feature[None, :]
    gradient = tl.load(gradient_ptr + base + place, mask=inside, other=0.0)
    y = tl.load(y_ptr + base + place, mask=inside, other=0.0)
    delta = tl.sum(gradient.to(tl.float32) * y.to(tl.float32), 1)
    tl.store(delta_ptr + of_head, delta, mask=of_query)
    q = tl.load(q_ptr + base + place, mask=inside, other=0.0)
    log2_sum = tl.load(logsumexp_ptr + of_head, mask=of_query, other=0.0) * _LOG2_E
    first = tl.load(first_ptr + sequence * length + query, mask=of_query, other=2147483647)
    k_ptr += (sequence * length * groups + group) * width
    v_ptr += (sequence * length * groups + group) * width
    total, stride = tl.zeros([QUERIES, WIDTH], tl.float32), tl.cast(groups * width, tl.int64)
    key_place = tl.arange(0, KEYS)[:, None] * (groups * width) + feature[None, :]
    for at in range(tl.min(first, 0) // KEYS * KEYS, tl.minimum(start + QUERIES, length), KEYS):
        key = at + tl.arange(0, KEYS)
        of_key = (key < length)[:, None] & (feature < width)[None, :]
        k = tl.load(k_ptr + at * stride + key_place, mask=of_key, other=0.0)
        v = tl.load(v_ptr + at * stride + key_place, mask=of_key, other=0.0)
        score = dot(q, tl.trans(k), tl.zeros([QUERIES, KEYS], tl.float32)) * (scale * _LOG2_E)
        seen = (key[None, :] <= query[:, None]) & (key[None, :] >= first[:, None]) & (key < length)[None, :]
        share = tl.where(seen, tl.exp2(score - log2_sum[:, None]), 0.0)
        share_gradient = dot(gradient, tl.trans(v), tl.zeros([QUERIES, KEYS], tl.float32))
        score_gradient = share * (share_gradient - delta[:, None])
        total = dot(score_gradient.to(k.dtype), k, total)
    tl.store(q_gradient_ptr + base + place, (total * scale).to(q_gradient_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _keys(
    gradient_ptr, q_ptr, k_ptr, v_ptr, logsumexp_ptr, delta_ptr, first_ptr,
    last_ptr, k_gradient_ptr, v_gradient_ptr, length, heads, groups, width, scale,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of keys and values, over all heads that share them and the queries that see them."""
    start = tl.program_id(0) * KEYS
    sequence, group = (tl.program_id(1) // groups).to(tl.int64), tl.program_id(1) % groups
    key, feature = start + tl.arange(0, KEYS), tl.arange(0, WIDTH)
    of_key = (key < length)[:, None] & (feature < width)[None, :]
    base = ((sequence * length + start) * groups + group) * width
    key_place = tl.arange(0, KEYS)[:, None] * (groups * width) + feature[None, :]
    k = tl.load(k_ptr + base + key_place, mask=of_key, other=0.0)
    v = tl.load(v_ptr + base + key_place, mask=of_key, other=0.0)
    k_total, v_total = tl.zeros([KEYS, WIDTH], tl.float32), tl.zeros([KEYS, WIDTH], tl.float32)
    begin = start // QUERIES * QUERIES
    end = tl.load(last_ptr + sequence * length + tl.minimum(start + KEYS, length) - 1)
    sharing = heads // groups
    place = tl.arange(0, QUERIES)[:, None] * (heads * width) + feature[None, :]
    for head in range(group * sharing, (group + 1) * sharing):
        for at in range(begin, end, QUERIES):
            query = at + tl.arange(0, QUERIES)
            of_query, of_head = query < length, (sequence * heads + head) * length + query
            inside = of_query[:, None] & (feature < width)[None, :]
            of_tile = ((sequence * length + at) * heads + head) * width
            q = tl.load(q_ptr + of_tile + place, mask=inside, other=0.0)
            gradient = tl.load(gradient_ptr + of_tile + place, mask=inside, other=0.0)
            log2_sum = tl.load(logsumexp_ptr + of_head, mask=of_query, other=0.0) * _LOG2_E
            delta = tl.load(delta_ptr + of_head, mask=of_query, other=0.0)
            first = tl.load(first_ptr + sequence * length + query, mask=of_query, other=2147483647)
            score = dot(k, tl.trans(q), tl.zeros([KEYS, QUERIES], tl.float32)) * (scale * _LOG2_E)
            seen = (key[:, None] <= query[None, :]) & (key[:, None] >= first[None, :])
            share = tl.where(seen, tl.exp2(score - log2_sum[None, :]), 0.0)
            v_total = dot(share.to(gradient.dtype), gradient, v_total)
            share_gradient = dot(v, tl.trans(gradient), tl.zeros([KEYS, QUERIES], tl.float32))
            score_gradient = share * (share_gradient - delta[None, :])
            k_total = dot(score_gradient.to(q.dtype), q, k_total)
    tl.store(k_gradient_ptr + base + key_place, (k_total * scale).to(k_gradient_ptr.dtype.element_ty), mask=of_key)
    tl.store(v_gradient_ptr + base + key_place, v_total.to(v_gradient_ptr.dtype.element_ty), mask=of_key)


def _constants(shapes: Shapes, tile: Tile, target: KernelTarget) -> dict[str, int]:
    return {**tile.sizes, "WIDTH": max(16, power_above(shapes["width"]))}


def _needs_of_queries(shapes: Shapes, constants: Mapping[str, int], tile: Tile, element_bytes: int) -> TileNeeds:
    """One sum and three tiles of scores; queries, gradients, and staged keys and values are shared."""
    queries, keys, width = constants["QUERIES"], constants["KEYS"], constants["WIDTH"]
    return _needs(queries, keys, 1, width, tile.stages, element_bytes)


def _needs_of_keys(shapes: Shapes, constants: Mapping[str, int], tile: Tile, element_bytes: int) -> TileNeeds:
    """Two sums and three tiles of scores; keys, values, and staged queries and gradients are shared."""
    queries, keys, width = constants["QUERIES"], constants["KEYS"], constants["WIDTH"]
    return _needs(keys, queries, 2, width, tile.stages, element_bytes)


def _needs(kept: int, passing: int, sums: int, width: int, stages: int, element_bytes: int) -> TileNeeds:
    """Of two tiles of `kept` rows that stay, and two of `passing` rows in every turn."""
    scores = kept * passing
    return TileNeeds(
        values=3 * scores,
        sums=sums * kept * width,
        operands=(2 * (kept + passing) * width + 2 * scores) * element_bytes // 4,
        shared_bytes=((2 * kept + 2 * stages * passing) * width + sums * scores) * element_bytes,
    )


def _tiles(*choices: tuple[int, int, int, int]) -> tuple[Tile, ...]:
    return tuple(
        Tile({"QUERIES": queries, "KEYS": keys}, threads, stages) for queries, keys, threads, stages in choices
    )


_EXAMPLE = {"sequences": 2, "length": 8192, "heads": 32, "groups": 8, "width": 128}

QUERIES_BACKWARD = Kernel(
    name="attention_backward_queries",
    function=_queries,
    arguments={"gradient_ptr": "*x", "q_ptr": "*x", "k_ptr": "*x", "v_ptr": "*x", "y_ptr": "*x",
               "logsumexp_ptr": "*fp32", "first_ptr": "*i32", "q_gradient_ptr": "*x", "delta_ptr": "*fp32",
               "length": "i32", "heads": "i32", "groups": "i32", "width": "i32", "scale": "fp32"},
    grid=lambda shapes, constants: (
        triton.cdiv(shapes["length"], constants["QUERIES"]), shapes["sequences"] * shapes["heads"]
    ),
    tiles=_tiles(
        (64, 128, 256, 2), (64, 64, 256, 2), (64, 64, 256, 1), (32, 64, 256, 1), (32, 32, 256, 1), (16, 16, 64, 1)
    ),
    constants=_constants,
    needs=_needs_of_queries,
    example=_EXAMPLE,
    uses_matrix_unit=True,
)  # fmt: skip

KEYS_BACKWARD = Kernel(
    name="attention_backward_keys",
    function=_keys,
    arguments={"gradient_ptr": "*x", "q_ptr": "*x", "k_ptr": "*x", "v_ptr": "*x", "logsumexp_ptr": "*fp32",
               "delta_ptr": "*fp32", "first_ptr": "*i32", "last_ptr": "*i32", "k_gradient_ptr": "*x",
               "v_gradient_ptr": "*x", "length": "i32", "heads": "i32", "groups": "i32", "width": "i32",
               "scale": "fp32"},
    grid=lambda shapes, constants: (
        triton.cdiv(shapes["length"], constants["KEYS"]), shapes["sequences"] * shapes["groups"]
    ),
    tiles=_tiles((32, 64, 256, 2), (32, 64, 256, 1), (32, 32, 256, 1), (16, 16, 64, 1)),
    constants=_constants,
    needs=_needs_of_keys,
    example=_EXAMPLE,
    uses_matrix_unit=True,
)  # fmt: skip
