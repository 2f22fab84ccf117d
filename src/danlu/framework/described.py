"""The decoder that a recipe describes by its shape, as `build` sees it."""

from collections.abc import Iterable, Iterator
from typing import Literal, cast

import torch
from torch import Tensor, nn

from danlu.comm.mesh import Mesh
from danlu.framework import precision
from danlu.framework.initialise import initialise
from danlu.framework.placements import moe_layers, recompute_regions, sharding_units, tensor_placements
from danlu.framework.transformer import Decoder
from danlu.memory.recompute import Region
from danlu.parallel.context import apply_cp
from danlu.parallel.expert import apply_ep
from danlu.parallel.shard import Unit
from danlu.parallel.tensor import apply_tp
from danlu.spec.plan import Plan
from danlu.spec.recipe import Recipe


class DescribedModel:
    """A blueprint of `Decoder`."""

    rest = "embed"  # a tied embedding

    def __init__(self, recipe: Recipe, plan: Plan) -> None:
        self.recipe, self.plan, self.model = recipe, plan, recipe.decoder

    def part(self, stage: int) -> Decoder:
        """The layers of a stage, with the embedding on the first and the head on the last."""
        layers = self.plan.stage_layers(self.model.layers)[stage]
        with torch.device("meta"):
            return Decoder(self.model, layers, first=stage == 0, last=stage == self.plan.stages - 1)

    def split(self, part: nn.Module, mesh: Mesh) -> None:
        """Apply `tp`, `cp` and `ep`, and tell routers what the batch is."""
        decoder = cast(Decoder, part)
        if mesh.tensor is not None:
            apply_tp(decoder, tensor_placements(decoder), mesh.tensor)
        if group := mesh.group("cp"):
            apply_cp((block.get_submodule("attention") for block in self.blocks(part)), group)
            if decoder.embed is not None:
                decoder.embed.part = mesh.coordinate("cp")
        if mesh.experts is not None:
            apply_ep(moe_layers(decoder), mesh.experts)
        for layer in moe_layers(decoder):
            layer.router.sequences_per_step = self.recipe.batch.sequences
            layer.router.sequence_group = mesh.group("cp", "tp")

    def blocks(self, part: nn.Module) -> list[nn.Module]:
        """The layers of a part."""
        return list(cast(Decoder, part).blocks.values())

    def regions(self, part: nn.Module, mode: Literal["selective", "full"]) -> Iterator[Region]:
        """Whole blocks, or what is around the experts of one."""
        return recompute_regions(cast(Decoder, part), mode)

    def units(self, part: nn.Module, mesh: Mesh) -> Iterator[Unit]:
        """Blocks, experts by themselves, embedding and head; a tied head uses the embedding that is sharded."""
        cast(Decoder, part).tie()  # splitting replaced parameters
        return sharding_units(cast(Decoder, part), mesh)

    def fill(self, parts: Iterable[nn.Module], mesh: Mesh) -> None:
        """Values that are a function of seed, name and place, so that any layout starts from the same model."""
        for part in parts:
            part.to_empty(device=mesh.device)
            cast(Decoder, part).tie()
            initialise([part], self.model, self.recipe.seed)

    def streams(self, stage: int) -> tuple[Tensor, Tensor]:
        """Tokens or the stream in, the stream or scores out."""
        degrees, model = self.plan.degrees, self.model
        sequences = self.recipe.batch.sequences // degrees.data // self.plan.microbatches
        length = self.recipe.batch.length // degrees.cp
        boundaries = self.plan.stage_layers(model.layers)

        def like(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)

        def stream_after(stage: int) -> Tensor:
            dtype = precision.compute_dtype(self.recipe.precision, f"blocks.{boundaries[stage][-1]}")
            return like((sequences, length // degrees.tp, model.width), dtype)

        head = precision.compute_dtype(self.recipe.precision, "embed" if model.tied else "head")
        scores = (sequences, length, model.vocabulary // degrees.tp)
        return (
            like((sequences, length), torch.int64) if stage == 0 else stream_after(stage - 1),
            like(scores, head) if stage == self.plan.stages - 1 else stream_after(stage),
        )
