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
    chat: bool = False
    """On conversations, of which the loss counts the answers."""
    document_mask: bool = True
    use_kernels: bool = False
    """Of a module that is brought: it attends by Danlu's operator."""

    @property
    def shards(self) -> str:
        return "chat" if self.chat else "shards"

    @property
    def reference(self) -> str:
        """Name of the plain loop that this one must equal."""
        return "-".join([self.model, self.shards, *([] if self.document_mask else ["whole rows"])])

    @property
    def is_brought(self) -> bool:
        return self.model in ("llama", "qwen3")


def recipe(packed: Packed, folder: Path) -> Recipe:
    """A few steps in fp32 on rows that hold several documents each."""
    shards = str(folder / packed.shards)
    made = layouts.recipe("tiny-llama" if packed.is_brought else packed.model, shards, packed.changes)
    changes: dict[str, Any] = {
        "steps": STEPS,
        "batch": BatchConfig(sequences=8, length=32),
        "data": DataConfig(shards=shards, document_mask=packed.document_mask),
    }
    if packed.is_brought:
        here = str(Path(__file__).parent)
        changes["model"] = CustomModel(
            factory=f"brought:{packed.model}", path=here, vocabulary=VOCABULARY, use_kernels=packed.use_kernels
        )
    return made.model_copy(update=changes)


def _plan(microbatches: int = 1, schedule: Any = "1f1b", per_rank: int = 1, **settings: Any) -> Plan:
    degrees = Degrees(**{axis: settings.pop(axis) for axis in list(settings) if axis in Degrees.model_fields})
    pipeline = PipelineConfig(schedule=schedule, stages_per_rank=per_rank)
    return Plan(degrees=degrees, microbatches=microbatches, pipeline=pipeline, **settings)


BY_BIAS = {"balance": "bias", "score": "sigmoid"}
"""Experts without an auxiliary loss, which is over sequences and not over documents."""
RING: dict[str, Any] = {"context_parallel": "ring"}
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
    Packed("ring cp", "tiny-llama", _plan(cp=2, **RING)),
    Packed("ring cp 4", "tiny-llama", _plan(cp=4, **RING)),
    Packed("ring cp × tp", "tiny-llama", _plan(cp=2, tp=2, **RING)),
    Packed("ring cp × fsdp, recompute full", "tiny-llama", _plan(cp=2, shard=2, recompute="full", **RING)),
    Packed("ring cp, recompute selective", "tiny-llama", _plan(cp=2, recompute="selective", **RING)),
    Packed("ring cp × zbv", "tiny-llama", _plan(cp=2, pp=2, microbatches=4, schedule="zbv", per_rank=2, **RING)),
    Packed("ring cp, compiled", "tiny-llama", _plan(cp=2, compile=True, **RING)),
    Packed("gpt ring cp", "tiny-gpt", _plan(cp=2, **RING)),
    Packed("moe ring cp × ep", "tiny-moe", _plan(cp=2, ep=2, **RING), BY_BIAS),
    Packed("chat ring cp × 1f1b", "tiny-llama", _plan(cp=2, pp=2, microbatches=4, **RING), chat=True),
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
    Packed("llama tp, our operators", "llama", _plan(tp=2), use_kernels=True),
    Packed("llama fsdp, compiled, our operators", "llama", _plan(shard=2, compile=True), use_kernels=True),
    Packed(
        "llama 1f1b, recompute selective, our operators",
        "llama",
        _plan(pp=2, microbatches=4, recompute="selective"),
        use_kernels=True,
    ),
    Packed("chat fsdp × tp", "tiny-llama", _plan(shard=2, tp=2), chat=True),
    Packed("chat cp × 1f1b", "tiny-llama", _plan(cp=2, pp=2, microbatches=4), chat=True),
    Packed("chat, whole rows, tp", "tiny-llama", _plan(tp=2), chat=True, document_mask=False),
    Packed("chat, whole rows, llama fsdp", "llama", _plan(shard=2), chat=True, document_mask=False),
    Packed("qwen3 zbv", "qwen3", _plan(pp=2, microbatches=4, schedule="zbv", per_rank=2)),
]
QUICK = ("cp × tp", "fsdp × 1f1b", "moe ep", "llama 1f1b, recompute full")
