"""What `build` asks of a model: its parts, and how they lie on the mesh."""

from collections.abc import Iterable
from typing import Literal, Protocol

from torch import Tensor, nn

from danlu.comm.mesh import Mesh
from danlu.memory.recompute import Region
from danlu.parallel.shard import Unit


class Blueprint(Protocol):
    """Answers about one model under one plan; the modules themselves stay single-device code."""

    rest: str
    """The name under which `precision.layers` finds what belongs to no unit."""

    def part(self, stage: int) -> nn.Module:
        """The layers of a pipeline stage, without memory for their parameters."""
        ...

    def split(self, part: nn.Module, mesh: Mesh) -> None:
        """Share the work inside of layers over the ranks of `tp`, `cp` and `ep`."""
        ...

    def blocks(self, part: nn.Module) -> list[nn.Module]:
        """The layers of a part."""
        ...

    def regions(self, part: nn.Module, mode: Literal["selective", "full"]) -> Iterable[Region]:
        """What is computed again in the backward pass."""
        ...

    def units(self, part: nn.Module, mesh: Mesh) -> Iterable[Unit]:
        """Modules whose parameters are gathered together, inner ones first."""
        ...

    def fill(self, parts: Iterable[nn.Module], mesh: Mesh) -> None:
        """Give the parameters memory and their first values."""
        ...

    def streams(self, stage: int) -> tuple[Tensor, Tensor]:
        """Meta tensors like what enters and leaves a stage, for one microbatch on one rank."""
        ...
