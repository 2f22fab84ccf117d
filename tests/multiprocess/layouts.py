"""The layouts whose training must equal that of one process."""

from dataclasses import dataclass, field
from typing import Any

from danlu.spec.catalog import catalog_entries
from danlu.spec.cluster import Chip, Cluster, NetworkLevel
from danlu.spec.model import Model
from danlu.spec.plan import Degrees, PipelineConfig, Plan
from danlu.spec.recipe import (
    BatchConfig,
    BatchRampStage,
    DataConfig,
    EmaConfig,
    LRSchedule,
    OptimizerConfig,
    PrecisionConfig,
    Recipe,
)
from danlu.spec.recompute import RecomputeLayers
from danlu.spec.toml import read

STEPS = 10


@dataclass(frozen=True)
class Layout:
    """A model and the plan it is trained with."""

    name: str
    model: str
    plan: Plan
    cluster: Cluster | None = None
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def reference(self) -> str:
        """Name of the single-process run this one must equal."""
        return "-".join([self.model, *(f"{key}={value}" for key, value in sorted(self.changes.items()))])


NETWORK = Cluster(
    name="two by two",
    chip=Chip(name="core", kind="cpu", memory=1, memory_bandwidth=1.0, peak={"fp32": 1.0}),
    levels=(
        NetworkLevel(name="node", fanout=2, bandwidth=1.0, latency=0.0),
        NetworkLevel(name="fabric", fanout=2, bandwidth=1.0, latency=0.0),
    ),
)
"""A network for layouts that choose their place on it; only its shape matters here."""

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "muon": {"kind": "muon", "newton_schulz_dtype": "fp32"},
    "muon, original": {"kind": "muon", "newton_schulz_dtype": "fp32", "adjust_learning_rate": "original"},
}
"""Optimizers by the name that a layout gives them: orthogonalized in fp32, since bf16 turns rounding into noise."""


def recipe(model: str, shards: str, changes: dict[str, Any] | None = None) -> Recipe:
    """Ten steps in fp32, with a learning rate that moves every parameter well past the tolerance.

    Epsilon is larger than usual: AdamW turns the sign of a gradient that is zero but for rounding
    (the bias of the keys is such a one) into a step of full length, which no two summation orders share.
    """
    values = read(catalog_entries("models")[model]).values | {"vocabulary": 264}
    optimizer: dict[str, Any] = {}
    precision, ema = PrecisionConfig(), None
    ramp: tuple[BatchRampStage, ...] = ()
    for key, value in (changes or {}).items():
        if key == "optimizer":
            optimizer = OPTIMIZERS[value]
        elif key == "ema":
            ema = EmaConfig(decay=value)
        elif key == "mtp":
            values["mtp"] = {"depth": value, "weight": 0.5}
        elif key == "compute":
            precision = PrecisionConfig(compute=value)
        elif key == "matmul":
            precision = PrecisionConfig(matmul=value, block=16)  # several in a matrix, whole ones in shards
        elif key == "ramp":
            ramp = tuple(BatchRampStage(until=until, sequences=sequences) for until, sequences in value)
        elif key == "moe_bias":
            values["moe"] = values["moe"] | {"bias": value}
        elif key in ("balance", "experts", "score", "shared"):
            values["moe"] = values["moe"] | {key: value}
        elif key == "q_lora_rank":
            values["mla"] = values["mla"] | {key: value}
        else:
            values[key] = value
    return Recipe(
        name=model,
        seed=7,
        steps=STEPS,
        model=Model.model_validate(values),
        data=DataConfig(shards=shards),
        batch=BatchConfig(sequences=16, length=32, ramp=ramp),
        optimizer=OptimizerConfig(learning_rate=1e-3, epsilon=1e-6, **optimizer),
        schedule=LRSchedule(kind="cosine", warmup=3),
        precision=precision,
        ema=ema,
    )


def _plan(microbatches: int = 1, schedule: Any = None, per_rank: int = 1, **settings: Any) -> Plan:
    degrees = Degrees(**{axis: settings.pop(axis) for axis in list(settings) if axis in Degrees.model_fields})
    pipeline = PipelineConfig(schedule=schedule or "1f1b", stages_per_rank=per_rank, layers=settings.pop("layers", ()))
    return Plan(degrees=degrees, microbatches=microbatches, pipeline=pipeline, **settings)


