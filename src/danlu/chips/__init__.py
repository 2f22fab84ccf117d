"""One descriptor a chip, found by entry point; and the measures that need nothing but one device."""

from danlu.chips.descriptor import (
    OPERATIONS,
    Capabilities,
    Collectives,
    Descriptor,
    Finding,
    Health,
    Runtime,
    SchedulerNames,
    Telemetry,
)
from danlu.chips.registry import ChipError, chips, find
from danlu.spec import Operation

__all__ = [
    "OPERATIONS",
    "Capabilities",
    "ChipError",
    "Collectives",
    "Descriptor",
    "Finding",
    "Health",
    "Operation",
    "Runtime",
    "SchedulerNames",
    "Telemetry",
    "chips",
    "find",
]
