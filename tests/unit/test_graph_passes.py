"""Graph passes on random graphs, before against after; and wrong rewrites, all of which the checker must refuse."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx

from danlu.compiler.graph_check import copy_graph, why_unverifiable
from danlu.compiler.pass_manager import PassManager
from danlu.compiler.passes import (
    ALL_PASSES,
    FOLD_CASTS,
    MERGE_PROJECTIONS,
    WIDEN_PRODUCTS,
    GraphPass,
    widen_products,
)

aten, prims = torch.ops.aten, torch.ops.prims
WIDEN = replace(WIDEN_PRODUCTS, apply=lambda graph: widen_products(graph, {torch.bfloat16, torch.float16}))
EVERY_PASS = (MERGE_PROJECTIONS, FOLD_CASTS, WIDEN)
NARROW, WIDE = torch.bfloat16, torch.float32


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    casted: Tensor = prims.convert_element_type.default(x, dtype)
    return casted


def traced(function: Callable[..., Any], *inputs: Tensor) -> Graph:
    return make_fx(function, tracing_mode="fake")(*inputs).graph


def random_graph(seed: int) -> tuple[Graph, list[Tensor]]:
    """Projections of shared inputs, chains of casts, and what stands between them in a model."""
    drawn = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    tokens, width = drawn.choice([3, 4, 8]), drawn.choice([4, 8])
    dtype = drawn.choice([NARROW, WIDE, torch.float16])
    rows = [drawn.choice([width, 2 * width, 3]) for _ in range(drawn.randint(2, 5))]
    shapes = [(2, tokens, width), *((each, width) for each in rows)]
    inputs = [torch.randn(shape, generator=generator).mul(0.5).to(dtype) for shape in shapes]
    plan = [(drawn.randrange(6), drawn.randrange(10**6)) for _ in range(drawn.randint(4, 12))]

    def program(x: Tensor, *weights: Tensor) -> list[Tensor]:
        streams, results = [x], []
        for kind, choice in plan:
            stream, weight = streams[choice % len(streams)], weights[choice % len(weights)]
            if kind <= 1:
                results.append(stream.reshape(-1, width) @ weight.t())
            elif kind == 2:  # a weight that is cast only after the first product
                results.append(stream.reshape(-1, width) @ cast(cast(weight, WIDE), dtype).t())
            elif kind == 3:
                streams.append(cast(cast(stream, WIDE), dtype))
            elif kind == 4:  # rounds, unless the dtype is NARROW itself
                streams.append(cast(cast(stream, NARROW), dtype).relu())
            else:
                streams.append(stream * 0.5 + x)
        return [*results, *streams[1:], x + 0]

    return traced(program, *inputs), inputs


def run(graph: Graph, inputs: list[Tensor]) -> list[Tensor]:
    results: list[Tensor] = Interpreter(GraphModule({}, graph)).run(*inputs)
    return results


def check_random_graphs(seeds: range) -> None:
    rewrites: dict[str, int] = {}
    for seed in seeds:
        graph, inputs = random_graph(seed)
        before, manager = copy_graph(graph), PassManager(EVERY_PASS)
        manager(graph)  # what is refused is a warning, and an error here
        for old, new in zip(run(before, inputs), run(graph, inputs), strict=True):
            assert old.dtype == new.dtype
            torch.testing.assert_close(new, old, rtol=2 * torch.finfo(old.dtype).eps, atol=1e-5)
        for name, number in manager.rewrites.items():
            rewrites[name] = rewrites.get(name, 0) + number
    assert all(rewrites.get(each.name, 0) > len(seeds) // 4 for each in EVERY_PASS), rewrites


def test_random_graphs_compute_the_same() -> None:
    check_random_graphs(range(60))


@pytest.mark.full
def test_a_thousand_random_graphs_compute_the_same() -> None:
    check_random_graphs(range(1000))


def test_projections_become_one_product() -> None:
    def attention(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        return [x.view(-1, 8) @ each.t() for each in (q, k, v)]

    graph = traced(attention, torch.randn(2, 3, 8), torch.randn(8, 8), torch.randn(4, 8), torch.randn(4, 8))
    PassManager([MERGE_PROJECTIONS])(graph)
    called = [node.target for node in graph.nodes if node.op == "call_function"]
    assert called.count(aten.mm.default) == 1
    (joined,) = (node for node in graph.nodes if node.target is aten.cat.default)
    assert all(each.op == "placeholder" for each in joined.args[0]), "weights are joined as they are stored"


@pytest.mark.parametrize(("first", "second", "folded"), [(WIDE, NARROW, True), (NARROW, WIDE, False)])
def test_only_casts_that_lose_nothing_are_folded(first: torch.dtype, second: torch.dtype, folded: bool) -> None:
    graph = traced(lambda x: [cast(cast(x, first), second) * 2], torch.randn(4, 4).to(second))
    manager = PassManager([FOLD_CASTS])
    manager(graph)
    assert bool(manager.rewrites) is folded


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_products_of_16_bits_are_widened_only_where_they_are_emulated(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    def program(x: Tensor, w: Tensor, bias: Tensor) -> list[Tensor]:
        return [x @ w, torch.addmm(bias, x, w, alpha=0.5)]

    given = [torch.randn(4, 4, dtype=dtype) for _ in range(3)]
    graph = traced(program, *given)
    monkeypatch.setattr("danlu.compiler.passes.emulated_dtypes", frozenset)
    assert widen_products(graph) == 0
    monkeypatch.setattr("danlu.compiler.passes.emulated_dtypes", lambda: {torch.bfloat16})
    manager = PassManager([WIDEN_PRODUCTS])
    manager(graph)
    widened = dtype == torch.bfloat16
    assert manager.rewrites == ({"widen products": 2} if widened else {})
    products = [node.meta["val"].dtype for node in graph.nodes if node.target in (aten.mm.default, aten.addmm.default)]
    assert products == 2 * [torch.float32 if widened else dtype]


# Wrong rewrites: the graph they are planted in, and what they do.


def sample_graph() -> Graph:
    def program(x: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
        p, q = x @ a.t(), x @ b.t()
        rounded = cast(cast(x, NARROW), WIDE)
        return [p.relu(), q * 2, rounded.sum(0), (p + q).softmax(-1)]

    return traced(program, torch.randn(4, 8), torch.randn(8, 8), torch.randn(8, 8))


def calls(graph: Graph, operator: Any) -> list[Node]:
    return [node for node in graph.nodes if node.target is operator]


def put(graph: Graph, operator: Any, *args: Any) -> Node:
    node = graph.call_function(operator, args)
    node.meta["val"] = operator(*torch.fx.node.map_arg(args, lambda each: each.meta["val"]))
    return node


def merged(graph: Graph, bounds: list[tuple[int, int]], reverse: bool = False) -> None:
    """The projections as one product, with slices at the given columns."""
    products = calls(graph, aten.mm.default)
    weights = [each.args[1].args[0] for each in products]
    with graph.inserting_after(calls(graph, aten.t.default)[-1]):
        joined = put(graph, aten.cat.default, weights[::-1] if reverse else weights, 0)
    with graph.inserting_after(joined):
        transposed = put(graph, aten.t.default, joined)
    with graph.inserting_after(transposed):
        product = put(graph, aten.mm.default, products[0].args[0], transposed)
    last = product
    for each, (start, end) in zip(products, bounds, strict=True):
        with graph.inserting_after(last):
            last = put(graph, aten.slice.Tensor, product, 1, start, end)
        for user in list(each.users):
            if user is not last:
                user.replace_input_with(each, last)


def weights_in_another_order(graph: Graph) -> None:
    merged(graph, [(0, 8), (8, 16)], reverse=True)


def slices_off_by_one(graph: Graph) -> None:
    merged(graph, [(0, 8), (7, 15)])


def slices_swapped(graph: Graph) -> None:
    merged(graph, [(8, 16), (0, 8)])


def rounding_left_out(graph: Graph) -> None:
    inner, outer = calls(graph, prims.convert_element_type.default)
    outer.replace_all_uses_with(inner.args[0])


def node_beside_an_erased_one(graph: Graph) -> None:
    relu = calls(graph, aten.relu.default)[0]
    with graph.inserting_before(relu):
        relu_input = relu.args[0]
        relu.replace_all_uses_with(relu_input)
        graph.erase_node(relu)
        lost = put(graph, aten.relu.default, relu_input)
    output = next(iter(reversed(graph.nodes)))
    output.args = ([lost, *output.args[0][1:]],)


def metadata_forgotten(graph: Graph) -> None:
    relu = calls(graph, aten.relu.default)[0]
    with graph.inserting_after(relu):
        relu.replace_all_uses_with(again := graph.call_function(aten.relu.default, (relu,)))
        again.args = (relu,)


def results_reordered(graph: Graph) -> None:
    output = next(iter(reversed(graph.nodes)))
    first, second, *others = output.args[0]
    output.args = ([second, first, *others],)


def result_dropped(graph: Graph) -> None:
    output = next(iter(reversed(graph.nodes)))
    output.args = (output.args[0][:-1],)


def activation_left_out(graph: Graph) -> None:
    relu = calls(graph, aten.relu.default)[0]
    relu.replace_all_uses_with(relu.args[0])


def factor_nearly_right(graph: Graph) -> None:
    (scaled,) = calls(graph, aten.mul.Tensor)
    scaled.args = (scaled.args[0], 2 * (1 + 1e-8))


def another_dtype_returned(graph: Graph) -> None:
    relu = calls(graph, aten.relu.default)[0]
    with graph.inserting_after(relu):
        narrow = put(graph, prims.convert_element_type.default, relu, NARROW)
    relu.replace_all_uses_with(narrow)
    narrow.args = (relu, NARROW)


def another_dim_summed(graph: Graph) -> None:
    softmax = calls(graph, aten._softmax.default)[0]
    softmax.args = (softmax.args[0], 0, False)


def used_before_it_is_computed(graph: Graph) -> None:
    relu, scaled = calls(graph, aten.relu.default)[0], calls(graph, aten.mul.Tensor)[0]
    relu.prepend(scaled)
    scaled.args = (relu, 2)


WRONG = (
    weights_in_another_order,
    slices_off_by_one,
    slices_swapped,
    rounding_left_out,
    node_beside_an_erased_one,
    metadata_forgotten,
    results_reordered,
    result_dropped,
    activation_left_out,
    factor_nearly_right,
    another_dtype_returned,
    another_dim_summed,
    used_before_it_is_computed,
)


@pytest.mark.parametrize("rewrite", WRONG, ids=lambda each: each.__name__.replace("_", " "))
def test_a_wrong_rewrite_is_refused(rewrite: Callable[[Graph], None]) -> None:
    def apply(graph: Graph) -> int:
        rewrite(graph)
        return 1

    graph = sample_graph()
    before = str(graph)
    planted = GraphPass(name="planted", matches="", puts="", why_equal="", gain="", on=False, apply=apply)
    manager = PassManager([planted])
    with pytest.warns(RuntimeWarning, match="`planted` is not applied, because its result is not equal: "):
        manager(graph)
    assert str(graph) == before, "the graph that is compiled must stay as it was"
    assert manager.rewrites == {}


def test_a_right_rewrite_of_the_same_form_is_applied() -> None:
    """The planted ones fail for what they get wrong, not for how they are written."""

    def apply(graph: Graph) -> int:
        merged(graph, [(0, 8), (8, 16)])
        return 1

    graph = sample_graph()
    right = GraphPass(name="right", matches="", puts="", why_equal="", gain="", on=False, apply=apply)
    manager = PassManager([right])
    manager(graph)
    assert manager.rewrites == {"right": 1}


def test_graphs_that_cannot_be_compared_are_left_alone() -> None:
    x = torch.randn(4, 8, dtype=torch.bfloat16)
    graph = make_fx(lambda x: [x @ x.t()], tracing_mode="symbolic")(x).graph
    assert why_unverifiable(graph) is not None
    manager = PassManager(EVERY_PASS)
    with pytest.warns(RuntimeWarning, match=r"no graph pass \(widen products\) is applied.*symbolic"):
        manager(graph)
    assert len(manager.refused) == 1
    assert manager.rewrites == {}
    nothing_to_do = make_fx(lambda x: [x.sum(0)], tracing_mode="symbolic")(x).graph
    manager(nothing_to_do)
    assert len(manager.refused) == 1, "what no pass would change needs no word"


def test_the_cache_key_names_the_passes() -> None:
    keys = {PassManager(passes).cache_key for passes in (ALL_PASSES, ALL_PASSES[:1], ())}
    assert len(keys) == 3
    assert PassManager(()).compile_options() == {}
