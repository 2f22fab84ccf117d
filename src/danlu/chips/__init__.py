"""One descriptor per chip, found by entry point; and the measurements that need only one device."""

from danlu.chips.descriptor import (
    OPERATIONS,
    Capabilities,
    ChipDescriptor,
    CollectiveSupport,
    Health,
    HealthCheckResult,
    Runtime,
    SchedulerResources,
    Telemetry,
)
from danlu.chips.registry import ChipError, find_chip, list_chips
from danlu.spec import CollectiveOp

__all__ = [
    "OPERATIONS",
    "Capabilities",
    "ChipDescriptor",
    "ChipError",
    "CollectiveOp",
    "CollectiveSupport",
    "Health",
    "HealthCheckResult",
    "Runtime",
    "SchedulerResources",
    "Telemetry",
    "find_chip",
    "list_chips",
]
