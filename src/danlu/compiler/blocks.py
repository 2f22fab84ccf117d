"""torch.compile, block by block."""

from collections.abc import Iterable

import torch
from torch import nn


def apply_compile(blocks: Iterable[nn.Module]) -> None:
    """Compile the forward of every block; blocks of the same shape share one compilation.

    The forward is replaced rather than the module, so that parameter names stay as they are and
    the hooks of FSDP stay outside the graph.
    """
    for block in blocks:
        block.forward = torch.compile(block.forward)
