"""Quantize the matrix products of a model's layers, as its recipe says."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from danlu.chips import native_formats
from danlu.framework import precision
from danlu.framework.decoder.moe import Experts
from danlu.framework.fp8.linear import BlockScaledProduct
from danlu.framework.fp8.quantize import BlockFormat
from danlu.spec.recipe import MATMUL_BLOCKS, MatmulFormat, PrecisionConfig


class QuantizedModule(NamedTuple):
    """A module whose products may be quantized, with the unit by whose name `precision.layers` finds it."""

    unit: str
    name: str
    module: nn.Module


def linear_layers(unit: str, block: nn.Module) -> Iterator[QuantizedModule]:
    """The linear layers of a block, but for routers: those called `router`, and gates beside experts."""
    for name, module in block.named_modules():
        if type(module) is not nn.Linear:
            continue
        parents = [block.get_submodule(name.rpartition(".")[0])] if "." in name else [block]
        path = name.split(".")
        beside_experts = path[-1].endswith("gate") and any(hasattr(parent, "experts") for parent in parents)
        if "router" not in path and not beside_experts:
            yield QuantizedModule(unit, f"{unit}.{name}", module)


def apply_block_scaling(modules: Iterable[QuantizedModule], dtypes: PrecisionConfig, device: torch.device) -> None:
    """Replace the products of these modules by block-scaled ones where `dtypes` says so; parameters stay the same."""
    if not dtypes.quantizes:
        return
    natives = native_formats(device)
    products: dict[MatmulFormat, BlockScaledProduct] = {}
    for unit, name, module in modules:
        matmul = precision.matmul_format(dtypes, unit)
        if matmul == "none":
            continue
        block = dtypes.block_of(matmul)
        if matmul not in products:
            form = BlockFormat(matmul, block, _is_native(matmul, dtypes, natives))
            products[matmul] = BlockScaledProduct(form)
        product = products[matmul]
        if isinstance(module, Experts):
            module.multiply = product.multiply_expert
        elif isinstance(module, nn.Linear):
            _check_shards(name, module, block)
            module.forward = partial(product.forward_linear, module)  # type: ignore[method-assign]
        else:
            raise TypeError(f"`{name}` must be a linear layer or experts, but is {type(module).__name__} instead")


def emulated_formats(dtypes: PrecisionConfig, device: torch.device) -> list[MatmulFormat]:
    """Formats of a recipe that the device does not multiply itself."""
    used = {dtypes.matmul, *(group.matmul for group in dtypes.layers if group.matmul)} - {"none"}
    return sorted(each for each in used if not _is_native(each, dtypes, native_formats(device)))


def _is_native(matmul: MatmulFormat, dtypes: PrecisionConfig, natives: frozenset[str]) -> bool:
    return matmul in natives and dtypes.block_of(matmul) == MATMUL_BLOCKS[matmul]


def _check_shards(name: str, linear: nn.Linear, block: int) -> None:
    """Blocks of a sharded matrix are those of the whole one only if its shards are whole blocks."""
    weight = linear.weight
    if not isinstance(weight, DTensor):
        return
    for placement in weight.placements:
        if isinstance(placement, Shard) and (each := weight.to_local().shape[placement.dim]) % block:
            raise ValueError(
                f"`{name}` is sharded over `tp` into pieces of {each}, but must be into multiples of the block of "
                f"{block}, so that every layout has the same scales; a smaller `degrees.tp`, or `precision.block`"
            )


@contextmanager
def unquantized(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Compute with unquantized products inside, to compare with a model that was not quantized."""
    calls = (vars(each).get("forward") for module in modules for each in module.modules())
    owners = [getattr(call.func, "__self__", None) for call in calls if isinstance(call, partial)]
    products = {owner for owner in owners if isinstance(owner, BlockScaledProduct)}
    for product in products:
        product.enabled = False
    try:
        yield
    finally:
        for product in products:
            product.enabled = True
