"""Tensor parallelism with sequence parallelism: every matrix over the ranks of `tp`, the stream split by sequence."""

import warnings
from collections.abc import Mapping
from typing import Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

Style = Literal["sequence", "gather", "column", "row", "vocabulary", "scores"]
"""What a module does with the sequence-split stream:

- sequence: works on each position alone, so keeps whole parameters and its part of the sequence (norms, routers)
- gather: wants the whole sequence, collected once for all its inner matrices
- column, row: a matrix split by outputs, and the one after it split by inputs whose result is summed and split again
- vocabulary: a table split by rows
- scores: the output matrix, split by the vocabulary; its result stays split
"""


# A DTensor's local part is a view, which FSDP warns about for the sake of in-place operations on it; modules that
# are split here are ours or a user's forward that autograd would already refuse such an operation for.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


def _style(style: Style) -> ParallelStyle:
    match style:
        case "sequence":
            return SequenceParallel(use_local_output=True)
        case "gather":
            return PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        case "column":
            return ColwiseParallel()
        case "row":
            return RowwiseParallel(output_layouts=Shard(1))
        case "vocabulary":
            return RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        case "scores":
            return ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1))


def apply_tp(part: nn.Module, placements: Mapping[str, Style], mesh: DeviceMesh) -> None:
    """Split the named modules of `part` over `mesh`; a name the part does not have is an error."""
    modules = dict(part.named_modules())
    for name, style in placements.items():
        if name not in modules:
            raise KeyError(f"placement {name!r} ({style}) names no module of {type(part).__name__}")
        parallelize_module(modules[name], mesh, _style(style))
