"""The decoder that a recipe describes by its shape, as `build_train_state` sees it."""

from collections.abc import Iterable, Iterator
from typing import cast

import torch
from torch import Tensor, nn

from danlu.comm.mesh import ParallelMesh
from danlu.framework import precision
from danlu.framework.decoder.decoder import Decoder
from danlu.framework.decoder.init_weights import init_weights
from danlu.framework.decoder.parallelism import (
    decoder_fsdp_units,
    decoder_layers,
    decoder_quantized_modules,
    decoder_recompute_regions,
    decoder_tp_plan,
    moe_layers,
)
from danlu.framework.fp8.apply import QuantizedModule
from danlu.framework.layer_seeds import LayerSeeds
from danlu.memory.recompute import RecomputeRegion
from danlu.parallel.context import apply_cp
from danlu.parallel.expert import apply_ep
from danlu.parallel.fsdp import FsdpUnit
from danlu.parallel.ring_attention import apply_ring
from danlu.parallel.sequence_shard import sequence_shard
from danlu.parallel.tensor import apply_tp, clone_output
from danlu.spec.plan import Plan
from danlu.spec.recipe import Recipe


class DecoderAdapter:
    """A `ModelAdapter` for `Decoder`."""

    root = "embed"  # a tied embedding

    def __init__(self, recipe: Recipe, plan: Plan) -> None:
        self.recipe, self.plan, self.model = recipe, plan, recipe.decoder
        self.layer_seeds: list[LayerSeeds] = []  # the decoder draws no random numbers

    def stage_module(self, stage: int) -> Decoder:
        """The layers of a stage, with the embedding on the first and the head on the last."""
        layers = self.plan.stage_layers(self.model.layers)[stage]
        with torch.device("meta"):
            decoder = Decoder(self.model, layers, first=stage == 0, last=stage == self.plan.num_stages - 1)
        if decoder.head is not None:
            decoder.head.score.chunks = self.plan.loss_chunks
        return decoder

    def apply_model_parallel(self, stage_module: nn.Module, mesh: ParallelMesh) -> None:
        """Apply `tp`, `cp` and `ep`, and set the batch size of routers."""
        decoder = cast(Decoder, stage_module)
        if mesh.tp_mesh is not None:
            apply_tp(decoder, decoder_tp_plan(decoder, self.plan.regathered_layers(self.model.layers)), mesh.tp_mesh)
            for module in decoder.mtp or ():
                clone_output(module)
        if group := mesh.group("cp"):
            ring = self.plan.context_parallel == "ring"
            attentions = (block.get_submodule("attention") for block in self.blocks(stage_module))
            (apply_ring if ring else apply_cp)(attentions, group)
            decoder.finds_documents = not ring
            if decoder.embed is not None:
                decoder.embed.shard = sequence_shard(mesh)
        decoder.sequence_ranks = self.plan.degrees.cp * self.plan.degrees.tp
        if mesh.ep_mesh is not None:
            apply_ep(moe_layers(decoder), mesh.ep_mesh, mesh.ep_levels, self.plan.dispatch_chunks)
        if decoder.mtp_losses is not None:
            decoder.mtp_losses.group = mesh.group("tp")
        for layer in moe_layers(decoder):
            layer.router.sequences_per_step = self.recipe.batch.sequences
            layer.router.sequence_group = mesh.group("cp", "tp")

    def blocks(self, stage_module: nn.Module) -> list[nn.Module]:
        """The layers of a stage module."""
        return [block for _, _, block in decoder_layers(cast(Decoder, stage_module))]

    def quantized_modules(self, stage_module: nn.Module) -> Iterator[QuantizedModule]:
        """The linear layers of blocks, and the stacked matrices of experts."""
        return decoder_quantized_modules(cast(Decoder, stage_module))

    def recompute_regions(self, stage_module: nn.Module, plan: Plan) -> Iterator[RecomputeRegion]:
        """Full blocks, or the modules around the experts of one."""
        return decoder_recompute_regions(cast(Decoder, stage_module), plan.recompute_modes(self.model.layers))

    def fsdp_units(self, stage_module: nn.Module, mesh: ParallelMesh) -> Iterator[FsdpUnit]:
        """Blocks, experts on their own, embedding and head; a tied head uses the sharded embedding."""
        cast(Decoder, stage_module).tie_weights()  # tensor parallelism replaced parameters
        return decoder_fsdp_units(cast(Decoder, stage_module), mesh)

    def init_weights(self, stage_modules: Iterable[nn.Module], mesh: ParallelMesh) -> None:
        """Values that are a function of seed, name and position, so that any layout starts from the same model."""
        for stage_module in stage_modules:
            stage_module.to_empty(device=mesh.device)
            cast(Decoder, stage_module).tie_weights()
            init_weights([stage_module], self.model, self.recipe.seed)

    def stage_io_meta(self, stage: int) -> tuple[Tensor, Tensor]:
        """Input: tokens or hidden states; output: hidden states or logits."""
        degrees, model = self.plan.degrees, self.model
        sequences = self.recipe.batch.sequences // degrees.dp // self.plan.microbatches
        length = self.recipe.batch.length // degrees.cp
        boundaries = self.plan.stage_layers(model.layers)

        def like(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)

        def hidden_states_after(stage: int) -> Tensor:
            dtype = precision.compute_dtype(self.recipe.precision, f"blocks.{boundaries[stage][-1]}")
            return like((sequences, length // degrees.tp, model.width), dtype)

        head = precision.compute_dtype(self.recipe.precision, "embed" if model.tied else "head")
        logits = (sequences, length, model.vocabulary // degrees.tp)
        return (
            like((sequences, length), torch.int64) if stage == 0 else hidden_states_after(stage - 1),
            like(logits, head) if stage == self.plan.num_stages - 1 else hidden_states_after(stage),
        )
