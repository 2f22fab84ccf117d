"""What things cost, by pure arithmetic over descriptions. No torch."""

from danlu.cost.model import (
    LayerParameters,
    active_parameters,
    flops_per_token,
    layer_parameters,
    lookup_parameters,
    parameters,
)
from danlu.cost.pipeline import Action, Durations, ScheduleError, Slot, Timeline, parse_action, simulate
from danlu.cost.schedule import actions_of

__all__ = [
    "Action",
    "Durations",
    "LayerParameters",
    "ScheduleError",
    "Slot",
    "Timeline",
    "actions_of",
    "active_parameters",
    "flops_per_token",
    "layer_parameters",
    "lookup_parameters",
    "parameters",
    "parse_action",
    "simulate",
]
