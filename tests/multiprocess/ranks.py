"""Start a set of real ranks once, and run many cases in it: importing torch is the slow part."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

FORK_RANKS = Path(__file__).with_name("fork_ranks.py")
TORCH_WARNS_ITSELF = (
    "`torch.jit.script_method` is deprecated",  # a module that torch.compile imports
    "The .grad attribute of a Tensor that is not a leaf",  # torch.compile looks at every tensor it meets
    "Warning",  # "Warning: Profiler clears events": torch 2.12 and earlier, where a profiler runs for one cycle
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
    command = [sys.executable, *quiet, str(FORK_RANKS), str(script), str(world), port, *arguments]
    # A session of its own: a rank that hangs is ended together with the process that forked it.
    ranks = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = ranks.communicate(timeout=seconds)
    except BaseException as error:
        os.killpg(ranks.pid, signal.SIGKILL)
        ranks.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise TimeoutError(f"{script.name} on {world} ranks took more than {seconds:.0f} s") from None
        raise
    if ranks.returncode:
        raise RuntimeError(output)
