"""Import a factory by name and build its module, on the CPU or on the meta device."""

import importlib
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from danlu.spec.custom_model import CustomModel


class CustomModelError(RuntimeError):
    """A model does not support what a setting asks for; `key` names the setting."""

    def __init__(self, key: str, message: str, suggestion: str) -> None:
        self.key, self.message, self.suggestion = key, message, suggestion
        super().__init__(f"`{key}` {message}; try: {suggestion}")


def build_module(custom_model: CustomModel) -> nn.Module:
    """Build the module with the user's factory."""
    try:
        module = _find(custom_model)(**custom_model.arguments)
    except CustomModelError:
        raise
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise CustomModelError(
            "model.factory",
            f'"{custom_model.factory}" raised {type(error).__name__}: {error}',
            "fix it, or `arguments`",
        ) from error
    if not isinstance(module, nn.Module):
        raise CustomModelError(
            "model.factory",
            f'"{custom_model.factory}" returned {type(module).__name__}, but must return an nn.Module',
            "return the module from it",
        )
    # transformers' models fill a KV cache by default, and recompute would fill it twice.
    if getattr(getattr(module, "config", None), "use_cache", False):
        module.config.use_cache = False  # type: ignore[union-attr]
    return module.train()


def build_seeded_module(custom_model: CustomModel, seed: int) -> nn.Module:
    """Build the module with the initial values its code draws from `seed`, the same on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build_module(custom_model)


def build_meta_module(custom_model: CustomModel) -> nn.Module:
    """Build the module with its parameters on the meta device; its buffers are real."""
    with _parameters_on_meta():
        return build_module(custom_model)


def _find(custom_model: CustomModel) -> type[nn.Module]:
    """Import the factory."""
    module_name, _, path = custom_model.factory.partition(":")
    folder = str(Path(custom_model.path).absolute())
    _refuse_standard_library(custom_model.factory, module_name.partition(".")[0], Path(folder))
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        factory_function = importlib.import_module(module_name)
        for name in path.split("."):
            factory_function = getattr(factory_function, name)
    except (Exception, SystemExit) as error:  # importing runs the user's code
        if not isinstance(error, ImportError | AttributeError):
            raise CustomModelError(
                "model.factory",
                f'"{custom_model.factory}" cannot be imported: {type(error).__name__}: {error}',
                f"python -c 'import {module_name}' in {folder} shows where",
            ) from error
        raise CustomModelError(
            "model.factory",
            f'"{custom_model.factory}" is not found: {error}',
            f"`path` is the folder that holds {module_name.partition('.')[0]}, now {folder}; or install it",
        ) from error
    if not callable(factory_function):
        raise CustomModelError(
            "model.factory",
            f'"{custom_model.factory}" is {type(factory_function).__name__}, but must be callable',
            "name a function",
        )
    return factory_function  # type: ignore[return-value]


def _refuse_standard_library(factory: str, top: str, folder: Path) -> None:
    """Refuse the standard library: it builds no nn.Module, and some of it (`os:system`) must not be called to check."""
    is_local = (folder / f"{top}.py").exists() or (folder / top).exists()
    if top in sys.stdlib_module_names and not is_local:
        raise CustomModelError(
            "model.factory",
            f'"{factory}" is in the standard library, which builds no nn.Module',
            "name a function or class of yours, and its folder under `path`",
        )


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Free the memory of every parameter as soon as a module registers it; tied parameters stay tied."""
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
