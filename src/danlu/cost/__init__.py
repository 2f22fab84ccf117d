"""What things cost, by pure arithmetic over descriptions. No torch."""

from danlu.cost.layout import Layout, layout_of
from danlu.cost.memory import Memory
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
from danlu.cost.software import OURS, Sharding, Software
from danlu.cost.step import Prediction, Predictor, predict

__all__ = [
    "OURS",
    "Action",
    "Durations",
    "LayerParameters",
    "Layout",
    "Memory",
    "Prediction",
    "Predictor",
    "ScheduleError",
    "Sharding",
    "Slot",
    "Software",
    "Timeline",
    "actions_of",
    "active_parameters",
    "flops_per_token",
    "layer_parameters",
    "layout_of",
    "lookup_parameters",
    "parameters",
    "parse_action",
    "predict",
    "simulate",
]
