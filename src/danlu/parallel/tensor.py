"""Tensor parallelism with sequence parallelism: matrices sharded over `tp`, hidden states sharded by sequence."""

from collections.abc import Mapping
from functools import partial
from typing import Literal, cast

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from danlu.parallel.fsdp import silence_view_warning
from danlu.parallel.joint_gather import apply_joint_column, apply_joint_gather
from danlu.parallel.loss import linear_cross_entropy_sum
from danlu.parallel.regather import apply_regather
from danlu.torch_compat import flatten_sequence_first

TPStyle = Literal[
    "sequence",
    "heads",
    "per head",
    "gather",
    "regather",
    "column",
    "row",
    "joint gather",
    "joint column",
    "vocabulary",
    "logits",
    "logits in parts",
    "row replicated",
    "table replicated",
    "column gathered",
]
"""What a module does with hidden states that are sharded by sequence:

- sequence: works on each position alone, so its parameters are replicated and its sequence is sharded (norms, routers)
- heads: works on each head alone, so its parameters are replicated and the heads sharded (norms of queries and keys)
- per head: has one value per head, so its parameters are sharded with the heads (attention sinks)
- gather: needs the full sequence, gathered once for all its inner matrices
- regather: the same, but gathered again in the backward pass instead of kept for it
- column, row: a matrix sharded by outputs, and the next one sharded by inputs, its result reduce-scattered by sequence
- joint gather, joint column: passes several narrow inputs on, gathered to the full sequence in one collective, and a
  matrix that reads one of them, sharded by outputs (latent attention)
- vocabulary: a table sharded by rows
- logits: the output matrix, sharded by the vocabulary; its result stays sharded
- logits in parts: the same, and with targets the result is their loss, from some of the logits at a time

Where hidden states are replicated (custom models):

- row replicated, table replicated: the same as row and vocabulary, but the sum is replicated on every rank
- column gathered: sharded by outputs, which are gathered again
"""


