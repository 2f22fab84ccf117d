"""From the name of a factory to its module, with or without memory for the parameters."""

import importlib
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from danlu.spec.own_model import OwnModel


class OwnModelError(RuntimeError):
    """A model does not offer what a setting asks of it; `key` names the setting."""

    def __init__(self, key: str, message: str, suggestion: str) -> None:
        self.key, self.message, self.suggestion = key, message, suggestion
        super().__init__(f"`{key}` {message}; try: {suggestion}")


def make(own: OwnModel) -> nn.Module:
    """The module itself, as the user's code makes it."""
    made = _find(own)(**own.arguments)
    if not isinstance(made, nn.Module):
        raise OwnModelError(
            "model.factory",
            f'"{own.factory}" returned {type(made).__name__}, but must return an nn.Module',
            "return the module from it",
        )
    # transformers' models fill a cache for generation unless told otherwise, and recompute would fill it twice.
    if getattr(getattr(made, "config", None), "use_cache", False):
        made.config.use_cache = False  # type: ignore[union-attr]
    return made.train()


def make_seeded(own: OwnModel, seed: int) -> nn.Module:
    """The module with the first values that the user's code gives it from `seed`, the same on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make(own)


def make_empty(own: OwnModel) -> nn.Module:
    """The module with parameters that take no memory; its buffers are real."""
    with _parameters_on_meta():
        return make(own)


def _find(own: OwnModel) -> type[nn.Module]:
    """What the factory's name stands for."""
    module_name, _, path = own.factory.partition(":")
    folder = str(Path(own.path).absolute())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found = importlib.import_module(module_name)
        for name in path.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        raise OwnModelError(
            "model.factory",
            f'"{own.factory}" is not found: {error}',
            f"`path` is the folder that holds {module_name.partition('.')[0]}, now {folder}; or install it",
        ) from error
    if not callable(found):
        raise OwnModelError(
            "model.factory", f'"{own.factory}" is {type(found).__name__}, but must be callable', "name a function"
        )
    return found  # type: ignore[return-value]


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Let go of the memory of every parameter as soon as a module takes it; those shared by modules stay shared."""
    register = nn.Module.register_parameter
    taken: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}

    def register_empty(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is None or parameter.is_meta:
            return
        known, empty = taken.get(id(parameter), (None, None))
        if known is None or known() is not parameter:
            empty = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            taken[id(parameter)] = (weakref.ref(parameter), empty)
        module._parameters[name] = empty

    nn.Module.register_parameter = register_empty  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
