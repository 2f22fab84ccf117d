"""The cost model: time, memory and FLOPs by pure arithmetic over descriptions. No torch."""

from danlu.cost.memory import MemoryEstimate
from danlu.cost.parallel_layout import ParallelLayout, layout_from_plan
from danlu.cost.parameter_count import (
    LayerParameters,
    count_active_parameters,
    count_embedding_parameters,
    count_layer_parameters,
    count_parameters,
    flops_per_token,
)
from danlu.cost.pipeline_schedules import pipeline_actions
from danlu.cost.pipeline_simulator import (
    Action,
    Durations,
    PipelineTimeline,
    ScheduleError,
    TimedAction,
    parse_action,
    simulate,
)
from danlu.cost.software import DANLU, Sharding, Software
from danlu.cost.step_prediction import Predictor, StepPrediction, predict

__all__ = [
    "DANLU",
    "Action",
    "Durations",
    "LayerParameters",
    "MemoryEstimate",
    "ParallelLayout",
    "PipelineTimeline",
    "Predictor",
    "ScheduleError",
    "Sharding",
    "Software",
    "StepPrediction",
    "TimedAction",
    "count_active_parameters",
    "count_embedding_parameters",
    "count_layer_parameters",
    "count_parameters",
    "flops_per_token",
    "layout_from_plan",
    "parse_action",
    "pipeline_actions",
    "predict",
    "simulate",
]