class VocabParallel(ParallelStyle):
    """A table sharded by rows: every rank looks up the rows it holds, and the sum over ranks gets placement `output`.

    torch's style makes the gradient of the full table on every rank, and a pipeline or FSDP accumulates that over
    microbatches in fp32: for 128,256 rows of 8,192 over 8 ranks 4.2 GB instead of 0.5 GB.

    What the module's class does with a row stays, as a subclass that scales it: the rank that holds the row does it.
    """

    def __init__(self, output: Placement) -> None:
        self.output = output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Embedding):
            raise TypeError(f"a table sharded by rows must be an nn.Embedding, but is {type(module).__name__} instead")
        for setting in ("max_norm", "scale_grad_by_freq"):
            if getattr(module, setting):
                raise ValueError(
                    f"a table sharded by rows must not have `{setting}`, but has {getattr(module, setting)}"
                )
        weight = module.weight
        module.weight = nn.Parameter(distribute_tensor(weight, device_mesh, [Shard(0)]), weight.requires_grad)
        module.forward = partial(self._look_up, module, type(module), device_mesh)  # type: ignore[method-assign]
        return module

    def _look_up(self, table: nn.Embedding, kind: type[nn.Embedding], mesh: DeviceMesh, rows: Tensor) -> Tensor:
        assert isinstance(table.weight, DTensor)
        held = table.weight.to_local()
        each = -(-table.weight.shape[0] // mesh.size())
        first = mesh.get_local_rank() * each
        mine = rows - first
        elsewhere = (mine < 0) | (mine >= held.shape[0])
        shard = object.__new__(kind)  # not a copy: FSDP gives the table another class, which cannot be copied
        padding = None if table.padding_idx is None else table.padding_idx - first
        if padding is not None and not 0 <= padding < held.shape[0]:
            padding = None
        vars(shard).update(vars(table) | {"_parameters": {}, "weight": held, "padding_idx": padding})
        found = kind.forward(shard, mine.masked_fill(elsewhere, 0)).masked_fill(elsewhere[..., None], 0)
        return DTensor.from_local(found, mesh, [Partial()]).redistribute(placements=[self.output]).to_local()


class LogitsInParts(ParallelStyle):
    """An output matrix sharded by the vocabulary that can be given targets, `chunks` of the module at a time."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        weight = module.get_parameter("weight")
        module.weight = nn.Parameter(distribute_tensor(weight, device_mesh, [Shard(0)]), weight.requires_grad)
        module.forward = partial(self._score, module, device_mesh)
        return module

    def _score(self, score: nn.Module, mesh: DeviceMesh, x_BSD: Tensor, targets_BS: Tensor | None = None) -> Tensor:
        weight = score.weight
        assert isinstance(weight, DTensor)
        gathered = DTensor.from_local(x_BSD, mesh, [Shard(1)]).redistribute(placements=[Replicate()])
        x_BSD, held_VD = gathered.to_local(grad_placements=[Partial()]), weight.to_local()
        if targets_BS is None:
            return F.linear(x_BSD, held_VD)
        chunks = cast(int, score.chunks)
        return linear_cross_entropy_sum(x_BSD, held_VD, targets_BS, mesh.get_group(), chunks)


class HeadParallel(ParallelStyle):
    """A module whose `weight` has one row per head, and whose result are the rows of this rank's heads."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        weight = module.get_parameter("weight")
        module.weight = nn.Parameter(distribute_tensor(weight, device_mesh, [Shard(0)]), weight.requires_grad)
        module.register_forward_hook(lambda module, inputs, output: output.to_local())
        return module


def _style(style: TPStyle) -> ParallelStyle:
    match style:
        case "regather":
            raise ValueError("the style regather belongs to a module together with its columns: use `apply_tp`")
        case "joint gather" | "joint column":
            raise ValueError(f"the style {style} replaces what a module computes: use `apply_tp`")
        case "sequence":
            return SequenceParallel(use_local_output=True)
        case "heads":
            return SequenceParallel(sequence_dim=2, use_local_output=True)
        case "per head":
            return HeadParallel()
        case "gather":
            return PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        case "column":
            return ColwiseParallel()
        case "row":
            return RowwiseParallel(output_layouts=Shard(1))
        case "vocabulary":
            return VocabParallel(Shard(1))
        case "logits":
            return ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1))
        case "logits in parts":
            return LogitsInParts()
        case "row replicated":
            return RowwiseParallel()
        case "table replicated":
            return VocabParallel(Replicate())
        case "column gathered":
            return ColwiseParallel(output_layouts=Replicate())


def apply_tp(stage_module: nn.Module, placements: Mapping[str, TPStyle], mesh: DeviceMesh) -> None:
    """Shard the named modules of `stage_module` over `mesh`; an unknown name is an error."""
    modules = dict(stage_module.named_modules())
    columns_of = _regathered_columns(placements)
    regathered = {name for columns in columns_of.values() for name in columns}
    for name, style in placements.items():
        if name not in modules:
            raise KeyError(f"{name!r} (TP style {style!r}) is no module of {type(stage_module).__name__}")
        module = modules[name]
        if style == "regather":
            apply_regather(module, {column: modules[column] for column in columns_of[name]}, mesh)
            continue
        if name in regathered:
            continue
        if style in ("joint gather", "joint column"):
            (apply_joint_gather if style == "joint gather" else apply_joint_column)(module, mesh)
            continue
        if style == "sequence" and isinstance(module, nn.Linear):
            flatten_sequence_first(module)
        parallelize_module(module, mesh, _style(style))
        if style in ("vocabulary", "table replicated"):
            clone_output(module)
        if style == "logits":
            silence_view_warning(stage_module, name)


def _regathered_columns(placements: Mapping[str, TPStyle]) -> dict[str, list[str]]:
    """The matrices that read the input of each module whose style is regather."""
    return {
        name: [inner for inner, other in placements.items() if other == "column" and inner.startswith(f"{name}.")]
        for name, style in placements.items()
        if style == "regather"
    }


def clone_output(module: nn.Module) -> None:
    """Make a sharded module return a copy.

    The local tensor of a DTensor is a view. Where an FSDP module returns a view and a compiled block takes it, the
    module's gradient is silently zero (PyTorch 2.13); a copy of one activation costs little.
    """
    module.register_forward_hook(lambda module, inputs, output: output.clone())
