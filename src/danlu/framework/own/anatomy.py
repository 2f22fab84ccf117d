"""The layers of a module, and what is around them."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from danlu.framework.own.factory import OwnModelError
from danlu.spec.problem import nearest

LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True)
class Anatomy:
    """A module's list of layers by name; names hold for every part that is cut from it."""

    container: str
    """Name of the list; empty if there is none."""
    blocks: tuple[str, ...]
    """Names of the layers, in order."""
    outside: tuple[str, ...]
    """Names of the outermost modules that are not, and do not hold, layers."""

    def held(self, part: nn.Module) -> dict[str, nn.Module]:
        """The layers that a part has kept, by name."""
        return {name: block for name in self.blocks if has_parameters(block := part.get_submodule(name))}

    def around(self, part: nn.Module) -> dict[str, nn.Module]:
        """The modules outside of the layers that a part has kept and that have parameters."""
        return {name: module for name in self.outside if has_parameters(module := part.get_submodule(name))}


def dissect(module: nn.Module, container: str = "") -> Anatomy:
    """Find the layers of a module: the list `container`, or the largest list of modules of one class."""
    name = container or _largest_list(module)
    if not name:
        return Anatomy("", (), tuple(name for name, _ in module.named_children()))
    lists = {path: each for path, each in module.named_modules() if isinstance(each, LISTS)}
    if name not in lists:
        raise OwnModelError(
            "model.blocks", f'is "{name}", but the module has no list of that name', nearest(name, list(lists))
        )
    blocks = tuple(f"{name}.{child}" for child, _ in lists[name].named_children())
    return Anatomy(name, blocks, tuple(_outside(module, name)))


def has_parameters(module: nn.Module) -> bool:
    """Whether a module or anything in it has a parameter."""
    return next(module.parameters(), None) is not None


def shared_parameters(module: nn.Module) -> list[list[str]]:
    """Names of every parameter that has several, together."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [same for same in names.values() if len(same) > 1]


def _largest_list(module: nn.Module) -> str:
    sizes = {
        name: sum(parameter.numel() for parameter in each.parameters())
        for name, each in module.named_modules()
        if isinstance(each, LISTS) and len(each) > 1 and len({type(child) for child in each.children()}) == 1
    }
    return max(sizes, key=lambda name: sizes[name], default="")


def _outside(module: nn.Module, container: str, prefix: str = "") -> Iterator[str]:
    for name, child in module.named_children():
        path = prefix + name
        if container.startswith(f"{path}."):
            yield from _outside(child, container, f"{path}.")
        elif path != container:
            yield path
