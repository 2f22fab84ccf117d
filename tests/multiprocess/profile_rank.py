"""One rank of the profile's truth test: profiled steps of the real loop, then the same step dry."""

import json
import sys
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from dryrun_rank import prepare
from layouts import LAYOUTS, recipe

from danlu.comm.rendezvous import RankInfo, rendezvous
from danlu.comm.world import World
from danlu.dryrun.dry_run import assume_balanced_routing, dry_run_rank
from danlu.dryrun.module_tracker import mask_layer_numbers
from danlu.framework.build import build_train_state
from danlu.framework.loop import TrainStages
from danlu.framework.stages import FixedData
from danlu.profiler import rank_profiler
from danlu.profiler.attribution import StepAttribution
from danlu.profiler.profiler_events import ProfilerEvent
from danlu.spec.profile import ProfileRequest, RankProfile
from danlu.spec.trace import Trace

STEPS = 2
PRODUCTS = ("mm", "addmm", "bmm", "_scaled_dot_product_flash_attention_for_cpu")


def measured_collectives(found: RankProfile) -> list[object]:
    """Calls of all steps together."""
    return sorted([call.operation, call.axes, call.payload, call.count] for call in found.collectives)


def dry_collectives(trace: Trace) -> list[object]:
    """The same as a dry run has it, of as many steps."""
    calls = Counter[tuple[str, str, int]]()
    for call in trace.collectives:
        calls[call.operation, call.axes, call.payload] += STEPS * call.count
    return sorted([*call, count] for call, count in calls.items())


def measured_products(steps: list[StepAttribution]) -> list[object]:
    """Matrix products by phase and module, innermost calls alone: one of DTensors holds that of local tensors."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for step in steps:
        for event, place in step.places.items():
            name = event.name.removeprefix("aten::")
            inside = [each for each in event.walk() if each is not event]
            if name in PRODUCTS and not any(each.name == event.name for each in inside):
                counts[name, place.phase, mask_layer_numbers(place.module)] += 1
    return sorted([*key, count] for key, count in counts.items())


def dry_products(trace: Trace) -> list[object]:
    """The same as a dry run has it, of as many steps."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for operator in trace.operators:
        if (name := operator.name.removeprefix("aten.")) in PRODUCTS:
            counts[name, operator.phase, operator.module] += STEPS * operator.count
    return sorted([*key, count] for key, count in counts.items())


def main() -> None:
    rank, world, port, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    place = RankInfo(rank=rank, world_size=world, local_rank=rank, endpoint=f"127.0.0.1:{port}", token=bytes(32))
    store = rendezvous(place)
    attributed: list[StepAttribution] = []
    original = rank_profiler.attribute_step

    def kept(step: ProfilerEvent, *args: object, **options: object) -> StepAttribution:
        attributed.append(original(step, *args, **options))  # type: ignore[arg-type]
        return attributed[-1]

    rank_profiler.attribute_step = kept
    chosen = [layout for layout in LAYOUTS if layout.name in sys.argv[5].split("|")]
    for number, layout in enumerate(chosen):
        made = recipe(layout.model, str(folder / "shards"), layout.changes)
        joined = World.join(place, "gloo", dist.PrefixStore(f"layout{number}", store))
        mesh, batches = prepare(layout, made, folder / "shards")
        state, forward_backward = build_train_state(made, mesh.plan, mesh)
        assume_balanced_routing(state)
        request = ProfileRequest(steps=STEPS, warmup=1, ranks=tuple(range(world)))
        attributed.clear()
        stages = TrainStages(FixedData(batches), forward_backward)
        found = rank_profiler.profile_rank(made, state, mesh, stages, request)
        assert found is not None
        joined.shutdown()
        dry = dry_run_rank(made, layout.plan, layout.cluster, rank)
        result = {
            "name": layout.name,
            "steps": [(step.seconds, step.parts) for step in found.steps],
            "collectives": [measured_collectives(found), dry_collectives(dry)],
            "products": [measured_products(attributed), dry_products(dry)],
        }
        (folder / f"profile-{number}-{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
