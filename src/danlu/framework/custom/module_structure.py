"""The layers of a module, and the modules around them."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from danlu.framework.custom.construct import CustomModelError
from danlu.spec.problem import suggest_name

LAYER_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True)
class ModuleStructure:
    """A module's list of layers by name; the names are the same in every stage module made from it."""

    layer_list: str
    """Name of the list; empty if there is none."""
    blocks: tuple[str, ...]
    """Names of the layers, in order."""
    outer_modules: tuple[str, ...]
    """Names of the outermost modules that neither are nor contain layers."""

    def layers_in(self, stage_module: nn.Module) -> dict[str, nn.Module]:
        """The layers that a stage module has kept, by name."""
        return {name: block for name in self.blocks if has_parameters(block := stage_module.get_submodule(name))}

    def outer_modules_in(self, stage_module: nn.Module) -> dict[str, nn.Module]:
        """The modules around the layers that a stage module has kept and that have parameters."""
        return {
            name: module for name in self.outer_modules if has_parameters(module := stage_module.get_submodule(name))
        }


def find_layers(module: nn.Module, container: str = "") -> ModuleStructure:
    """Find the layers of a module: the list `container`, or the largest list of modules of one class."""
    name = container or _largest_list(module)
    if not name:
        return ModuleStructure("", (), tuple(name for name, _ in module.named_children()))
    lists = {path: each for path, each in module.named_modules() if isinstance(each, LAYER_CONTAINERS)}
    if name not in lists:
        raise CustomModelError(
            "model.blocks", f'is "{name}", but the module has no list of that name', suggest_name(name, list(lists))
        )
    blocks = tuple(f"{name}.{child}" for child, _ in lists[name].named_children())
    return ModuleStructure(name, blocks, tuple(_outside(module, name)))


def has_parameters(module: nn.Module) -> bool:
    """Whether a module or anything in it has a parameter."""
    return next(module.parameters(), None) is not None


def tied_parameters(module: nn.Module) -> list[list[str]]:
    """The names of every parameter that has several, as groups."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [aliases for aliases in names.values() if len(aliases) > 1]


def _largest_list(module: nn.Module) -> str:
    sizes = {
        name: sum(parameter.numel() for parameter in each.parameters())
        for name, each in module.named_modules()
        if isinstance(each, LAYER_CONTAINERS) and len(each) > 1 and len({type(child) for child in each.children()}) == 1
    }
    return max(sizes, key=lambda name: sizes[name], default="")


def _outside(module: nn.Module, container: str, prefix: str = "") -> Iterator[str]:
    for name, child in module.named_children():
        path = prefix + name
        if container.startswith(f"{path}."):
            yield from _outside(child, container, f"{path}.")
        elif path != container:
            yield path
