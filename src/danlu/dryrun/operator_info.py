"""FLOPs and bytes of an operator on this rank's tensors, and whether it computes anything at all."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from danlu.comm.collective_call import is_collective
from danlu.ops import attention

Signature = tuple[torch.dtype, tuple[int, ...]]
"""Dtype and shape of a tensor."""

_OVERWRITE = frozenset({"copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_", "normal_", "uniform_"})
"""Operators that do not read what they overwrite."""
_LOOK_UP = frozenset({"embedding", "index", "gather", "index_select"})
"""Operators that read only the returned elements of their first tensor."""
_ALLOCATE = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
_UNDECLARED_VIEWS = frozenset({"_unsafe_view", "_reshape_alias"})
"""Views that are not declared as such."""
_BOOKKEEPING = frozenset({"prim", "profiler"})
_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}


@dataclass(frozen=True, slots=True)
class OperatorInfo:
    """What is known about an operator before it runs."""

    name: str
    is_noop: bool
    """Neither computes, nor moves bytes, nor allocates: views, bookkeeping."""
    collective: bool
    in_place: bool
    """For a collective: it uses the caller's tensors as buffers."""
    is_counted: bool
    """Computes or moves bytes; false for what only allocates, and for collectives, which are counted separately."""
    overwritten: tuple[int | str, ...]
    """Arguments that are written but not read."""
    mutated: tuple[int | str, ...]
    is_lookup: bool
    flops: Callable[[tuple[Any, ...], dict[str, Any], Any], float] | None


def operator_info(func: Any) -> OperatorInfo:
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
    return OperatorInfo(
        name=f"{namespace}.{name}",
        is_noop=namespace in _BOOKKEEPING or (views and not collective and namespace != "fsdp"),
        collective=collective,
        in_place=namespace == "c10d",
        is_counted=not collective and name not in _ALLOCATE,
        overwritten=overwritten,
        mutated=mutated,
        is_lookup=name in _LOOK_UP,
        flops=_flops_formula(func),
    )


def operator_traffic(
    info: OperatorInfo, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> tuple[list[Tensor], list[Tensor], int]:
    """Input tensors, output tensors, and bytes read and written."""
    read: list[Tensor] = []
    inputs: list[Tensor] = []
    changed: list[Tensor] = []
    for key, value in (*enumerate(args), *kwargs.items()):
        held = list(iter_tensors(value))
        inputs += held
        if key not in info.overwritten:
            read += held
        if key in info.mutated:
            changed += held
    outputs = list(iter_tensors(result)) or changed
    if info.name == "fsdp.all_gather_copy_in":  # copies its list into a slice of the buffer that it returns
        return inputs, outputs, 2 * tensor_bytes(list(iter_tensors(args[0])))
    written = tensor_bytes(outputs)
    taken = tensor_bytes(read[1:]) + written if info.is_lookup else tensor_bytes(read)
    return inputs, outputs, taken + written


def iter_tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of an argument or a result: itself, or those in its list."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from iter_tensors(each)


def tensor_bytes(given: list[Tensor]) -> int:
    """Bytes of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in given)


def tensor_signature(tensor: Tensor) -> Signature:
    """Dtype and shape."""
    return tensor.dtype, tuple(tensor.shape)


def format_signature(signature: Signature) -> str:
    """A signature as text: `bf16[4096, 8192]`."""
    dtype = str(signature[0]).removeprefix("torch.")
    return f"{_DTYPES.get(dtype, dtype)}{list(signature[1])}"


def _flops_formula(func: Any) -> Callable[[tuple[Any, ...], dict[str, Any], Any], float] | None:
    """The formula for an operator's FLOPs; a multiply-add is two. None for what only moves or maps bytes."""
    name = func._schema.name.partition("::")[2]
    if name.startswith("_scaled_dot_product_"):
        return _attention(func, attention.BACKWARD_PRODUCTS if "backward" in name else attention.FORWARD_PRODUCTS)
    formula = flop_registry.get(func._overloadpacket)
    if formula is None:
        return None
    return lambda args, kwargs, result: float(formula(*args, **kwargs, out_val=result))


def _attention(func: Any, products: int) -> Callable[[tuple[Any, ...], dict[str, Any], Any], float]:
    """The FLOPs of a fused attention kernel from its arguments."""
    names = [argument.name for argument in func._schema.arguments]
    where = {name: names.index(name) for name in ("query", "key", "value", "is_causal")}
    defaults = func._schema.arguments[where["is_causal"]].default_value

    def count(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
        query, key, value = (args[where[name]].shape for name in ("query", "key", "value"))
        causal = args[where["is_causal"]] if len(args) > where["is_causal"] else kwargs.get("is_causal", defaults)
        pairs = attention.causal_pairs(query[-2], key[-2]) if causal else query[-2] * key[-2]
        return attention.core_flops(prod(query[:-2]), pairs, query[-1], value[-1], products)

    return count
