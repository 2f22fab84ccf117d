"""A script and a safetensors file that reproduce a difference between compiled and eager code, without Danlu."""

from itertools import count
from pathlib import Path
from textwrap import indent

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from danlu.compiler.equivalence import Difference
from danlu.compiler.isolated_run import Forward, IsolatedRuns
from danlu.torch_compat import tree_leaves

TENSORS_FILE, SCRIPT_FILE = "tensors.safetensors", "reproduce.py"

SCRIPT = '''"""Compiled and eager code differ in a block of class {kind}, torch {torch}.

Found: {difference}

    python reproduce.py

needs torch and safetensors, and reads tensors.safetensors beside it: the block's parameters, buffers and inputs, and
gradients of its outputs. It exits with 1 if compiled code differs here, and with 0 if not.

The block:

{block}
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file
from torch import device, inf, nan  # noqa: F401  (the graph may use them)

LAYOUT = {layout!r}
"""Name, shape and strides of the graph's inputs, in order."""
CONSTANTS = {constants!r}
RESULTS = {results!r}
"""What the graph returns, in order."""

{graph}


def load():
    stored = load_file(Path(__file__).with_name("tensors.safetensors"))
    inputs = [torch.empty_strided(shape, strides, dtype=stored[name].dtype) for name, shape, strides in LAYOUT]
    for (name, _, _), tensor in zip(LAYOUT, inputs):
        tensor.copy_(stored[name])
    return inputs, SimpleNamespace(**{{name: stored[name] for name in CONSTANTS}})


def main():
    inputs, constants = load()
    print(f"{{len(inputs)}} tensors were read, torch {{torch.__version__}}")
    if forward is None:
        print("the block's graph could not be captured: build the block from its text above, and give it these tensors")
        return 0
    copies = lambda: [each.clone() for each in inputs]  # the graph may change what it is given
    with torch.no_grad():
        eager = forward(constants, *copies())
        compiled = torch.compile(lambda *given: forward(constants, *given))(*copies())
    wrong = 0
    for name, expected, actual in zip(RESULTS, eager, compiled):
        if not expected.numel():
            continue
        scale = float(expected.double().abs().max())
        error = float((actual.double() - expected.double()).abs().max())
        bound = 64 * torch.finfo(expected.dtype).eps * scale if expected.is_floating_point() else 0
        differs = not error <= bound
        wrong += differs
        print(f"{{'DIFFERS' if differs else 'equal  '}}  {{name}}: largest difference {{error:.3g}} of {{scale:.3g}}")
    print(f"{{wrong}} of {{len(RESULTS)}} results differ")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
'''


def write_reproduction(
    folder: Path, block: nn.Module, runs: IsolatedRuns, eager: Forward, difference: Difference
) -> Path:
    """Write a script and its tensors into a new folder under `folder`; returns the script's path."""
    named = _graph_inputs(block, runs)
    graph, results = _capture(runs, eager, list(named.values()))
    constants = {} if graph is None else _constants(graph)
    target = _new_folder(folder, type(block).__name__)
    stored = {name: _local(tensor) for name, tensor in {**named, **constants}.items()}
    save_file({name: each.contiguous().cpu().clone() for name, each in stored.items()}, target / TENSORS_FILE)
    text = SCRIPT.format(
        kind=f"{type(block).__module__}.{type(block).__qualname__}",
        torch=torch.__version__,
        difference=difference,
        block=indent(repr(block).replace("\\", "\\\\").replace('"""', "'''"), "    "),
        layout=[(name, tuple(stored[name].shape), stored[name].stride()) for name in named],
        constants=sorted(constants),
        results=results,
        graph="forward = None" if graph is None else graph.code.strip(),
    )
    path = target / SCRIPT_FILE
    path.write_text(text, encoding="utf-8")
    return path


def _graph_inputs(block: nn.Module, runs: IsolatedRuns) -> dict[str, Tensor]:
    """Every tensor that a run reads, once each."""
    inputs = [leaf for leaf in tree_leaves(runs.call) if isinstance(leaf, Tensor)]
    named: dict[str, Tensor] = {}
    named |= {f"parameter {name}": each for name, each in block.named_parameters()}
    named |= {f"buffer {name}": each for name, each in block.named_buffers()}
    named |= {f"input {at}": each for at, each in enumerate(inputs)}
    named |= {f"upstream gradient {at}": each for at, each in enumerate(runs.upstream)}
    once = {id(each): name for name, each in reversed(named.items())}
    return {name: each for name, each in named.items() if once[id(each)] == name}


def _capture(runs: IsolatedRuns, eager: Forward, inputs: list[Tensor]) -> tuple[GraphModule | None, list[str]]:
    """The run as a graph of aten operators, and the names of its results; no graph where it needs other ranks."""
    names: list[str] = []

    def step(*_: Tensor) -> list[Tensor]:
        found = runs.run(eager)
        names.extend(found)
        return list(found.values())

    if any(isinstance(each, DTensor) for each in inputs) or runs.communicates:
        return None, names
    try:
        graph = make_fx(step)(*inputs)
    except Exception as error:  # any operator may refuse to be traced, and the tensors are worth writing
        return None, [f"not captured: {type(error).__name__}"]
    return graph, names


def _constants(graph: GraphModule) -> dict[str, Tensor]:
    """Tensors that became part of the graph."""
    return {str(node.target): getattr(graph, str(node.target)) for node in graph.graph.nodes if node.op == "get_attr"}


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _new_folder(folder: Path, kind: str) -> Path:
    """A folder that no other rank writes to."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in count():
        target = folder / f"{kind}-{number}"
        try:
            target.mkdir()
        except FileExistsError:
            continue
        return target
    raise AssertionError
