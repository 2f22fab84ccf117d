"""Check that a rewritten graph is sound, and computes what the graph before it computed."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node

from danlu.compiler.isolated_run import COLLECTIVE_NAMESPACES
from danlu.torch_compat import tree_leaves, tree_map, without_fake_tensors

TOLERANCE = 1e-9
"""Relative to the largest value of a result: what the order of sums changes in fp64 is six orders below."""
MOST_ELEMENTS = 2**28
"""Of all tensors of a graph together. A larger graph would take minutes to interpret twice in fp64."""


def copy_graph(graph: Graph) -> Graph:
    """An independent copy with the same nodes."""
    copied = Graph()
    copied.output(copied.graph_copy(graph, {}))
    result, original = _output(copied), _output(graph)
    result.meta = dict(original.meta)
    return copied


def why_unverifiable(graph: Graph) -> str | None:
    """Why a graph cannot be interpreted on random inputs: symbolic shapes, collectives, or its size."""
    elements = 0
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op in ("get_attr", "call_module"):
            return f"node {node.name} reads an attribute"
        if node.op == "placeholder" and not isinstance(value, Tensor):
            return f"input {node.name} is no tensor"
        if getattr(node.target, "namespace", None) in COLLECTIVE_NAMESPACES:  # other ranks do not interpret it now
            return f"node {node.name} communicates"
        if isinstance(value, Tensor):
            if not all(isinstance(size, int) for size in value.shape):
                return f"the shape of {node.name} is symbolic"
            elements += value.numel()
    return f"it has {elements} elements, more than {MOST_ELEMENTS}" if elements > MOST_ELEMENTS else None


def find_structural_problem(before: Graph, after: Graph) -> str | None:
    """What is wrong with the form of a rewritten graph; None if nothing is."""
    try:
        after.lint()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    for check in (_connections_problem, partial(_signature_problem, before), _metadata_problem):
        if (problem := check(after)) is not None:
            return problem
    return None


def _connections_problem(graph: Graph) -> str | None:
    """A node that is used but stands nowhere: lint does not see what was inserted beside an erased node."""
    seen: set[Node] = set()
    nodes = list(graph.nodes)
    if nodes != list(reversed(graph.nodes))[::-1]:
        return "a node was inserted beside an erased one: forward and backward the graph has other nodes"
    for node in nodes:
        for used in node.all_input_nodes:
            if used not in seen:
                return f"{node.name} uses {used.name}, which does not stand before it"
        seen.add(node)
    for node in nodes:
        if lost := [user.name for user in node.users if user not in seen]:
            return f"{lost[0]}, a user of {node.name}, is not in the graph"
    if [node.op for node in nodes].count("output") != 1 or nodes[-1].op != "output":
        return "the graph must end with its only output"
    return None


def _signature_problem(before: Graph, after: Graph) -> str | None:
    names = [[node.name for node in graph.nodes if node.op == "placeholder"] for graph in (before, after)]
    if names[0] != names[1]:
        return "the inputs are not those of the graph before"
    results = [[_described(leaf) for leaf in tree_leaves(_output(graph).args)] for graph in (before, after)]
    for number, (old, new) in enumerate(zip(*results, strict=False)):
        if old != new:
            return f"result {number} is {new}, but was {old}"
    return "the number of results changed" if len(results[0]) != len(results[1]) else None


def _described(leaf: Any) -> str:
    value = leaf.meta.get("val") if isinstance(leaf, Node) else leaf
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _metadata_problem(graph: Graph) -> str | None:
    for node in graph.nodes:
        if node.op == "call_function" and "val" not in node.meta:
            return f"{node.name} has no metadata: the compiler does not know its shape"
    return None


def _output(graph: Graph) -> Node:
    return next(iter(reversed(graph.nodes)))


def find_numerical_problem(before: Graph, after: Graph, seed: int = 0) -> str | None:
    """In which result two graphs differ on the same random inputs; None if they compute the same."""
    with without_fake_tensors(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        inputs = _random_inputs(before, seed)
        expected = _interpret(before, inputs, seed)
        try:
            actual = _interpret(after, inputs, seed)
        except (RuntimeError, TypeError, IndexError, ValueError) as error:
            return f"it does not run: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        for number, (old, new) in enumerate(zip(expected, actual, strict=True)):
            if (problem := _result_problem(number, old, new)) is not None:
                return problem
    return None


def _result_problem(number: int, old: Any, new: Any) -> str | None:
    if not isinstance(old, Tensor) or not isinstance(new, Tensor):
        return None if type(old) is type(new) else f"result {number} is {type(new).__name__}, was {type(old).__name__}"
    if old.shape != new.shape:
        return f"result {number} has shape {list(new.shape)}, had {list(old.shape)}"
    if not old.numel():
        return None
    old, new = old.double(), new.double()
    if not torch.equal(old.isfinite(), new.isfinite()):
        return f"result {number} is not finite in other places"
    scale = float(old.nan_to_num(0.0, 0.0, 0.0).abs().max())
    error = float((new - old).nan_to_num(0.0, 0.0, 0.0).abs().max())
    if error > TOLERANCE * scale:
        return f"result {number} is off by {error:.3g}, where its largest value is {scale:.3g}"
    return None


def _random_inputs(graph: Graph, seed: int) -> list[Tensor]:
    """Normal numbers rounded to their dtype; zeros and ones where an index may be wanted."""
    drawn = torch.Generator().manual_seed(seed)
    inputs = []
    for node in graph.nodes:
        if node.op == "placeholder":
            value: Tensor = node.meta["val"]
            if value.dtype.is_floating_point:
                values = torch.randn(value.shape, generator=drawn).to(value.dtype).double()
            else:
                values = torch.randint(0, 2, value.shape, generator=drawn).to(value.dtype)
            laid_out = torch.empty_strided(value.shape, value.stride(), dtype=values.dtype, device=value.device)
            inputs.append(laid_out.copy_(values))
    return inputs


def _interpret(graph: Graph, inputs: list[Tensor], seed: int) -> list[Any]:
    torch.manual_seed(seed)
    module = GraphModule({}, graph)
    return tree_leaves(WideInterpreter(module).run(*(each.clone() for each in inputs)))


class WideInterpreter(Interpreter):
    """Runs a graph in fp64, and rounds what the graph has in 16 bits or fewer, as it does.

    A cast that is left out is thus seen, and the order of a sum is not: that changes nothing in so many bits. Results
    in fp32 are not rounded, since two orders of a sum round differently too often there.
    """

    def run_node(self, n: Node) -> Any:
        """Run a node, and round its results."""
        found = super().run_node(n)
        return tree_map(_rounded, found, n.meta["val"]) if n.op == "call_function" and "val" in n.meta else found

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator with fp64 wherever it asks for another floating-point dtype."""
        widened: Callable[[Any], Any] = _widened
        args, kwargs = tree_map(widened, (args, kwargs))
        return super().call_function(target, args, kwargs)


def _widened(leaf: Any) -> Any:
    return torch.float64 if isinstance(leaf, torch.dtype) and leaf.is_floating_point else leaf


def _rounded(found: Any, value: Any) -> Any:
    if isinstance(found, Tensor) and isinstance(value, Tensor) and value.dtype.is_floating_point:
        return found.to(value.dtype).double() if value.dtype.itemsize <= 2 else found.double()
    return found
