"""One forward pass without memory, to learn how a module uses its layers."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from danlu.framework.own.anatomy import Anatomy
from danlu.framework.own.factory import OwnModelError, make
from danlu.spec.own_model import OwnModel


@dataclass
class Rehearsal:
    """What was seen. Tensors are meta tensors: shapes and dtypes."""

    scores: Tensor = field(default_factory=lambda: torch.empty(0, device="meta"))
    before: dict[str, Any] = field(default_factory=dict)
    """What every module that was called before the first layer returned."""
    after: list[str] = field(default_factory=list)
    """Modules that were called after the first layer began."""
    streams: list[Tensor] = field(default_factory=list)
    """What entered the first layer, and what left every layer."""
    tuples: int = 0
    """How many values a layer returns in a tuple; 0 if it returns the stream itself."""
    unchained: str = ""
    """Why the layers are no chain, in which each takes what the one before returned; empty if they are."""
    failed: str = ""
    """Why the module cannot be run on tensors without memory; nothing else was seen then."""


def rehearse(own: OwnModel, anatomy: Anatomy, sequences: int, length: int) -> Rehearsal:
    """Make the module on tensors without memory and run its forward once, on a batch of this size."""
    seen, vocabulary = Rehearsal(), own.vocabulary
    with without_memory(), torch.no_grad():
        module = make(own)
        for name in anatomy.outside:
            module.get_submodule(name).register_forward_hook(partial(_see_outside, seen, name), with_kwargs=True)
        for name in anatomy.blocks:
            module.get_submodule(name).register_forward_hook(partial(_see_block, seen, name), with_kwargs=True)
        try:
            output = module(torch.zeros(sequences, length, dtype=torch.int64))
        except Exception as error:  # the user's code and torch's shape functions: whatever they raise is told
            return Rehearsal(failed=f"{type(error).__name__}: {error}")
        scores = scores_of(output)
    seen.scores, seen.before = _on_meta(scores), tree_map(_on_meta, seen.before)
    seen.streams = [_on_meta(stream) for stream in seen.streams]
    if seen.scores.shape != (sequences, length, vocabulary):
        raise OwnModelError(
            "model.vocabulary",
            f"is {vocabulary}, so that tokens of shape {[sequences, length]} must give scores of shape "
            f"{[sequences, length, vocabulary]}, but the module returned {list(seen.scores.shape)}",
            "`vocabulary` is the last dimension of what the module returns",
        )
    if not seen.unchained and len(seen.streams) != len(anatomy.blocks) + 1:
        called = max(0, len(seen.streams) - 1)
        seen.unchained = f"{called} of its {len(anatomy.blocks)} layers were called"
    return seen


@contextmanager
def without_memory() -> Iterator[None]:
    """Tensors made inside have shapes and dtypes only; torch does not log what fails, because it is raised anyway."""
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


def scores_of(output: Any) -> Tensor:
    """The scores in what a module returns: a tensor, or an object with `logits` (as of transformers)."""
    scores = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(scores, Tensor):
        raise OwnModelError(
            "model.factory",
            f"makes a module that returns {type(output).__name__}, but must return a tensor of scores",
            "return the scores, or an object whose `logits` they are",
        )
    return scores


def stream_of(output: Any) -> Any:
    """The stream in what a layer returns: the tensor, or the first of a tuple."""
    return output[0] if isinstance(output, tuple) and output else output


def _see_outside(
    seen: Rehearsal, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> None:
    if seen.streams:
        seen.after.append(name)
    else:
        seen.before[name] = output


def _see_block(
    seen: Rehearsal, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> None:
    if seen.unchained:
        return  # the first reason is the one to tell
    stream = stream_of(output)
    given = args[0] if args else None
    if not isinstance(given, Tensor) or not isinstance(stream, Tensor):
        seen.unchained = f"layer {name} must take the stream as its first argument and return it, but does not"
    elif seen.streams and given is not seen.streams[-1]:
        seen.unchained = f"layer {name} was not given what the layer before it returned"
    else:
        seen.tuples = len(output) if isinstance(output, tuple) else 0
        seen.streams = [*(seen.streams or [given]), stream]
