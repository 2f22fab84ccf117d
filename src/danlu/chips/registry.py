"""Find chips: Danlu's own and those of other packages, all by entry point."""

import warnings
from importlib import metadata
from pathlib import Path

import torch

from danlu.chips.descriptor import DESCRIPTOR_VERSION, ChipDescriptor
from danlu.spec.problem import SpecError, problem_at, suggest_name

ENTRY_POINT_GROUP = "danlu.chips"


class ChipError(SpecError):
    """A chip cannot be used; the message says which, why, and what to do."""

    def __init__(self, message: str) -> None:
        reason, _, suggestion = message.partition("\n    → ")
        super().__init__([problem_at(Path(ENTRY_POINT_GROUP), 1, "chip", reason, suggestion)])
        self.args = (message,)


def list_chips() -> dict[str, ChipDescriptor]:
    """Every chip that a package declares, available here or not, by name in alphabetical order."""
    found, failed = _load()
    for reason in failed.values():
        warnings.warn(reason, RuntimeWarning, stacklevel=2)
    return found


def find_chip(kind: str | None = None) -> ChipDescriptor:
    """The chip of this name; without a name, the first available accelerator in alphabetical order, else the CPU."""
    found, failed = _load()
    if kind is None:
        for reason in failed.values():
            warnings.warn(reason, RuntimeWarning, stacklevel=2)
        accelerators = (chip for name, chip in found.items() if name != "cpu" and chip.runtime.is_available())
        return next(accelerators, found["cpu"])
    if kind in failed:
        raise ChipError(failed[kind])
    if kind not in found:
        raise ChipError(f'"{kind}" is not a chip of any installed package\n    → {suggest_name(kind, list(found))}')
    if reason := found[kind].runtime.unavailable_reason():
        raise ChipError(f'chip "{kind}" is not available: {reason}')
    return found[kind]


def native_formats(device: torch.device) -> frozenset[str]:
    """Formats of `precision.matmul` that this process's device multiplies itself."""
    return frozenset() if device.type in ("cpu", "meta") else find_chip().matmul_formats()


def _load() -> tuple[dict[str, ChipDescriptor], dict[str, str]]:
    """Descriptors by name, and the reasons why other entry points failed."""
    found: dict[str, ChipDescriptor] = {}
    failed: dict[str, str] = {}
    for name, point in sorted(_entry_points().items()):
        try:
            descriptor = point.load()()
        except Exception as error:  # another package's code: any error is reported, and never stops the others
            failed[name] = f'chip "{name}" ({point.value}) failed to load: {type(error).__name__}: {error}'
            continue
        if reason := _rejection_reason(descriptor, name):
            failed[name] = f'chip "{name}" ({point.value}) cannot be used: {reason}'
        else:
            found[name] = descriptor
    if "cpu" not in found:
        raise ChipError(failed.get("cpu", "Danlu's installed metadata declares no chips: run `pip install -e .` again"))
    return found, failed


def _entry_points() -> dict[str, metadata.EntryPoint]:
    """Entry points by name; of two with one name, that of the alphabetically first package (Danlu before all)."""
    try:
        metadata.distribution("danlu")
    except metadata.PackageNotFoundError:
        message = "chips are found by installed metadata, and Danlu has none here: run `pip install -e .` in its folder"
        raise ChipError(message) from None
    points: dict[str, metadata.EntryPoint] = {}
    for point in sorted(metadata.entry_points(group=ENTRY_POINT_GROUP), key=_precedence):
        if point.name in points:
            first, second = _package(points[point.name]), _package(point)
            remedy = f"{first} is used; remove one of them"
            message = f'chip "{point.name}" is declared by both {first} and {second}: {remedy}'
            warnings.warn(message, RuntimeWarning, stacklevel=4)
        else:
            points[point.name] = point
    return points


def _package(point: metadata.EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "a package without a name"


def _precedence(point: metadata.EntryPoint) -> tuple[bool, str]:
    return (_package(point) != "danlu", _package(point))


def _rejection_reason(descriptor: object, name: str) -> str:
    """Why this is not a valid descriptor of `name`; empty when it is."""
    if not isinstance(descriptor, ChipDescriptor):
        return f"it must return a danlu.chips.ChipDescriptor, but returned {type(descriptor).__name__} instead"
    if descriptor.version != DESCRIPTOR_VERSION:
        versions = f"must be of version {DESCRIPTOR_VERSION}, but is of {descriptor.version}"
        return f"its descriptor {versions}: update the older package"
    if descriptor.name != name:
        return f'its descriptor must be named "{name}" like its entry point, but is named "{descriptor.name}"'
    return ""
