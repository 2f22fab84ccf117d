"""Activation recomputation (checkpointing): recompute in the backward pass instead of keeping."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal, NamedTuple

from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import danlu.chips.scaled_matmul  # noqa: F401  (registers the operators of the namespace danlu)
from danlu.ops.recompute import SAVED_BY_SELECTIVE

SAVED_OPS = frozenset(f"{namespace}::{name}" for namespace, names in SAVED_BY_SELECTIVE.items() for name in names)
"""What `selective` keeps, by name: this package's own operators are registered by rooms above."""


class RecomputeRegion(NamedTuple):
    """A method of a module whose inner activations are not kept."""

    module: nn.Module
    mode: Literal["selective", "full"]
    method: str = "forward"
    uses_rng: bool = False
    """Whether it may draw random numbers, which must be the same in the recomputation."""


def apply_recompute(regions: Iterable[RecomputeRegion]) -> None:
    """Wrap every region; names of parameters stay as they are."""
    for module, mode, method, uses_rng in regions:
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": uses_rng}
        if mode == "selective":
            options["context_fn"] = partial(create_selective_checkpoint_contexts, _save_policy)
        setattr(module, method, partial(checkpoint, getattr(module, method), **options))


def wrap_recomputed(
    stage_module: nn.Module, wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]]
) -> Callable[[], None]:
    """Let `wrap` replace what every region runs, both times, given its module's name; returns what undoes it."""
    before: list[tuple[nn.Module, str, Any]] = []
    for name, module in stage_module.named_modules():
        for attribute, value in list(vars(module).items()):
            if isinstance(value, partial) and value.func is checkpoint:
                function, *rest = value.args
                before.append((module, attribute, value))
                setattr(module, attribute, partial(checkpoint, wrap(name, function), *rest, **value.keywords))

    def undo() -> None:
        for module, attribute, value in before:
            setattr(module, attribute, value)

    return undo


def _save_policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator.name() in SAVED_OPS else CheckpointPolicy.PREFER_RECOMPUTE
