"""Dry runs that never ran, in the proportions of a real one, for the tests of what people see of them."""

from collections.abc import Iterator

from danlu.cost.collectives import wire_bytes
from danlu.cost.pipeline_schedules import pipeline_actions
from danlu.cost.pipeline_simulator import parse_action
from danlu.spec.plan import PipelineSchedule
from danlu.spec.trace import CollectiveStats, DryRun, MemorySample, OperatorStats, Phase, Trace

GB = 1000**3
MB = 1000**2
WEIGHTS = {
    "attention.q": 2.0,
    "attention.k": 0.25,
    "attention.v": 0.25,
    "attention.core": 3.0,
    "attention.o": 2.0,
    "mlp.gate": 7.0,
    "mlp.up": 7.0,
    "mlp.down": 7.0,
}
"""FLOPs of every module of a block, against each other."""
LEVELS = ("node", "pod", "fabric")


def made_dryrun(
    *,
    places: int = 4,
    microbatches: int = 8,
    schedule: PipelineSchedule = "1f1b",
    stages_per_place: int = 1,
    layers: int = 8,
    recompute: bool = True,
    limit: int | None = 80 * GB,
    with_cluster: bool = True,
    run_places: int | None = None,
) -> DryRun:
    """A pipeline of `places` × replicate 4 × shard 32 × tp 8, of which the first `run_places` were run."""
    degrees = {"pp": places, "replicate": 4, "shard": 32, "cp": 1, "tp": 8, "ep": 1}
    order = pipeline_actions(schedule, pp_ranks=places, microbatches=microbatches, stages_per_rank=stages_per_place)
    ran = range(places if run_places is None else run_places)
    return DryRun(
        name="llama <70B> & co",
        cluster="h100-pod" if with_cluster else "",
        levels=LEVELS if with_cluster else (),
        memory_limit=limit,
        degrees=degrees,
        microbatches=microbatches,
        schedule=order if places > 1 else (),
        traces=tuple(
            _trace(place, places, order[place], layers, recompute, microbatches, with_cluster) for place in ran
        ),
    )


def _trace(
    place: int, places: int, order: tuple[str, ...], layers: int, recompute: bool, microbatches: int, with_cluster: bool
) -> Trace:
    every = list(_instants(place, order, layers, recompute))
    memory = tuple(every[:: max(1, len(every) // 300)])
    return Trace(
        rank=place * 1024,
        world=places * 1024,
        place={"pp": place, "replicate": 0, "shard": 0, "cp": 0, "tp": 0},
        stands_for=1024,
        folded=0,
        collectives=tuple(_collectives(places, layers, microbatches, with_cluster)),
        operators=tuple(_operators(place, places, layers, microbatches, recompute)),
        memory=memory,
        peak=max(every, key=lambda instant: instant.total),
        seconds=1.5 + place,
    )


def _instants(place: int, order: tuple[str, ...], layers: int, recompute: bool) -> Iterator[MemorySample]:
    """Activations grow with every forward and go with its backward; gathered parameters stay from the first on."""
    at, saved, gathered, gradients = 0, 0, 0, 0
    kept = 256 * MB if recompute else GB
    for text in order:
        action = parse_action(text)
        forward = action.kind == "F"
        phases: list[Phase] = ["forward"] if forward else ["recompute", "backward"] if recompute else ["backward"]
        numbers = range(layers) if forward else reversed(range(layers))
        for layer in numbers:
            gathered = max(gathered, (layer + 1) * 512 * MB if forward else layers * 512 * MB)
            for phase in phases:
                saved += kept if phase == "forward" else 0
                gradients = 6 * GB if phase == "backward" else gradients
                spike = {"forward": 768 * MB, "recompute": 2 * GB, "backward": 3 * GB}[phase]
                for module, extra in (("attention.q", spike // 2), ("mlp.down", spike)):
                    name = f"blocks.{place * layers + layer}.{module}"
                    held = (2 * GB, gathered, gradients, 4 * GB, saved + extra, 192 * MB if extra == spike else 0)
                    yield MemorySample(at=at, phase=phase, module=name, microbatch=action.microbatch, held=held)
                    at += 11
            saved -= 0 if forward else kept
    for _ in range(6):
        yield MemorySample(at=at, phase="optimizer", module="", held=(2 * GB, 0, GB, 4 * GB, 256 * MB, 0))
        at += 40


def _collectives(places: int, layers: int, microbatches: int, with_cluster: bool) -> Iterator[CollectiveStats]:
    def call(operation: str, size: int, axes: str, ranks: int, level: str, count: int) -> CollectiveStats:
        dtype = "bf16"
        return CollectiveStats(
            operation=operation,
            dtype=dtype,
            payload=size,
            wire=round(wire_bytes(operation, ranks, size)),
            axes=axes,
            ranks=ranks,
            level=level if with_cluster else "",
            count=count,
        )

    yield call("reduce_scatter", 64 * MB, "tp", 8, "node", 4 * layers * microbatches)
    yield call("all_gather", 8 * MB, "tp", 8, "node", 5 * layers * microbatches)
    yield call("all_gather", 16 * MB, "shard", 32, "pod", layers)
    yield call("all_gather", 4 * MB, "shard", 32, "pod", 1)
    yield call("reduce_scatter", 1024 * MB, "shard", 32, "pod", layers)
    yield call("all_reduce", 32 * MB, "replicate", 4, "pod", layers)
    if places > 1:
        yield call("send", 512 * MB, "pp", places, "fabric", microbatches)
        yield call("receive", 512 * MB, "pp", places, "fabric", microbatches)
    yield call("all_reduce", 12, "replicate·shard", 128, "pod", 1)
    yield call("all_reduce", 12, "world", 1024 * places, "fabric", 2)


def _operators(place: int, places: int, layers: int, microbatches: int, recompute: bool) -> Iterator[OperatorStats]:
    def operator(name: str, phase: Phase, module: str, flops: float, size: int, count: int) -> OperatorStats:
        shape = ("bf16[4096, 8192]",)
        return OperatorStats(
            name=name, phase=phase, module=module, inputs=shape, outputs=shape, flops=flops, bytes=size, count=count
        )

    phases: dict[Phase, int] = {"forward": 1, "backward": 2}
    if recompute:
        phases["recompute"] = 1
    for phase, times in phases.items():
        for module, weight in WEIGHTS.items():
            name = "aten._scaled_dot_product_attention" if module == "attention.core" else "aten.mm"
            calls = layers * microbatches * times
            yield operator(name, phase, f"blocks.*.{module}", weight * 1e11, 48 * MB, calls)
            yield operator("aten.view", phase, f"blocks.*.{module}", 0.0, 0, calls)
        for norm in ("norm_1", "norm_2"):
            yield operator("aten.mul", phase, f"blocks.*.{norm}", 0.0, 96 * MB, 3 * layers * microbatches * times)
        if place == places - 1 and phase != "recompute":
            yield operator("aten.mm", phase, "head", 2.6e12, 320 * MB, microbatches * times)
    yield operator("aten._foreach_mul_", "optimizer", "", 0.0, 2 * GB, 6)
