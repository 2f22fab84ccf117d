"""Danlu: train large models on the machines that are really there.

The command line is `danlu --help`; `danlu.train` and `danlu.dryrun` are its commands for Python. For a custom training
loop, see `danlu.parallelize`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from danlu.version import __version__

if TYPE_CHECKING:
    from danlu.comm.mpi_group import join_mpi
    from danlu.dryrun.api import dryrun
    from danlu.framework.api import Checkpointer, Guard, StepSampler, get_mesh, parallelize, plan, shard_batch
    from danlu.runs.train import TrainError, TrainResult, train

__all__ = [
    "Checkpointer",
    "Guard",
    "StepSampler",
    "TrainError",
    "TrainResult",
    "__version__",
    "dryrun",
    "get_mesh",
    "join_mpi",
    "parallelize",
    "plan",
    "shard_batch",
    "train",
]

_MODULES = dict.fromkeys(("TrainError", "TrainResult", "train"), "danlu.runs.train")
_MODULES["join_mpi"] = "danlu.comm.mpi_group"
_RENAMED = {"DataOrder": "StepSampler", "mesh_of": "get_mesh", "share": "shard_batch"}


def __getattr__(name: str) -> Any:
    """Import torch only when a name that needs it is used: the command line starts without it."""
    if name in _RENAMED:
        raise AttributeError(f"danlu.{name} is now called danlu.{_RENAMED[name]}")
    if name not in __all__:
        raise AttributeError(f"module 'danlu' has no attribute {name!r}")
    if name == "dryrun":
        return import_module("danlu.dryrun")  # can be called
    return getattr(import_module(_MODULES.get(name, "danlu.framework.api")), name)
