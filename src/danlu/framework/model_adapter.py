"""What `build_train_state` needs from a model: its stage modules, and how they are placed on the mesh."""

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor, nn

from danlu.comm.mesh import ParallelMesh
from danlu.framework.fp8.apply import QuantizedModule
from danlu.framework.layer_seeds import LayerSeeds
from danlu.memory.recompute import RecomputeRegion
from danlu.parallel.fsdp import FsdpUnit
from danlu.spec.plan import Plan


class LayoutAdapter(Protocol):
    """How the layers of one module are placed on the mesh."""

    root: str
    """The name under which `precision.layers` matches what belongs to no FSDP unit."""

    def apply_model_parallel(self, stage_module: nn.Module, mesh: ParallelMesh) -> None:
        """Apply `tp`, `cp` and `ep` inside of layers."""
        ...

    def blocks(self, stage_module: nn.Module) -> list[nn.Module]:
        """The layers of a stage module."""
        ...

    def quantized_modules(self, stage_module: nn.Module) -> Iterable[QuantizedModule]:
        """Modules of the layers whose matrix products are quantized if the recipe says so: never routers or norms."""
        ...

    def recompute_regions(self, stage_module: nn.Module, plan: Plan) -> Iterable[RecomputeRegion]:
        """What is recomputed in the backward pass, by the modes of the stage module's layers."""
        ...

    def fsdp_units(self, stage_module: nn.Module, mesh: ParallelMesh) -> Iterable[FsdpUnit]:
        """Modules whose parameters are gathered together, inner ones first."""
        ...


class ModelAdapter(LayoutAdapter, Protocol):
    """One model under one plan; the modules themselves stay single-device code."""

    layer_seeds: list[LayerSeeds]
    """Seeds of the stage modules made so far; empty for a model that draws no random numbers."""

    def stage_module(self, stage: int) -> nn.Module:
        """The module of a pipeline stage, with its parameters on the meta device."""
        ...

    def init_weights(self, stage_modules: Iterable[nn.Module], mesh: ParallelMesh) -> None:
        """Allocate the parameters and give them their initial values."""
        ...

    def stage_io_meta(self, stage: int) -> tuple[Tensor, Tensor]:
        """Meta tensors like a stage's input and output, for one microbatch on one rank."""
        ...
