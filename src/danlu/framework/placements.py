"""How the decoder's modules lie on the mesh: data beside the model, read by `build`."""

from collections.abc import Iterator
from typing import Literal

from torch import nn

from danlu.comm.mesh import Mesh
from danlu.framework.moe import MoeLayer
from danlu.framework.transformer import Decoder
from danlu.memory.recompute import Region
from danlu.parallel.shard import Unit
from danlu.parallel.tensor import Style


def tensor_placements(part: Decoder) -> dict[str, Style]:
    """The tensor-parallel style of every module that has one."""
    placements: dict[str, Style] = {}
    if part.embed is not None:
        placements["embed.token"] = "vocabulary"
        if part.embed.position is not None:
            placements["embed.position"] = "vocabulary"
    for layer, block in part.blocks.items():
        name = f"blocks.{layer}"
        placements |= {f"{name}.attention_norm": "sequence", f"{name}.mlp_norm": "sequence"}
        placements |= {f"{name}.attention": "gather", f"{name}.attention.o": "row"}
        placements |= {f"{name}.attention.{projection}": "column" for projection in "qkv"}
        norms = [norm for norm in ("q_norm", "k_norm") if getattr(block.attention, norm) is not None]
        placements |= {f"{name}.attention.{norm}": "heads" for norm in norms}
        mlp = block.get_submodule("mlp")
        if isinstance(mlp, MoeLayer):
            placements[f"{name}.mlp.router.gate"] = "sequence"
            if mlp.shared is not None:
                placements |= _mlp_placements(f"{name}.mlp.shared", mlp.shared)
        else:
            placements |= _mlp_placements(f"{name}.mlp", mlp)
    if part.head is not None:
        placements |= {"head.norm": "sequence", "head.score": "scores"}
    return placements


def _mlp_placements(name: str, mlp: nn.Module) -> dict[str, Style]:
    placements: dict[str, Style] = {name: "gather", f"{name}.up": "column", f"{name}.down": "row"}
    if dict(mlp.named_children()).get("gate") is not None:
        placements[f"{name}.gate"] = "column"
    return placements


def sharding_units(part: Decoder, mesh: Mesh) -> Iterator[Unit]:
    """The modules whose parameters are gathered together, inner ones first.

    A tied embedding is shared by both ends of the model, so it stays with the part itself.
    """
    for layer, block in part.blocks.items():
        mlp = block.get_submodule("mlp")
        if isinstance(mlp, MoeLayer):
            assert mesh.expert_parameters is not None
            yield Unit(f"blocks.{layer}.mlp.experts", mlp.experts, mesh.expert_parameters)
        yield Unit(f"blocks.{layer}", block, mesh.parameters)
    if not part.tied:
        if part.embed is not None:
            yield Unit("embed", part.embed, mesh.parameters)
        if part.head is not None:
            yield Unit("head", part.head, mesh.parameters, last=True)


def recompute_regions(part: Decoder, mode: Literal["selective", "full"]) -> Iterator[Region]:
    """What recompute wraps: whole blocks, or what is around the experts of one.

    Selective recompute insists on the same operations the second time. An expert layer gathers its experts'
    parameters inside the block, and the second time they are already there, so its block is taken in pieces.
    """
    for block in part.blocks.values():
        mlp = block.get_submodule("mlp")
        if mode == "selective" and isinstance(mlp, MoeLayer):
            yield Region(block, "attend")
            yield Region(mlp.experts)
            if mlp.shared is not None:
                yield Region(mlp.shared)
        else:
            yield Region(block)


def moe_layers(part: Decoder) -> Iterator[MoeLayer]:
    """Every expert layer of a part."""
    for module in part.modules():
        if isinstance(module, MoeLayer):
            yield module
