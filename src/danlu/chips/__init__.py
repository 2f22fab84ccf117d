"""One descriptor per chip, found by entry point; and the measurements that need only one device."""

from danlu.chips.descriptor import ChipDescriptor, Runtime
from danlu.chips.registry import ChipError, find_chip, list_chips, native_formats

__all__ = ["ChipDescriptor", "ChipError", "Runtime", "find_chip", "list_chips", "native_formats"]
