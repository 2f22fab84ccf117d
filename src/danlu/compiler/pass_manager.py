"""Apply graph passes inside torch.compile, each on a copy first: what cannot be shown to be equal is not applied."""

import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.fx import Graph

from danlu.compiler.graph_check import (
    copy_graph,
    find_numerical_problem,
    find_structural_problem,
    why_unverifiable,
)
from danlu.compiler.passes import GraphPass
from danlu.torch_compat import inductor_pass


@dataclass
class PassManager:
    """The passes for the graphs that are compiled from now on, and what they did."""

    passes: Sequence[GraphPass]
    rewrites: dict[str, int] = field(default_factory=dict)
    """How often each pass rewrote something."""
    refused: list[str] = field(default_factory=list)
    """What was not applied, and why."""

    def __call__(self, graph: Graph) -> None:
        """Apply every pass in place that is sound and equal on this graph; the others leave it as it is."""
        if (reason := why_unverifiable(graph)) is not None:
            if wanted := [each.name for each in self.passes if each.apply(copy_graph(graph))]:
                self._refuse(f"no graph pass ({', '.join(wanted)}) is applied, because it cannot be compared: {reason}")
            return
        for each in self.passes:
            self._apply(each, graph)

    def _refuse(self, message: str) -> None:
        self.refused.append(message)
        warnings.warn(message, RuntimeWarning, stacklevel=2)

    def _apply(self, each: GraphPass, graph: Graph) -> None:
        before = copy_graph(graph)
        rewritten = copy_graph(graph)
        if not each.apply(rewritten):
            return
        problem = find_structural_problem(before, rewritten) or find_numerical_problem(before, rewritten)
        if problem is not None:
            self._refuse(f"graph pass `{each.name}` is not applied, because its result is not equal: {problem}")
            return
        self.rewrites[each.name] = self.rewrites.get(each.name, 0) + each.apply(graph)
        graph.eliminate_dead_code()

    def compile_options(self) -> dict[str, Any]:
        """Options for `torch.compile` that run the passes on the graph of forward and backward."""
        return {"joint_custom_pre_pass": inductor_pass(self, self.cache_key)} if self.passes else {}

    @property
    def cache_key(self) -> str:
        """Names the passes and their code, so that the compiler's cache tells their results from others."""
        digest = hashlib.sha256("\n".join(each.name for each in self.passes).encode())
        for file in ("passes.py", "pass_manager.py", "graph_check.py"):
            digest.update(Path(__file__).with_name(file).read_bytes())
        return digest.hexdigest()
