"""One of two ranks: a run in one session, the same over three worlds in one process, and one with tokens in parts."""

import json
import sys
from pathlib import Path

import torch

from danlu.comm.rendezvous import RankInfo, rendezvous
from danlu.session import Session
from danlu.spec.run_folder import RunFolder

STEPS, STOPS = 9, (3, 6)


class StopAt:
    """Asks to stop when the run's events say that a step is done."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def __call__(self) -> bool:
        self.left -= 1
        return self.left <= 0


def main() -> None:
    rank, world, port, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    info = RankInfo(rank=rank, world_size=world, local_rank=rank, endpoint=f"127.0.0.1:{port}", token=bytes(32))
    store = rendezvous(info)
    generation = 0
    for name, lives in (("one", (STEPS,)), ("three", (*STOPS, STEPS)), ("parts", (1,))):
        done, outcomes = 0, []
        for until in lives:
            with Session(RunFolder(folder / name), info, store=store, generation=generation) as session:
                assert session.world.generation == generation
                outcomes.append(session.train(StopAt(until - done)))
            done, generation = until, generation + 1
        (folder / f"{name}-{rank}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()
