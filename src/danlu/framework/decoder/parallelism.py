"""How the decoder's modules are placed on the mesh: data beside the model, used by `DecoderAdapter`."""

from collections.abc import Container, Iterator, Sequence
from typing import cast

from torch import nn

from danlu.comm.mesh import ParallelMesh
from danlu.framework.decoder.block import Block
from danlu.framework.decoder.decoder import Decoder
from danlu.framework.decoder.latent_attention import LatentAttention
from danlu.framework.decoder.moe import MoeLayer
from danlu.framework.fp8.apply import QuantizedModule, linear_layers
from danlu.memory.recompute import RecomputeRegion
from danlu.parallel.fsdp import FsdpUnit
from danlu.parallel.tensor import TPStyle
from danlu.spec.recompute import RecomputeMode


def decoder_tp_plan(stage_module: Decoder, regathered: Container[int] = ()) -> dict[str, TPStyle]:
    """The tensor-parallel style of every module that has one; layers `regathered` gather inputs again backward."""
    placements: dict[str, TPStyle] = {}
    if stage_module.embed is not None:
        placements["embed.token"] = "vocabulary"
        if stage_module.embed.position is not None:
            placements["embed.position"] = "vocabulary"
    for name, layer, block in decoder_layers(stage_module):
        placements |= {f"{name}.attention_norm": "sequence", f"{name}.mlp_norm": "sequence"}
        gather: TPStyle = "regather" if layer in regathered else "gather"
        placements |= _attention_placements(f"{name}.attention", block.get_submodule("attention"), gather)
        post = [norm for norm in ("attention_post_norm", "mlp_post_norm") if getattr(block, norm) is not None]
        placements |= {f"{name}.{norm}": "sequence" for norm in post}
        mlp = block.get_submodule("mlp")
        if isinstance(mlp, MoeLayer):
            placements[f"{name}.mlp.router.gate"] = "sequence"
            if mlp.shared is not None:
                placements |= _mlp_placements(f"{name}.mlp.shared", mlp.shared, gather)
        else:
            placements |= _mlp_placements(f"{name}.mlp", mlp, gather)
    if stage_module.head is not None:
        in_parts = stage_module.head.score.chunks > 1
        placements |= {"head.norm": "sequence", "head.score": "logits in parts" if in_parts else "logits"}
    for depth in range(len(stage_module.mtp or ())):
        parts = ("embed_norm", "hidden_norm", "project", "norm")
        placements |= {f"mtp.{depth}.{part}": "sequence" for part in parts}
    return placements


def _attention_placements(name: str, attention: nn.Module, gather: TPStyle) -> dict[str, TPStyle]:
    children = {child for child, module in attention.named_children() if module is not None}
    if isinstance(attention, LatentAttention):
        # Positions stay sharded up to the narrow latents; these are kept gathered for the backward pass.
        placements: dict[str, TPStyle] = {
            f"{name}.{child}": "sequence" for child in ("q_a", "q_a_norm", "kv_a", "kv_a_norm") if child in children
        }
        placements[f"{name}.inputs"] = "joint gather"
        placements |= {f"{name}.{child}": "joint column" for child in ("q", "q_b", "kv_b") if child in children}
    else:
        placements = {name: gather} | {f"{name}.{projection}": "column" for projection in "qkv"}
        placements |= {f"{name}.{norm}": "heads" for norm in ("q_norm", "k_norm") if norm in children}
        if "sinks" in children:
            placements[f"{name}.sinks"] = "per head"
    return placements | {f"{name}.o": "row"}


def _mlp_placements(name: str, mlp: nn.Module, gather: TPStyle) -> dict[str, TPStyle]:
    placements: dict[str, TPStyle] = {name: gather, f"{name}.up": "column", f"{name}.down": "row"}
    if dict(mlp.named_children()).get("gate") is not None:
        placements[f"{name}.gate"] = "column"
    return placements


def decoder_fsdp_units(stage_module: Decoder, mesh: ParallelMesh) -> Iterator[FsdpUnit]:
    """The modules whose parameters are gathered together, inner ones first.

    A tied embedding is used by both ends of the model, so it stays with the root.
    """
    for name, _, block in decoder_layers(stage_module):
        mlp = block.get_submodule("mlp")
        if isinstance(mlp, MoeLayer):
            assert mesh.expert_fsdp_mesh is not None
            yield FsdpUnit(f"{name}.mlp.experts", mlp.experts, mesh.expert_fsdp_mesh)
        if name.startswith("blocks."):
            yield FsdpUnit(name, block, mesh.fsdp_mesh)
    for depth, module in enumerate(stage_module.mtp or ()):
        yield FsdpUnit(f"mtp.{depth}", module, mesh.fsdp_mesh)
    if not stage_module.tied:
        if stage_module.embed is not None:
            yield FsdpUnit("embed", stage_module.embed, mesh.fsdp_mesh)
        if stage_module.head is not None:
            yield FsdpUnit("head", stage_module.head, mesh.fsdp_mesh, keep_unsharded=True)


def decoder_quantized_modules(stage_module: Decoder) -> Iterator[QuantizedModule]:
    """The modules whose matrix products a recipe may quantize: linear layers of blocks but for routers, and experts."""
    for name, _, block in decoder_layers(stage_module):
        unit = name.removesuffix(".block")  # a module of multi-token prediction is one unit; its projection stays high
        yield from (each._replace(unit=unit) for each in linear_layers(name, block))
        mlp = block.get_submodule("mlp")
        if isinstance(mlp, MoeLayer):
            yield QuantizedModule(f"{name}.mlp.experts", f"{name}.mlp.experts", mlp.experts)


def decoder_recompute_regions(stage_module: Decoder, modes: Sequence[RecomputeMode]) -> Iterator[RecomputeRegion]:
    """What recompute wraps, by the modes of the model's layers: full blocks, or the modules around the experts of one.

    Selective recompute requires the same operations the second time. An MoE layer gathers its experts' parameters
    inside the block, and the second time they are already there, so its block is recomputed in several regions.
    """
    for _, layer, block in decoder_layers(stage_module):
        mlp, mode = block.get_submodule("mlp"), modes[layer]
        if mode == "selective" and isinstance(mlp, MoeLayer):
            yield RecomputeRegion(block, mode, "attention_residual")
            yield RecomputeRegion(mlp.experts, mode)
            if mlp.shared is not None:
                yield RecomputeRegion(mlp.shared, mode)
        elif mode != "none":
            yield RecomputeRegion(block, mode)


def decoder_layers(stage_module: Decoder) -> Iterator[tuple[str, int, Block]]:
    """Every layer of a stage module: its name, its number, itself; one of multi-token prediction counts as the last."""
    for layer, block in stage_module.blocks.items():
        yield f"blocks.{layer}", int(layer), cast(Block, block)
    for depth, module in enumerate(stage_module.mtp or ()):
        yield f"mtp.{depth}.block", stage_module.model_layers - 1, cast(Block, module.block)


def moe_layers(stage_module: Decoder) -> Iterator[MoeLayer]:
    """Every MoE layer of a stage module."""
    for module in stage_module.modules():
        if isinstance(module, MoeLayer):
            yield module
