"""torch.compile, block by block."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import nn

from danlu.compiler.pass_manager import PassManager
from danlu.compiler.passes import GraphPass, default_passes
from danlu.compiler.verified_block import CompiledBlockChecks, Decide, VerifiedForward


def apply_compile(
    blocks: Iterable[nn.Module],
    check: bool = True,
    decide: Decide | None = None,
    reproduce_in: Path | None = None,
    passes: Sequence[GraphPass] | None = None,
) -> CompiledBlockChecks:
    """Compile the forward of every block; blocks of the same shape share one compilation.

    With `check` the first call of every kind of block is compared with eager code, outputs and gradients, and a kind
    that differs runs eagerly, with a warning and a script that reproduces it in the folder `reproduce_in`. `decide`
    makes ranks agree (`CompiledBlockChecks`). Returns what the checks found, which fills with the first step.
    `passes` rewrite the graph before Inductor gets it; those that gain where they were measured if omitted.

    The forward is replaced rather than the module, so that parameter names stay as they are and
    the hooks of FSDP stay outside the graph.
    """
    checks = CompiledBlockChecks(decide, reproduce_in)
    manager = PassManager(default_passes() if passes is None else passes)
    options = manager.compile_options() or None
    for number, block in enumerate(blocks):
        compiled = torch.compile(block.forward, options=options)
        name = f"block {number} ({type(block).__name__})"
        block.forward = VerifiedForward(block, name, compiled, checks) if check else compiled
    return checks
