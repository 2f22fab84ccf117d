"""One forward pass on FakeTensors, to learn how a module uses its layers."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from danlu.framework.custom.construct import CustomModelError, build_module
from danlu.framework.custom.experts import balance_experts
from danlu.framework.custom.module_structure import ModuleStructure
from danlu.spec.custom_model import CustomModel
from danlu.torch_compat import FakeTensorMode, tree_map


@dataclass
class ForwardTrace:
    """What the forward did. Tensors are meta tensors: shapes and dtypes."""

    logits: Tensor = field(default_factory=lambda: torch.empty(0, device="meta"))
    called_before: dict[str, Any] = field(default_factory=dict)
    """Outputs of the modules that were called before the first layer."""
    called_after: list[str] = field(default_factory=list)
    """Modules that were called after the first layer began."""
    hidden_states: list[Tensor] = field(default_factory=list)
    """Input of the first layer, and the output of every layer."""
    output_tuple_size: int = 0
    """How many values a layer returns in a tuple; 0 if it returns the hidden states alone."""
    not_sequential: str = ""
    """Why the layers are not sequential (each takes what the previous one returned); empty if they are."""
    forward_error: str = ""
    """Why the module does not run on FakeTensors; nothing else is recorded then."""


def trace_forward(custom_model: CustomModel, structure: ModuleStructure, sequences: int, length: int) -> ForwardTrace:
    """Build the module on FakeTensors and run its forward once, on a batch of this size."""
    trace, vocabulary = ForwardTrace(), custom_model.vocabulary
    with fake_tensors(), torch.no_grad():
        module = build_module(custom_model)
        balance_experts(module)
        for name in structure.outer_modules:
            module.get_submodule(name).register_forward_hook(
                partial(_trace_outer_module, trace, name), with_kwargs=True
            )
        for name in structure.blocks:
            module.get_submodule(name).register_forward_hook(partial(_trace_layer, trace, name), with_kwargs=True)
        try:
            output = module(torch.zeros(sequences, length, dtype=torch.int64))
        except Exception as error:  # the user's code and torch's shape functions may raise anything
            return ForwardTrace(forward_error=f"{type(error).__name__}: {error}")
        logits = get_logits(output)
    trace.logits, trace.called_before = _on_meta(logits), tree_map(_on_meta, trace.called_before)
    trace.hidden_states = [_on_meta(hidden_states) for hidden_states in trace.hidden_states]
    if trace.logits.shape != (sequences, length, vocabulary):
        raise CustomModelError(
            "model.vocabulary",
            f"is {vocabulary}, so tokens of shape {[sequences, length]} must give logits of shape "
            f"{[sequences, length, vocabulary]}, but the module returned {list(trace.logits.shape)}",
            "`vocabulary` is the last dimension of what the module returns",
        )
    if not trace.not_sequential and len(trace.hidden_states) != len(structure.blocks) + 1:
        called = max(0, len(trace.hidden_states) - 1)
        trace.not_sequential = f"{called} of its {len(structure.blocks)} layers were called"
    return trace


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Tensors made inside are FakeTensors; torch does not log failures, because they are raised anyway."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with FakeTensorMode():
            yield
    finally:
        logger.setLevel(before)


def _on_meta(value: Any) -> Any:
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, Tensor) else value


def get_logits(output: Any) -> Tensor:
    """The logits in what a module returns: a tensor, or an object with `logits` (as transformers returns)."""
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise CustomModelError(
            "model.factory",
            f"makes a module that returns {type(output).__name__}, but must return a tensor of logits",
            "return the logits, or an object with `logits`",
        )
    return logits


def get_hidden_states(output: Any) -> Any:
    """The hidden states in what a layer returns: the tensor, or the first of a tuple."""
    return output[0] if isinstance(output, tuple) and output else output


def _trace_outer_module(
    trace: ForwardTrace, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> None:
    if trace.hidden_states:
        trace.called_after.append(name)
    else:
        trace.called_before[name] = output


def _trace_layer(
    trace: ForwardTrace, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> None:
    if trace.not_sequential:
        return  # report the first reason
    hidden_states = get_hidden_states(output)
    given = args[0] if args else None
    if not isinstance(given, Tensor) or not isinstance(hidden_states, Tensor):
        trace.not_sequential = (
            f"layer {name} must take the hidden states as its first argument and return them, but does not"
        )
    elif trace.hidden_states and given is not trace.hidden_states[-1]:
        trace.not_sequential = f"layer {name} was not given what the previous layer returned"
    else:
        trace.output_tuple_size = len(output) if isinstance(output, tuple) else 0
        trace.hidden_states = [*(trace.hidden_states or [given]), hidden_states]
