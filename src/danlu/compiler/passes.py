"""Rewrites of the training graph, as named values: what each finds, what it puts there, and why that is equal."""

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from danlu.chips.cpu_products import emulated_dtypes

aten, prims = torch.ops.aten, torch.ops.prims
CAST = prims.convert_element_type.default
PRODUCTS = (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default)
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


@dataclass(frozen=True, kw_only=True)
class GraphPass:
    """One rewrite; `apply` does all of them in a graph and returns how many."""

    name: str
    matches: str
    puts: str
    why_equal: str
    gain: str
    """What was measured with `benchmarks/graph_passes.py`."""
    on: bool
    """Whether it is applied unless asked otherwise: only what gained."""
    apply: Callable[[Graph], int]


def merge_projections(graph: Graph) -> int:
    """One product for all matrices that multiply the same input."""
    rewrites = 0
    for products in _products_by_input(graph).values():
        mergeable = _with_weights_before(graph, products)
        if len(mergeable) > 1:
            _merge(graph, mergeable)
            rewrites += 1
    return rewrites


def _products_by_input(graph: Graph) -> dict[Any, list[Node]]:
    """Products `x @ w.t()` of weights, in the order of the graph, by what stands for x.

    Every linear layer flattens x by itself, so equal views of one tensor are one input.
    """
    found: dict[Any, list[Node]] = {}
    for node in graph.nodes:
        if _calls(node, aten.mm.default) and _transposed(node.args[1]) is not None:
            x = node.args[0]
            assert isinstance(x, Node)
            key = (x.args[0], str(x.args[1])) if _calls(x, *VIEWS) else (x, "")
            found.setdefault((key, x.meta["val"].dtype), []).append(node)
    return found


def _with_weights_before(graph: Graph, products: list[Node]) -> list[Node]:
    """The products whose weight is there when the first of them is computed."""
    order = {node: number for number, node in enumerate(graph.nodes)}
    first = order[products[0]]
    return [each for each in products if order[_weight(each)] < first]


def _merge(graph: Graph, products: list[Node]) -> None:
    # Weights are joined as they are stored, by rows, and the result is transposed: a join of transposed matrices in
    # 16 bits is what Inductor was seen to get wrong with AVX-512, and it would copy column by column.
    weights = [_weight(each) for each in products]
    with graph.inserting_before(products[0]):
        joined = _put(graph, aten.cat.default, weights, 0)
        product = _put(graph, aten.mm.default, products[0].args[0], _put(graph, aten.permute.default, joined, [1, 0]))
        parts, at = [], 0
        for weight in weights:
            rows = weight.meta["val"].shape[0]
            parts.append(_put(graph, aten.slice.Tensor, product, 1, at, at + rows))
            at += rows
    # Only now: what is inserted beside a node that was erased is lost.
    for each, part in zip(products, parts, strict=True):
        each.replace_all_uses_with(part)
        graph.erase_node(each)


def fold_casts(graph: Graph) -> int:
    """A value instead of its cast to a wider dtype and back. The other way round rounds, and stays."""
    rewrites = 0
    for node in list(graph.nodes):
        inner = node.args[0] if _calls(node, CAST) else None
        if not isinstance(inner, Node) or not _calls(inner, CAST):
            continue
        value = inner.args[0]
        assert isinstance(value, Node)
        dtype, wide = value.meta["val"].dtype, inner.meta["val"].dtype
        if node.meta["val"].dtype == dtype and _holds_all(wide, dtype):
            node.replace_all_uses_with(value)
            graph.erase_node(node)
            rewrites += 1
    return rewrites


def widen_products(graph: Graph, dtypes: Set[torch.dtype] | None = None) -> int:
    """Products of these dtypes in fp32, rounded once; None: of those for which this CPU has no instructions."""
    emulated = emulated_dtypes() if dtypes is None else dtypes
    rewrites = 0
    for node in list(graph.nodes):
        if not _calls(node, *PRODUCTS):
            continue
        value: Tensor = node.meta["val"]
        if value.dtype not in emulated or value.device.type != "cpu":
            continue
        with graph.inserting_before(node):
            wide = [_put(graph, CAST, each, torch.float32) if isinstance(each, Node) else each for each in node.args]
            product = _put(graph, node.target, *wide, **node.kwargs)
            rounded = _put(graph, CAST, product, value.dtype)
        node.replace_all_uses_with(rounded)
        graph.erase_node(node)
        rewrites += 1
    return rewrites


def _holds_all(wide: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether every number of `dtype` is one of `wide`."""
    if not (wide.is_floating_point and dtype.is_floating_point):
        return False
    of, into = torch.finfo(dtype), torch.finfo(wide)
    return into.eps <= of.eps and into.max >= of.max and into.smallest_normal <= of.smallest_normal


def _calls(node: Any, *operators: Any) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and node.target in operators


def _transposed(node: Any) -> Node | None:
    """The matrix that a node transposes; None if it does not."""
    if _calls(node, aten.t.default) or (_calls(node, aten.permute.default) and list(node.args[1]) == [1, 0]):
        source = node.args[0]
        assert isinstance(source, Node)
        return source
    return None


def _weight(product: Node) -> Node:
    weight = _transposed(product.args[1])
    assert weight is not None
    return weight


def _put(graph: Graph, operator: Any, *args: Any, **kwargs: Any) -> Node:
    """Insert a call, with the metadata from which the compiler knows its shape."""
    node = graph.call_function(operator, args, kwargs)
    node.meta["val"] = operator(*torch.fx.node.map_arg(args, _value), **kwargs)
    return node


def _value(node: Node) -> Tensor:
    value: Tensor = node.meta["val"]
    return value


MERGE_PROJECTIONS = GraphPass(
    name="merge projections",
    matches="products of the same input with several transposed weights: queries, keys and values; gate and up",
    puts="one product with the weights joined by rows, and slices",
    why_equal="every element is the same sum of the same products, rounded once",
    gain="none: a block of width 512 took 1.00 times as long in bf16 and 1.03 times in fp32, on one thread of an "
    "AVX-512 CPU; joining the weights costs what one larger product saves",
    on=False,
    apply=merge_projections,
)
FOLD_CASTS = GraphPass(
    name="fold casts",
    matches="a cast to a dtype that holds all numbers of the value's own, and back",
    puts="the value",
    why_equal="the first cast is exact, so the second one restores the value",
    gain="none: 1.00 times as long in both dtypes, a decoder block has no such pair, and Inductor folds casts too",
    on=False,
    apply=fold_casts,
)
WIDEN_PRODUCTS = GraphPass(
    name="widen products",
    matches="matrix products of bf16 or fp16 numbers on a CPU without instructions for them",
    puts="the product of the same numbers in fp32, rounded to the dtype of the result",
    why_equal="products of 16-bit numbers are exact in fp32, in which the kernels for them add up and round once, too",
    gain="a block of width 512 in bf16, forward and backward, took 0.32 times as long (340 instead of 1058 ms) on one "
    "thread of an AVX-512 CPU without bf16 instructions; it needs room for fp32 copies of what is multiplied",
    on=True,
    apply=widen_products,
)
ALL_PASSES = (MERGE_PROJECTIONS, FOLD_CASTS, WIDEN_PRODUCTS)


def default_passes(passes: Iterable[GraphPass] = ALL_PASSES) -> tuple[GraphPass, ...]:
    """The passes that gained where they were measured."""
    return tuple(each for each in passes if each.on)
