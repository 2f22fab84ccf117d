"""What an operator does on this rank's tensors: FLOPs, bytes read and written, and whether it does anything at all."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from danlu.comm.record import is_collective

Signature = tuple[torch.dtype, tuple[int, ...]]
"""Dtype and shape of a tensor."""

_OVERWRITE = frozenset({"copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_", "normal_", "uniform_"})
"""Operators that do not read what they write over."""
_LOOK_UP = frozenset({"embedding", "index", "gather", "index_select"})
"""Operators that read of their first tensor only what they return."""
_ALLOCATE = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
_UNDECLARED_VIEWS = frozenset({"_unsafe_view", "_reshape_alias"})
"""Views whose declaration does not say so."""
_BOOKKEEPING = frozenset({"prim", "profiler"})
_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}


@dataclass(frozen=True, slots=True)
class Trait:
    """What is known of an operator before it runs."""

    name: str
    quiet: bool
    """Neither computes, nor moves bytes, nor makes tensors of its own: views, bookkeeping."""
    collective: bool
    in_place: bool
    """Of a collective: it uses the caller's tensors as its buffers."""
    counted: bool
    """Computes or moves bytes; not true of what only allocates, nor of collectives, which are counted by themselves."""
    overwritten: tuple[int | str, ...]
    """Arguments that are written but not read."""
    mutated: tuple[int | str, ...]
    looks_up: bool
    flops: Callable[[tuple[Any, ...], dict[str, Any], Any], float] | None


def trait(func: Any) -> Trait:
    """Read an operator's declaration."""
    namespace, _, name = func._schema.name.partition("::")
    collective = is_collective(func)
    views = name in _UNDECLARED_VIEWS or any(
        each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns
    )
    mutated = tuple(
        argument.name if argument.kwarg_only else position
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    overwritten = mutated if name in _OVERWRITE else tuple(key for key in mutated if isinstance(key, str))
    return Trait(
        name=f"{namespace}.{name}",
        quiet=namespace in _BOOKKEEPING or (views and not collective and namespace != "fsdp"),
        collective=collective,
        in_place=namespace == "c10d",
        counted=not collective and name not in _ALLOCATE,
        overwritten=overwritten,
        mutated=mutated,
        looks_up=name in _LOOK_UP,
        flops=_flops_formula(func),
    )


def traffic(
    trait: Trait, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> tuple[list[Tensor], list[Tensor], int]:
    """Tensors that go in, tensors that come out, and the bytes that are read and written for it."""
    read: list[Tensor] = []
    inputs: list[Tensor] = []
    changed: list[Tensor] = []
    for key, value in (*enumerate(args), *kwargs.items()):
        held = list(tensors(value))
        inputs += held
        if key not in trait.overwritten:
            read += held
        if key in trait.mutated:
            changed += held
    outputs = list(tensors(result)) or changed
    if trait.name == "fsdp.all_gather_copy_in":  # copies its list into a part of the buffer it returns whole
        return inputs, outputs, 2 * size(list(tensors(args[0])))
    written = size(outputs)
    taken = size(read[1:]) + written if trait.looks_up else size(read)
    return inputs, outputs, taken + written


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of an argument or a result: itself, or what its list holds."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors(each)


def size(given: list[Tensor]) -> int:
    """Bytes of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in given)


def signature(tensor: Tensor) -> Signature:
    """Dtype and shape."""
    return tensor.dtype, tuple(tensor.shape)


def written_signature(signature: Signature) -> str:
    """A signature as text: `bf16[4096, 8192]`."""
    dtype = str(signature[0]).removeprefix("torch.")
    return f"{_DTYPES.get(dtype, dtype)}{list(signature[1])}"


def _flops_formula(func: Any) -> Callable[[tuple[Any, ...], dict[str, Any], Any], float] | None:
    """The way to count an operator's FLOPs; a multiply-add is two. None for what only moves or maps bytes."""
    name = func._schema.name.partition("::")[2]
    if name.startswith("_scaled_dot_product_"):
        return _attention(func, products=5 if "backward" in name else 2)
    formula = flop_registry.get(func._overloadpacket)
    if formula is None:
        return None
    return lambda args, kwargs, result: float(formula(*args, **kwargs, out_val=result))


def _attention(func: Any, products: int) -> Callable[[tuple[Any, ...], dict[str, Any], Any], float]:
    """Attention as two products of matrices forward (scores, weighted sum), five backward (scores once more, and four).

    Of causal attention the half that is not masked is counted: what the mathematics needs and fused kernels compute.
    """
    names = [argument.name for argument in func._schema.arguments]
    where = {name: names.index(name) for name in ("query", "key", "value", "is_causal")}
    defaults = func._schema.arguments[where["is_causal"]].default_value

    def count(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
        query, key, value = (args[where[name]].shape for name in ("query", "key", "value"))
        causal = args[where["is_causal"]] if len(args) > where["is_causal"] else kwargs.get("is_causal", defaults)
        pairs = query[-2] * key[-2]
        if causal and query[-2] == key[-2]:
            pairs = query[-2] * (query[-2] + 1) // 2
        # Half the products have the width of a key, half that of a value; backward one more has that of a key.
        widths = (products + 1) // 2 * query[-1] + products // 2 * value[-1]
        return 2.0 * prod(query[:-2]) * pairs * widths

    return count
