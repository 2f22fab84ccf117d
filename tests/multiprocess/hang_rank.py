"""One rank that takes steps like a run's and hangs on request: RANK WORLD PORT FOLDER SECONDS.

A step computes, that is sleeps, for so many seconds.

A request is a file `hang-CAUSE-RANK` in FOLDER; the hang ends when the file is gone. Python's lock is kept for as many
seconds as the file says: who keeps it cannot look. A file `slow-RANK` says how many times as long a rank computes.
"""

import ctypes
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from danlu.comm.flight_record import FlightWriter, flight_path, make_flight_folder
from danlu.comm.flight_recorder import FlightRecorder
from danlu.resilience.stacks import dump_stacks_on_signal

PHASES = ("reading data", "forward and backward", "metrics", "update", "saving")
STUCK_IN = {"data": "reading data", "outside": "forward and backward", "storage": "saving", "python lock": "update"}
"""The phase in which each cause is injected; the rest are signals from outside."""


def main() -> None:
    rank, world, port, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    compute_seconds = float(sys.argv[5])
    torch.set_num_threads(1)
    make_flight_folder(folder)
    dump_stacks_on_signal(folder, rank)
    recorder = FlightRecorder(FlightWriter(flight_path(folder, rank), rank))
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    halves = [dist.new_group([member for member in range(world) if member % 2 == half]) for half in range(2)]
    mine, value, step = halves[rank % 2], torch.ones(64), 0
    while True:
        for phase in PHASES:
            recorder.enter_phase(phase, step)
            hang_if_asked(folder, rank, phase)
            if phase == "forward and backward":
                time.sleep(compute_seconds * slowness(folder, rank))
                dist.all_reduce(value, group=mine)
                value.zero_()
            elif phase == "metrics":
                stop = torch.tensor(int((folder / "stop").exists()))
                dist.all_reduce(stop, dist.ReduceOp.MAX)
        step += 1
        if stop:
            break
    recorder.close()
    dist.destroy_process_group()


def slowness(folder: Path, rank: int) -> float:
    try:
        return float((folder / f"slow-{rank}").read_text())
    except FileNotFoundError:
        return 1.0


def hang_if_asked(folder: Path, rank: int, phase: str) -> None:
    for cause, where in STUCK_IN.items():
        request = folder / f"hang-{cause}-{rank}"
        if where != phase or not request.exists():
            continue
        (folder / "hanging").touch()
        if cause == "python lock":
            seconds = int(request.read_text())
            request.unlink()
            ctypes.PyDLL(None).sleep(seconds)  # a C function that is called without letting go of the lock
        while request.exists():
            time.sleep(0.01)


if __name__ == "__main__":
    main()
