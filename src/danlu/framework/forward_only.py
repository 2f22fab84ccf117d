"""Forward passes without a backward, on any layout: for evaluation and samples between two steps."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from danlu.comm.mesh import ParallelMesh
from danlu.framework.build import make_adapter
from danlu.parallel.batch import Batch
from danlu.parallel.forward_pipeline import ForwardPipeline
from danlu.parallel.fsdp import reshard_all
from danlu.spec.recipe import Recipe

ReadLogits = Callable[[Tensor, int], Tensor]
"""What is wanted of a microbatch, such as its loss, by its logits and its number."""


class ForwardOnly(Protocol):
    """Forward passes of microbatches on this rank and those it shares layers with."""

    def __call__(self, microbatches: Sequence[Batch], read_logits: ReadLogits) -> list[Tensor]:
        """What is read of the logits of all microbatches; nothing on ranks without the last stage."""
        ...


def make_forward(recipe: Recipe, mesh: ParallelMesh, stage_modules: Sequence[nn.Module]) -> ForwardOnly:
    """Forward passes by the layout of `mesh`; microbatches have the size of those in training."""
    plan = mesh.plan
    if plan.degrees.pp == 1:
        return _WholeModel(stage_modules[0])
    group = mesh.group("pp")
    assert group is not None
    stages = plan.stages_of_rank(mesh.coordinate("pp"))
    return ForwardPipeline(plan, stage_modules, stages, make_adapter(recipe, plan).stage_io_meta, mesh.device, group)


def microbatch_rows(recipe: Recipe, mesh: ParallelMesh) -> int:
    """Sequences of one microbatch of training, which is what the stages of a pipeline are built for."""
    return recipe.batch.sequences // mesh.plan.degrees.dp // mesh.plan.microbatches


@dataclass(frozen=True)
class _WholeModel:
    """Forward passes without a pipeline."""

    module: nn.Module

    @torch.no_grad()
    def __call__(self, microbatches: Sequence[Batch], read_logits: ReadLogits) -> list[Tensor]:
        outputs = (self.module(each.tokens, **each.model_inputs) for each in microbatches)
        return [read_logits(logits, number) for number, logits in enumerate(outputs)]


@contextmanager
def evaluation_mode(stage_modules: Sequence[nn.Module]) -> Iterator[None]:
    """No dropout inside; afterwards the modules train again, and their parameters are sharded as after a step."""
    for module in stage_modules:
        module.eval()
    try:
        yield
    finally:
        for module in stage_modules:
            module.train()
            reshard_all(module)
