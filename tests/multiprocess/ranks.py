"""Start a set of real ranks once, and run many cases in it: importing torch is the slow part."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

TORCH_WARNS_ITSELF = (
    "`torch.jit.script_method` is deprecated",  # a module that torch.compile imports
    "The .grad attribute of a Tensor that is not a leaf",  # torch.compile looks at every tensor it meets
    "Warning: Profiler clears events",  # torch 2.12 and earlier, where a profiler runs for one cycle
    "<class 'torch.autograd.function.Function'> should not be instantiated",  # torch.compile does, to trace one
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(script: Path, world: int, *arguments: str, seconds: float) -> None:
    """Run `script rank world port …` once a rank; fails with the output of the first rank that failed."""
    port = str(free_port())
    paths = [str(script.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    quiet = ["-W", "error", *(word for message in TORCH_WARNS_ITSELF for word in ("-W", f"ignore:{message}"))]
    ranks = [
        subprocess.Popen(
            [sys.executable, *quiet, str(script), str(rank), str(world), port, *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    deadline = time.monotonic() + seconds
    try:
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{script.name} on {world} ranks took more than {seconds:.0f} s")
            time.sleep(0.05)
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
    outputs = [rank.communicate()[0] for rank in ranks]
    failed = [number for number, rank in enumerate(ranks) if rank.returncode not in (0, -9)]
    if failed:
        raise RuntimeError(f"rank {failed[0]} of {world} failed:\n{outputs[failed[0]]}")