def _layouts() -> list[Layout]:
    made: list[Layout] = []

    def dense(name: str, **settings: Any) -> None:
        cluster = NETWORK if "mapping" in settings else None
        made.append(Layout(name, "tiny-llama", _plan(**settings), cluster))

    def gpt(name: str, changes: dict[str, Any] | None = None, **settings: Any) -> None:
        made.append(Layout(f"gpt {name}", "tiny-gpt", _plan(**settings), changes=changes or {}))

    def moe(name: str, changes: dict[str, Any] | None = None, **settings: Any) -> None:
        cluster = NETWORK if "mapping" in settings else None
        made.append(Layout(f"moe {name}", "tiny-moe", _plan(**settings), cluster, changes or {}))

    # One process.
    dense("accumulate 4", microbatches=4)
    moe("accumulate 4", microbatches=4)
    # Every axis alone.
    dense("fsdp", shard=2)
    dense("fsdp, kept gathered", shard=2, reshard_after_forward=False)
    dense("replicas", replicate=2)
    dense("tp", tp=2)
    dense("tp 4", tp=4)
    dense("cp", cp=2)
    dense("cp 8, key-value heads repeated", cp=8)
    gpt("tp", tp=2)
    gpt("cp", cp=2)
    gpt("tied, tp", {"tied": True}, tp=2)
    gpt("tied, fsdp", {"tied": True}, shard=2)
    moe("ep", shard=2, ep=2)
    once = {"token_dispatcher": "deduplicated"}
    moe("ep, deduplicated", shard=2, ep=2, **once)
    moe("ep 4 over two levels, deduplicated", shard=4, ep=4, mapping={"ep": {"node": 2, "fabric": 2}}, **once)
    moe("ep 4 over tp, deduplicated, recompute full", shard=2, tp=2, ep=4, recompute="full", **once)
    moe("1f1b × hsdp × ep, deduplicated", pp=2, replicate=2, shard=2, ep=2, microbatches=4, **once)
    moe("ep, deduplicated, in 2 parts", shard=2, ep=2, dispatch_chunks=2, **once)
    moe("ep 4 over two levels, deduplicated, in 3 parts", shard=4, ep=4, mapping={"ep": {"node": 2, "fabric": 2}},
        dispatch_chunks=3, **once)  # fmt: skip
    moe("zero-bubble × ep 4 over tp, deduplicated, in 2 parts", pp=2, shard=2, tp=2, ep=4, microbatches=4,
        schedule="zero-bubble", per_rank=2, dispatch_chunks=2, **once)  # fmt: skip
    moe("1f1b × hsdp × ep, deduplicated, in 4 parts, recompute full", pp=2, replicate=2, shard=2, ep=2, microbatches=4,
        recompute="full", dispatch_chunks=4, **once)  # fmt: skip
    moe("ep, deduplicated, compiled", shard=2, ep=2, compile=True, **once)
    moe("ep over cp × tp, deduplicated, selective", cp=2, tp=2, ep=4, recompute="selective", **once)
    moe("zbv × ep, deduplicated", pp=2, shard=2, ep=2, microbatches=4, schedule="zbv", per_rank=2, **once)
    moe("ep, deduplicated, balanced exactly", {"balance": "exact"}, shard=2, ep=2, **once)
    moe("ep, in 2 parts", shard=2, ep=2, dispatch_chunks=2)
    moe("fsdp × ep, in 3 parts", shard=4, ep=2, dispatch_chunks=3)
    moe("ep over cp × tp, in 4 parts, recompute full", cp=2, tp=2, ep=4, recompute="full", dispatch_chunks=4)
    moe("ep, in 2 parts, compiled", shard=2, ep=2, compile=True, dispatch_chunks=2)
    moe("zero-bubble × ep, in 2 parts", pp=2, shard=2, ep=2, microbatches=4, schedule="zero-bubble", per_rank=2,
        dispatch_chunks=2)  # fmt: skip
    moe("1f1b × hsdp × ep, in 2 parts, selective", pp=2, replicate=2, shard=2, ep=2, microbatches=4,
        recompute="selective", dispatch_chunks=2)  # fmt: skip
    moe("ep, balanced exactly", {"balance": "exact"}, shard=2, ep=2)
    moe("ep over cp × tp, balanced exactly", {"balance": "exact"}, cp=2, tp=2, ep=4)
    moe("ep, balanced by bias", {"balance": "bias", "score": "sigmoid"}, shard=2, ep=2)
    moe("ep 4", shard=4, ep=4)

    # Latent attention, with DeepSeek-V3's mixture and without.
    def latent(name: str, changes: dict[str, Any] | None = None, **settings: Any) -> None:
        made.append(Layout(f"mla {name}", "tiny-mla", _plan(**settings), changes=changes or {}))

    no_experts: dict[str, Any] = {"moe": None}
    latent("accumulate 4", microbatches=4)
    latent("ep over tp", tp=2, ep=2)
    latent("fsdp × tp × ep 4", shard=2, tp=2, ep=4)
    latent("fsdp × tp × ep 4, deduplicated", shard=2, tp=2, ep=4, **once)
    latent("cp × ep", cp=2, shard=2, ep=2)
    latent("1f1b × ep", pp=2, shard=2, ep=2, microbatches=4)
    latent("hsdp × cp × ep 4, selective", replicate=2, shard=2, cp=2, ep=4, recompute="selective")
    latent("muon fsdp × tp × 1f1b × ep", {"optimizer": "muon"}, shard=2, tp=2, pp=2, ep=4, microbatches=4)
    latent("dense, fsdp × tp", no_experts, shard=2, tp=2)
    latent("dense, hsdp, recompute full", no_experts, replicate=2, shard=2, recompute="full")
    latent("dense, tp × cp", no_experts, tp=2, cp=2)
    latent("dense, tp × zbv, regathered", no_experts, tp=2, pp=2, microbatches=4, schedule="zbv", per_rank=2,
           regather_inputs=True)  # fmt: skip
    latent("dense, tp, compiled", no_experts, tp=2, compile=True)
    latent("dense, queries direct, fsdp × tp", no_experts | {"q_lora_rank": None}, shard=2, tp=2)
    # Every schedule.
    dense("gpipe", pp=2, microbatches=4, schedule="gpipe")
    dense("1f1b", pp=2, microbatches=4)
    dense("1f1b, layers 3 + 1", pp=2, microbatches=4, layers=(3, 1))
    dense("1f1b, 4 stages", pp=4, microbatches=8)
    dense("interleaved", pp=2, microbatches=4, schedule="interleaved", per_rank=2)
    dense("zero-bubble", pp=2, microbatches=4, schedule="zero-bubble", per_rank=2)
    dense("zbv", pp=2, microbatches=4, schedule="zbv", per_rank=2)
    # Recompute and compile.
    dense("fsdp, recompute selective", shard=2, recompute="selective")
    dense("fsdp, recompute full", shard=2, recompute="full")
    by_layer = RecomputeLayers(full="0, 3", selective="2")
    dense("fsdp × 1f1b, recompute by layer", shard=2, pp=2, microbatches=4, recompute=by_layer)
    moe("ep, recompute by layer", shard=2, ep=2, recompute=by_layer)
    dense("fsdp, compiled", shard=2, compile=True)
    dense("fsdp, recompute selective, compiled", shard=2, recompute="selective", compile=True)
    dense("tp, compiled", tp=2, compile=True)
    dense("cp, compiled", cp=2, compile=True)
    moe("ep, compiled", shard=2, ep=2, compile=True)
    dense("zero-bubble, recompute full", pp=2, microbatches=4, schedule="zero-bubble", per_rank=2, recompute="full")
    moe("ep, recompute full", shard=2, ep=2, recompute="full")
    moe("ep, recompute selective", shard=2, ep=2, recompute="selective")
    # Logits of some of the vocabulary at a time.
    dense("one rank, loss in parts", loss_chunks=5)
    dense("tp, loss in parts", tp=2, loss_chunks=3)
    gpt("fsdp, accumulated, loss in parts", shard=2, microbatches=2, loss_chunks=4)
    dense("tp × cp, recompute full, loss in parts", tp=2, cp=2, loss_chunks=4, recompute="full")
    moe("ep × tp, loss in parts", shard=2, tp=2, ep=2, loss_chunks=2)
    # Inputs of tensor-parallel matrices gathered again.
    dense("tp, regathered", tp=2, regather_inputs=True)
    gpt("tp, regathered", tp=2, regather_inputs=True)
    dense("fsdp × tp, regathered", shard=2, tp=2, regather_inputs=True)
    dense("tp × zbv, regathered", tp=2, pp=2, microbatches=4, schedule="zbv", per_rank=2, regather_inputs=True)
    gpt(
        "fsdp × tp × zero-bubble, regathered",
        shard=2,
        tp=2,
        pp=2,
        microbatches=4,
        schedule="zero-bubble",
        per_rank=2,
        regather_inputs=True,
    )
    moe(
        "fsdp × tp × 1f1b, shared expert, regathered",
        {"shared": 1},
        shard=2,
        tp=2,
        pp=2,
        ep=4,
        microbatches=4,
        regather_inputs=True,
    )
    dense(
        "tp × 1f1b, recompute by layer, regathered",
        tp=2,
        pp=2,
        microbatches=4,
        recompute=by_layer,
        regather_inputs=True,
    )
    # Pairs.
    dense("hsdp", replicate=2, shard=2)
    dense("hsdp, accumulate 2", replicate=2, shard=2, microbatches=2)
    dense("fsdp × tp", shard=2, tp=2)
    dense("fsdp × cp", shard=2, cp=2)
    dense("fsdp × 1f1b", shard=2, pp=2, microbatches=4)
    dense("fsdp × zero-bubble", shard=2, pp=2, microbatches=4, schedule="zero-bubble", per_rank=2)
    dense("replicas × tp", replicate=2, tp=2)
    dense("replicas × 1f1b", replicate=2, pp=2, microbatches=4)
    dense("tp × cp", tp=2, cp=2)
    dense("tp × 1f1b", tp=2, pp=2, microbatches=4)
    dense("tp × zbv", tp=2, pp=2, microbatches=4, schedule="zbv", per_rank=2)
    dense("cp × interleaved", cp=2, pp=2, microbatches=4, schedule="interleaved", per_rank=2)
    dense("fsdp × tp, recompute full", shard=2, tp=2, recompute="full")
    gpt("tp × cp", tp=2, cp=2)
    moe("tp, experts whole", tp=2)
    moe("ep over tp", tp=2, ep=2)
    moe("fsdp × ep", shard=4, ep=2)
    moe("fsdp × ep, fewer experts than ranks", {"experts": 4}, shard=8, ep=2)
    moe("fsdp × tp × ep 4", shard=2, tp=2, ep=4)
    moe("cp × ep", cp=2, shard=2, ep=2)
    moe("1f1b × ep", pp=2, shard=2, ep=2, microbatches=4)
    moe("zero-bubble × ep", pp=2, shard=2, ep=2, microbatches=4, schedule="zero-bubble", per_rank=2)
    # Parameters, gradients and moments each whole (N), sharded in a group (I) or over all ranks (G).
    step: dict[str, Any] = {"microbatches": 2, "reduce_gradients": "step"}
    kept, over = {"reshard_after_forward": False}, {"shard_optimizer_over_replicas": True}
    dense("GNG: fsdp, reduced once", shard=2, **step)
    dense("NNG: fsdp, kept gathered, reduced once", shard=2, **kept, **step)
    dense("NNG: replicas, moments over all", replicate=2, **over)
    dense("NII: hsdp, kept gathered", replicate=2, shard=2, microbatches=2, **kept)
    dense("INI: hsdp, reduced once", replicate=2, shard=2, **step)
    dense("NNI: hsdp, kept gathered, reduced once", replicate=2, shard=2, **kept, **step)
    dense("IIG: hsdp, moments over all", replicate=2, shard=2, **over)
    dense("IIG: hsdp, moments over all, accumulate 2", replicate=2, shard=2, microbatches=2, **over)
    dense("NIG: hsdp, kept gathered, moments over all", replicate=2, shard=2, **kept, **over)
    dense("ING: hsdp, reduced once, moments over all", replicate=2, shard=2, **step, **over)
    dense("NNG: hsdp, kept gathered, reduced once, moments over all", replicate=2, shard=2, **kept, **step, **over)
    dense("IIG: hsdp × tp, moments over all", replicate=2, shard=2, tp=2, **over)
    dense("NNG: replicas × 1f1b, moments over all", replicate=2, pp=2, microbatches=4, **over)
    moe("GNG: fsdp × ep, reduced once", shard=4, ep=2, **step)
    moe("IIG: hsdp × cp × ep 4, moments over all", replicate=2, shard=2, cp=2, ep=4, **over)
    moe("ING: hsdp × ep over tp, reduced once, moments over all", replicate=2, shard=2, tp=2, ep=2, **step, **over)
    # Keys and values in a ring.
    ring = {"context_parallel": "ring"}
    dense("ring cp", cp=2, **ring)
    dense("ring cp 4", cp=4, **ring)
    dense("ring cp 8, fewer key-value heads than ranks", cp=8, **ring)
    dense("ring cp, accumulate 4, recompute full", cp=2, microbatches=4, recompute="full", **ring)
    dense("ring cp, recompute selective", cp=2, recompute="selective", **ring)
    dense("ring cp, compiled", cp=2, compile=True, **ring)
    dense("ring cp, recompute selective, compiled", cp=2, recompute="selective", compile=True, **ring)
    dense("tp × ring cp", tp=2, cp=2, **ring)
    dense("tp × ring cp, regathered", tp=2, cp=2, regather_inputs=True, **ring)
    dense("fsdp × ring cp", shard=2, cp=2, **ring)
    dense("ring cp × interleaved", cp=2, pp=2, microbatches=4, schedule="interleaved", per_rank=2, **ring)
    dense("ring cp × zbv", cp=2, pp=2, microbatches=4, schedule="zbv", per_rank=2, **ring)
    dense("fsdp × ring cp × tp", shard=2, cp=2, tp=2, **ring)
    gpt("ring cp", cp=2, **ring)
    moe("ring cp × ep", cp=2, shard=2, ep=2, **ring)
    moe("1f1b × ring cp × tp", pp=2, cp=2, tp=2, microbatches=4, **ring)
    # Axes laid across the network against their usual order.
    dense("tp across nodes", shard=2, tp=2, mapping={"tp": {"fabric": 2}})
    moe("ep across nodes, replicas of experts inside", shard=4, ep=2, mapping={"ep": {"fabric": 2}})
    # Triples.
    dense("fsdp × tp × 1f1b", shard=2, tp=2, pp=2, microbatches=4)
    dense("fsdp × cp × tp", shard=2, cp=2, tp=2)
    dense("hsdp × tp", replicate=2, shard=2, tp=2)
    moe("hsdp × cp × ep 4", replicate=2, shard=2, cp=2, ep=4)
    moe("tp × interleaved × ep", shard=2, tp=2, pp=2, ep=4, microbatches=4, schedule="interleaved", per_rank=2)
    moe("1f1b × cp × tp, a stage without experts", pp=2, cp=2, tp=2, microbatches=4, layers=(1, 3))
    # A batch that grows.
    ramp = {"ramp": ((3, 4), (6, 8))}
    gpt("hsdp, ramp", ramp, replicate=2, shard=2)
    gpt("fsdp × interleaved, ramp", {"ramp": ((4, 8),)}, shard=2, pp=2, microbatches=4, schedule="interleaved",
        per_rank=2)  # fmt: skip
    gpt("fsdp × 1f1b, ramp", {"ramp": ((4, 8),)}, shard=2, pp=2, microbatches=4)
    moe("ep, accumulate 2, ramp", {"ramp": ((3, 8),)}, shard=2, ep=2, microbatches=4)
    # Muon: matrices assembled from shards of every axis; experts whole, and sharded by their matrices.
    muon = {"optimizer": "muon"}

    def dense_muon(name: str, **settings: Any) -> None:
        made.append(Layout(f"muon {name}", "tiny-llama", _plan(**settings), changes=muon))

    dense_muon("accumulate 4", microbatches=4)
    dense_muon("fsdp", shard=2)
    dense_muon("fsdp 8", shard=8)
    dense_muon("replicas", replicate=2)
    dense_muon("tp", tp=2)
    dense_muon("cp", cp=2)
    dense_muon("1f1b", pp=2, microbatches=4)
    dense_muon("hsdp", replicate=2, shard=2)
    dense_muon("fsdp × tp", shard=2, tp=2)
    dense_muon("fsdp × zbv", shard=2, pp=2, microbatches=4, schedule="zbv", per_rank=2)
    dense_muon("hsdp × tp", replicate=2, shard=2, tp=2)
    gpt("muon tied, fsdp × tp", {"optimizer": "muon, original", "tied": True}, shard=2, tp=2)
    moe("muon ep", {"optimizer": "muon, original"}, shard=2, ep=2)
    moe("muon fsdp × ep", muon, shard=4, ep=2)
    moe("muon fsdp × ep, fewer experts than ranks", muon | {"experts": 4}, shard=8, ep=2)
    moe("muon ep over tp, shared expert", muon | {"shared": 1}, tp=2, ep=2)
    moe("muon hsdp × cp × ep 4", muon, replicate=2, shard=2, cp=2, ep=4)
    moe("muon fsdp × tp × 1f1b × ep", muon, shard=2, tp=2, pp=2, ep=4, microbatches=4)
    # Windows with sinks and capped scores; local and global layers with positions of their own, and Gemma's norms.
    sinks = {
        "window": 6,
        "global_every": 2,
        "local_rope_theta": 300.0,
        "sinks": True,
        "score_softcap": 4.0,
        "logit_softcap": 8.0,
    }
    gemma = {
        "window": 9,
        "global_every": 3,
        "local_rope_theta": 300.0,
        "qk_norm": True,
        "query_scalar": 20.0,
        "zero_centered_norm": True,
        "post_norms": True,
        "scaled_embedding": True,
        "activation": "geglu",
        "tied": True,
    }

    def changed(name: str, changes: dict[str, Any], **settings: Any) -> None:
        made.append(Layout(name, "tiny-llama", _plan(**settings), changes=changes))

    changed("sinks hsdp", sinks, replicate=2, shard=2)
    changed("sinks fsdp × tp, recompute selective", sinks, shard=2, tp=2, recompute="selective")
    changed("sinks tp × cp", sinks, tp=2, cp=2)
    changed("sinks cp × 1f1b, recompute full", sinks, cp=2, pp=2, microbatches=4, recompute="full")
    changed("sinks fsdp × tp × interleaved", sinks, shard=2, tp=2, pp=2, microbatches=4, schedule="interleaved",
            per_rank=2)  # fmt: skip
    changed("window fsdp × cp", {"window": 6}, shard=2, cp=2)
    changed("window tp × zbv", {"window": 6, "global_first": 1}, tp=2, pp=2, microbatches=4, schedule="zbv", per_rank=2)
    gpt_oss = sinks | {"bias": True, "moe_bias": True, "activation": "clamped_swiglu", "score_softcap": None}
    moe("gpt-oss ep over tp", gpt_oss, tp=2, ep=2)
    moe("gpt-oss 1f1b × cp × ep", gpt_oss, pp=2, cp=2, ep=2, microbatches=4)
    changed("gemma fsdp × tp", gemma, shard=2, tp=2)
    changed("gemma tp × cp", gemma, tp=2, cp=2)
    # Multi-token prediction: two modules, on the last stage with a copy of the embedding.
    ahead = {"mtp": 2}

    def dense_mtp(name: str, **settings: Any) -> None:
        made.append(Layout(f"mtp {name}", "tiny-llama", _plan(**settings), changes=ahead))

    dense_mtp("accumulate 4", microbatches=4)
    dense_mtp("fsdp", shard=2)
    dense_mtp("replicas", replicate=2)
    dense_mtp("tp", tp=2)
    dense_mtp("cp", cp=2)
    dense_mtp("ring cp", cp=2, context_parallel="ring")
    dense_mtp("1f1b", pp=2, microbatches=4)
    dense_mtp("gpipe, 4 stages", pp=4, microbatches=4, schedule="gpipe")
    dense_mtp("interleaved", pp=2, microbatches=4, schedule="interleaved", per_rank=2)
    dense_mtp("hsdp, accumulate 2", replicate=2, shard=2, microbatches=2)
    dense_mtp("fsdp, recompute selective, compiled", shard=2, recompute="selective", compile=True)
    dense_mtp("tp × 1f1b, recompute full, regathered", tp=2, pp=2, microbatches=4, recompute="full",
              regather_inputs=True)  # fmt: skip
    dense_mtp("tp × 1f1b", tp=2, pp=2, microbatches=4)
    dense_mtp("fsdp × cp × tp", shard=2, cp=2, tp=2)
    dense_mtp("fsdp × tp × 1f1b", shard=2, tp=2, pp=2, microbatches=4)
    gpt("mtp tied, fsdp × tp", ahead | {"tied": True}, shard=2, tp=2)
    gpt("mtp fsdp × 1f1b, ramp", ahead | {"ramp": ((4, 8),)}, shard=2, pp=2, microbatches=4)
    moe("mtp ep", ahead, shard=2, ep=2)
    moe("mtp fsdp × tp × 1f1b × ep", ahead | {"balance": "bias", "score": "sigmoid"}, shard=2, tp=2, pp=2, ep=4,
        microbatches=4)  # fmt: skip
    moe("mtp muon fsdp × tp × 1f1b × ep", ahead | muon, shard=2, tp=2, pp=2, ep=4, microbatches=4)
    return made


