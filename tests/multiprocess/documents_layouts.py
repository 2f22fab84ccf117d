"""Layouts whose training on packed documents must equal that on each document alone."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import layouts
from brought import VOCABULARY

from danlu.spec.custom_model import CustomModel
from danlu.spec.plan import Degrees, PipelineConfig, Plan
from danlu.spec.recipe import BatchConfig, DataConfig, Recipe

STEPS = 5


@dataclass(frozen=True)
class Packed:
    """A model, described or brought, and the plan it is trained with."""

    name: str
    model: str
    plan: Plan
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def is_brought(self) -> bool:
        return self.model in ("llama", "qwen3")


def recipe(packed: Packed, shards: str) -> Recipe:
    """A few steps in fp32 on rows that hold several documents each."""
    made = layouts.recipe("tiny-llama" if packed.is_brought else packed.model, shards, packed.changes)
    changes: dict[str, Any] = {
        "steps": STEPS,
        "batch": BatchConfig(sequences=8, length=32),
        "data": DataConfig(shards=shards, document_mask=True),
    }
    if packed.is_brought:
        folder = str(Path(__file__).parent)
        changes["model"] = CustomModel(factory=f"brought:{packed.model}", path=folder, vocabulary=VOCABULARY)
    return made.model_copy(update=changes)


def _plan(microbatches: int = 1, schedule: Any = "1f1b", per_rank: int = 1, **settings: Any) -> Plan:
    degrees = Degrees(**{axis: settings.pop(axis) for axis in list(settings) if axis in Degrees.model_fields})
    pipeline = PipelineConfig(schedule=schedule, stages_per_rank=per_rank)
    return Plan(degrees=degrees, microbatches=microbatches, pipeline=pipeline, **settings)


BY_BIAS = {"balance": "bias", "score": "sigmoid"}
"""Experts without an auxiliary loss, which is over sequences and not over documents."""
LAYOUTS = [
    Packed("one rank", "tiny-llama", _plan()),
    Packed("accumulate 4", "tiny-llama", _plan(microbatches=4)),
    Packed("fsdp", "tiny-llama", _plan(shard=2)),
    Packed("hsdp", "tiny-llama", _plan(replicate=2, shard=2)),
    Packed("tp", "tiny-llama", _plan(tp=2)),
    Packed("tp, regathered", "tiny-llama", _plan(tp=2, regather_inputs=True)),
    Packed("cp", "tiny-llama", _plan(cp=2)),
    Packed("cp × tp", "tiny-llama", _plan(cp=2, tp=2)),
    Packed("cp × fsdp, recompute full", "tiny-llama", _plan(cp=2, shard=2, recompute="full")),
    Packed("gpipe", "tiny-llama", _plan(pp=2, microbatches=4, schedule="gpipe")),
    Packed("1f1b", "tiny-llama", _plan(pp=2, microbatches=4)),
    Packed("interleaved", "tiny-llama", _plan(pp=2, microbatches=4, schedule="interleaved", per_rank=2)),
    Packed("zero-bubble", "tiny-llama", _plan(pp=2, microbatches=4, schedule="zero-bubble", per_rank=2)),
    Packed("zbv", "tiny-llama", _plan(pp=2, microbatches=4, schedule="zbv", per_rank=2)),
    Packed("fsdp × 1f1b", "tiny-llama", _plan(shard=2, pp=2, microbatches=4)),
    Packed("cp × zbv", "tiny-llama", _plan(cp=2, pp=2, microbatches=4, schedule="zbv", per_rank=2)),
    Packed("fsdp, recompute full", "tiny-llama", _plan(shard=2, recompute="full")),
    Packed("fsdp, recompute selective", "tiny-llama", _plan(shard=2, recompute="selective")),
    Packed("fsdp, compiled", "tiny-llama", _plan(shard=2, compile=True)),
    Packed("cp, compiled", "tiny-llama", _plan(cp=2, compile=True)),
    Packed("gpt cp", "tiny-gpt", _plan(cp=2)),
    Packed("gpt tp", "tiny-gpt", _plan(tp=2)),
    Packed("moe ep", "tiny-moe", _plan(shard=2, ep=2), BY_BIAS),
    Packed("moe cp × ep", "tiny-moe", _plan(cp=2, ep=2), BY_BIAS),
    Packed("moe ep, recompute selective", "tiny-moe", _plan(shard=2, ep=2, recompute="selective"), BY_BIAS),
    Packed("moe ep × tp × 1f1b", "tiny-moe", _plan(tp=2, pp=2, ep=2, microbatches=4), BY_BIAS),
    Packed("llama fsdp", "llama", _plan(shard=2)),
    Packed("llama tp", "llama", _plan(tp=2)),
    Packed("llama 1f1b, recompute full", "llama", _plan(pp=2, microbatches=4, recompute="full")),
    Packed("llama fsdp, compiled", "llama", _plan(shard=2, compile=True)),
    Packed("qwen3 zbv", "qwen3", _plan(pp=2, microbatches=4, schedule="zbv", per_rank=2)),
]
QUICK = ("accumulate 4", "cp × tp", "fsdp × 1f1b", "gpt cp", "moe ep", "llama 1f1b, recompute full")
