"""Layouts of modules that users bring, and the recipe they are trained with."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from brought import VOCABULARY

from danlu.spec.custom_model import CustomModel, TPStyleName
from danlu.spec.plan import Degrees, PipelineConfig, Plan
from danlu.spec.recipe import BatchConfig, DataConfig, LRSchedule, OptimizerConfig, Recipe

STEPS = 5

MAP: dict[str, TPStyleName] = {
    "token": "table",
    "layers.*.[qkv]": "column",
    "layers.*.out": "row",
    "layers.*.up": "column",
    "layers.*.down": "row",
    "score": "column",
}
"""How `PlainModel` is shared; its scores stay split, as the loss of a recipe can take them."""


@dataclass(frozen=True)
class Brought:
    name: str
    factory: str
    plan: Plan
    arguments: dict[str, Any] = field(default_factory=dict)
    tensor: dict[str, TPStyleName] = field(default_factory=dict)
    use_kernels: bool = False
    warns: str = ""
    """What a rank warns of, because the layout does not train as one process would."""

    @property
    def pieces(self) -> int:
        """Into how many microbatches the batch is cut over all ranks: dropout draws for each of them."""
        return self.plan.degrees.dp * self.plan.microbatches if self.arguments.get("dropout") else 1

    @property
    def reference(self) -> str:
        words = [f"{key}={value}" for key, value in sorted(self.arguments.items())]
        return "-".join([self.factory, *words, *([f"pieces={self.pieces}"] if self.pieces > 1 else [])])


def _layout(name: str, factory: str = "PlainModel", microbatches: int = 1, **settings: Any) -> Brought:
    pipeline = PipelineConfig(**settings.pop("pipeline", {}))
    degrees = Degrees(
        **{axis: settings.pop(axis) for axis in ("pp", "replicate", "shard", "tp", "ep") if axis in settings}
    )
    brought = {key: settings.pop(key) for key in ("arguments", "tensor", "use_kernels", "warns") if key in settings}
    plan = Plan(degrees=degrees, microbatches=microbatches, pipeline=pipeline, **settings)
    return Brought(name, factory, plan, **brought)


DROPOUT = {"dropout": 0.2}
ZBV = {"schedule": "zbv", "stages_per_rank": 2}
INTERLEAVED = {"schedule": "interleaved", "stages_per_rank": 2}
LAYOUTS = [
    _layout("one rank"),
    _layout("recompute", recompute="full"),
    _layout("compile", compile=True),
    _layout("tied", arguments={"tied": True}),
    _layout("llama", "llama"),
    _layout("shard 2", shard=2),
    _layout("shard 2, tied", shard=2, arguments={"tied": True}),
    _layout("replicate 2, accumulate 2", replicate=2, microbatches=2),
    _layout("shard 2, selective recompute", shard=2, recompute="selective"),
    _layout("shard 2, compile", shard=2, compile=True),
    _layout("tp 2", tp=2, tensor=MAP),
    _layout("pp 2", pp=2, microbatches=2),
    _layout("pp 2 interleaved", pp=2, microbatches=2, pipeline=INTERLEAVED, recompute="full"),
    _layout("pp 2 zbv", pp=2, microbatches=4, pipeline=ZBV),
    _layout("llama shard 2", "llama", shard=2),
    _layout("llama tp 2, its own plan", "llama", tp=2),
    _layout("llama pp 2", "llama", pp=2, microbatches=2),
    _layout("llama pp 2, recompute", "llama", pp=2, microbatches=2, recompute="full"),
    _layout("llama shard 2, tied", "llama", shard=2, arguments={"tie_word_embeddings": True}),
    _layout("qwen3 tp 2, its own plan", "qwen3", tp=2),
    _layout("gemma tp 2, its own plan", "gemma", tp=2),
    _layout("gemma shard 2, tp 2, its own plan", "gemma", shard=2, tp=2),
    _layout("llama tp 2, padded, its own plan", "llama", tp=2, arguments={"pad_token_id": 3}),
    _layout("llama tp 2, its own plan, tied", "llama", tp=2, arguments={"tie_word_embeddings": True}),
    _layout("tp 2, tied", tp=2, tensor=MAP, arguments={"tied": True}),
    # Dropout: each of these cuts the batch into two.
    _layout("dropout, one rank", microbatches=2, arguments=DROPOUT),
    _layout("dropout, shard 2", shard=2, arguments=DROPOUT),
    _layout("dropout, replicate 2, recompute", replicate=2, recompute="full", arguments=DROPOUT),
    _layout("dropout, tp 2", tp=2, tensor=MAP, microbatches=2, arguments=DROPOUT),
    _layout(
        "dropout inside of what tp shares",
        "InnerDropout",
        tp=2,
        tensor=MAP,
        microbatches=2,
        arguments=DROPOUT,
        warns="dropout masks repeat across tp ranks",
    ),
    _layout("dropout, pp 2", pp=2, microbatches=2, arguments=DROPOUT),
    _layout(
        "dropout, pp 2 interleaved, recompute",
        pp=2,
        microbatches=2,
        pipeline=INTERLEAVED,
        recompute="full",
        arguments=DROPOUT,
    ),
    _layout("dropout, shard 2, tp 2", shard=2, tp=2, tensor=MAP, arguments=DROPOUT),
    _layout("replicate 2, shard 2", replicate=2, shard=2),
    _layout("mixtral ep 2", "mixtral", shard=2, ep=2),
    _layout("mixtral shard 4, ep 2, tokens in 3 parts", "mixtral", shard=4, ep=2, dispatch_chunks=3),
    _layout(
        "mixtral shard 4, ep 4, tokens once, in 2 parts",
        "mixtral",
        shard=4,
        ep=4,
        token_dispatcher="deduplicated",
        dispatch_chunks=2,
    ),
    _layout("mixtral ep 2, accumulate 2, recompute", "mixtral", shard=2, ep=2, microbatches=2, recompute="full"),
    _layout("mixtral pp 2", "mixtral", pp=2, microbatches=2),
    _layout("mixtral ep 4", "mixtral", shard=4, ep=4),
    _layout("mixtral shard 4, ep 2", "mixtral", shard=4, ep=2),
    _layout("mixtral replicate 2, ep 2", "mixtral", replicate=2, shard=2, ep=2),
    _layout("mixtral pp 2, ep 2", "mixtral", pp=2, shard=2, ep=2, microbatches=2),
    _layout(
        "qwen3 mixture, pp 2 interleaved, ep 2", "qwen3_moe", pp=2, shard=2, ep=2, microbatches=2, pipeline=INTERLEAVED
    ),
    _layout("shard 2, tp 2", shard=2, tp=2, tensor=MAP),
    _layout("shard 2, tp 2, tied", shard=2, tp=2, tensor=MAP, arguments={"tied": True}),
    _layout("pp 2, shard 2", pp=2, shard=2, microbatches=2),
    _layout("llama pp 2, tp 2", "llama", pp=2, tp=2, microbatches=2),
    _layout("qwen3 shard 2, tp 2, recompute", "qwen3", shard=2, tp=2, recompute="full"),
    # Danlu's operators in their norms and MLPs.
    _layout("llama, kernels", "llama", use_kernels=True),
    _layout("llama shard 2, kernels, compile", "llama", shard=2, compile=True, use_kernels=True),
    _layout("llama shard 2, kernels, selective recompute", "llama", shard=2, recompute="selective", use_kernels=True),
    _layout("qwen3 tp 2, kernels", "qwen3", tp=2, use_kernels=True),
    _layout("llama pp 2, kernels, recompute", "llama", pp=2, microbatches=2, recompute="full", use_kernels=True),
    _layout("mixtral ep 2, kernels", "mixtral", shard=2, ep=2, use_kernels=True),
]


def recipe(layout: Brought, shards: str) -> Recipe:
    model = CustomModel(
        factory=f"brought:{layout.factory}",
        path=str(Path(__file__).parent),
        arguments=layout.arguments,
        vocabulary=VOCABULARY,
        tensor=layout.tensor,
        use_kernels=layout.use_kernels,
    )
    return Recipe(
        name="brought",
        seed=7,
        steps=STEPS,
        model=model,
        data=DataConfig(shards=shards),
        batch=BatchConfig(sequences=8, length=32),
        optimizer=OptimizerConfig(learning_rate=1e-3, epsilon=1e-5),
        schedule=LRSchedule(kind="constant"),
    )
