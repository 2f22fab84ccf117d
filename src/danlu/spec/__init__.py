"""The descriptions that all rooms share: frozen, strict, and round-tripping through text. No torch."""

from danlu.spec.cluster import (
    Chip,
    Cluster,
    CollectiveCurve,
    CollectiveOp,
    FailureRates,
    NetworkLevel,
    OperatorName,
    StorageTier,
    TimingCurve,
)
from danlu.spec.event import (
    EndEvent,
    EvaluationEvent,
    Event,
    PreflightEvent,
    RankFailureEvent,
    RecoveryEvent,
    ResumeEvent,
    SaveEvent,
    SpikeEvent,
    StartEvent,
    StepEvent,
    WarningEvent,
)
from danlu.spec.load import load_cluster, load_plan, load_recipe
from danlu.spec.model import Model, Moe, RopeScaling
from danlu.spec.plan import Degrees, PipelineConfig, Plan
from danlu.spec.problem import Problem, SpecError
from danlu.spec.recipe import Recipe
from danlu.spec.run_folder import RunFolder

__all__ = [
    "Chip",
    "Cluster",
    "CollectiveCurve",
    "CollectiveOp",
    "Degrees",
    "EndEvent",
    "EvaluationEvent",
    "Event",
    "FailureRates",
    "Model",
    "Moe",
    "NetworkLevel",
    "OperatorName",
    "PipelineConfig",
    "Plan",
    "PreflightEvent",
    "Problem",
    "RankFailureEvent",
    "Recipe",
    "RecoveryEvent",
    "ResumeEvent",
    "RopeScaling",
    "RunFolder",
    "SaveEvent",
    "SpecError",
    "SpikeEvent",
    "StartEvent",
    "StepEvent",
    "StorageTier",
    "TimingCurve",
    "WarningEvent",
    "load_cluster",
    "load_plan",
    "load_recipe",
]