LAYOUTS = _layouts()
FP16_LAYOUTS = [
    Layout(f"fp16 {name}", model, layout, changes={"compute": "fp16"})
    for name, model, layout in (
        ("fsdp × tp", "tiny-llama", _plan(shard=2, tp=2)),
        ("1f1b", "tiny-llama", _plan(pp=2, microbatches=4)),
        ("ep", "tiny-moe", _plan(shard=2, ep=2)),
    )
]
"""The same in fp16 with a scaled loss, where sums in another order differ by what fp16 rounds."""
FP8_LAYOUTS = [
    Layout(f"{matmul} {name}", model, layout, changes={"matmul": matmul} | changes)
    for matmul, name, model, layout, changes in (
        ("fp8", "accumulate 4", "tiny-llama", _plan(microbatches=4), {}),
        ("fp8", "fsdp", "tiny-llama", _plan(shard=2), {}),
        ("fp8", "tp", "tiny-llama", _plan(tp=2), {}),
        ("fp8", "gpt tp", "tiny-gpt", _plan(tp=2), {}),
        ("fp8", "cp", "tiny-llama", _plan(cp=2), {}),
        ("fp8", "1f1b", "tiny-llama", _plan(pp=2, microbatches=4), {}),
        ("fp8", "zbv", "tiny-llama", _plan(pp=2, microbatches=4, schedule="zbv", per_rank=2), {}),
        ("fp8", "recompute selective", "tiny-llama", _plan(recompute="selective"), {}),
        ("fp8", "fsdp × tp, recompute full", "tiny-llama", _plan(shard=2, tp=2, recompute="full"), {}),
        ("mxfp8", "fsdp × tp", "tiny-llama", _plan(shard=2, tp=2), {}),
        ("mxfp8", "cp", "tiny-llama", _plan(cp=2), {}),
    )
]
FP8_MOE_LAYOUTS = [
    Layout(f"{matmul} {name}", model, layout, changes={"matmul": matmul})
    for matmul, name, model, layout in (
        ("fp8", "moe ep", "tiny-moe", _plan(shard=2, ep=2)),
        ("fp8", "moe ep over tp, recompute selective", "tiny-moe", _plan(tp=2, ep=2, recompute="selective")),
        ("fp8", "moe ep, deduplicated", "tiny-moe", _plan(shard=2, ep=2, token_dispatcher="deduplicated")),
        ("fp8", "moe ep, in 2 parts", "tiny-moe", _plan(shard=2, ep=2, dispatch_chunks=2)),
        ("fp8", "mla ep over tp", "tiny-mla", _plan(tp=2, ep=2)),
        ("mxfp8", "moe ep", "tiny-moe", _plan(shard=2, ep=2)),
    )
]
QUICK = (
    *("accumulate 4", "moe accumulate 4", "fsdp", "tp", "cp", "moe ep"),
    *("gpipe", "1f1b, layers 3 + 1", "interleaved", "zero-bubble", "zbv"),
    *("fsdp, recompute selective", "hsdp, accumulate 2", "fsdp × tp", "fsdp × tp, regathered"),
    *("NNG: fsdp, kept gathered, reduced once", "gpt fsdp, accumulated, loss in parts"),
    *("moe fsdp × ep, in 3 parts", "tp × ring cp", "muon fsdp × tp", "mtp tp × 1f1b", "mla fsdp × tp × ep 4"),
)
"""Layouts that every push trains: each axis, each schedule, and pairs; the others wait for `.ci/full`."""
