"""One of several ranks that train with injected spikes, and then without what was passed over."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from spiking import Injection, compare_with_reference, spike_recipe

from danlu.comm.rendezvous import RankInfo, rendezvous
from danlu.comm.world import World
from danlu.spec.plan import Degrees, Plan


def main() -> None:
    rank, world, port, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    place = RankInfo(rank=rank, world_size=world, local_rank=rank, endpoint=f"127.0.0.1:{port}", token=bytes(32))
    joined = World.join(place, "gloo", rendezvous(place))
    found: list[dict[str, Any]] = []
    for number, case in enumerate(json.loads((folder / "cases.json").read_text())):
        recipe = spike_recipe(case["steps"], case["policy"], spikes=case.get("spikes", {}))
        injections = [Injection(**each) for each in case["injections"]]
        outcome = compare_with_reference(
            recipe, folder / f"case-{number}", injections, Plan(degrees=Degrees(**case["degrees"]))
        )
        spikes = [spike.model_dump(exclude={"time", "lost_seconds"}) for spike in outcome.spikes]
        found.append(
            {
                "spikes": spikes,
                "missed": len(outcome.missed),
                "false_alarms": len(outcome.false_alarms),
                "equal": outcome.equal,
                "compared": outcome.compared,
            }
        )
    (folder / f"found-{rank}.json").write_text(json.dumps(found))
    joined.shutdown()


if __name__ == "__main__":
    main()
